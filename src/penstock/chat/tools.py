"""Tools and tool calls, from every form that records use to the one that chat templates expect.

Arrow cannot hold objects of differing shape, so published datasets keep tools, their parameters and call arguments as
JSON text, at any of these depths; each is decoded where it is JSON and due as an object.
"""

import json
from collections.abc import Mapping
from typing import Any

from penstock.errors import ConversationError


def read_tools(value: Any, where: str) -> tuple[dict[str, Any], ...] | None:
    """The tools of a record: a list, or its JSON text; of objects, or their JSON text. None where there are none.

    Raises:
        ConversationError: not JSON, or a tool without a name.
    """
    if isinstance(value, str):
        value = _decode(value, where, "its tools", "a list of tools") if value.strip() else None
    if isinstance(value, Mapping):
        value = [value]
    if value is None or (isinstance(value, list | tuple) and not value):
        return None
    if not isinstance(value, list | tuple):
        raise ConversationError(f"{where}: its tools are {_kind(value)}; due a list of tools, or its JSON text")
    return tuple(_read_tool(tool, f"{where}: tool {index}") for index, tool in enumerate(value))


def _read_tool(tool: Any, where: str) -> dict[str, Any]:
    if isinstance(tool, str):
        tool = _decode(tool, where, "its text", "an object")
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConversationError(
            f'{where} has no name; due {{"type": "function", "function": {{"name": …, "parameters": …}}}}'
        )
    function = {
        key: item for key, item in function.items() if item is not None and (key != "type" or "function" in tool)
    }
    if isinstance(function.get("parameters"), str):
        function["parameters"] = _decode(function["parameters"], where, "its parameters", "an object")
    outer = {key: item for key, item in tool.items() if item is not None} if "function" in tool else {}
    return {"type": "function", **outer, "function": function}


def read_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """The tool calls of a message: one or a list, or the JSON text of either; wrapped in `function` or bare.

    Arguments stay as the record has them; `forms` gives templates other forms.

    Raises:
        ConversationError: not JSON, or a call without a name.
    """
    if isinstance(value, str):
        value = _decode(value, where, "its tool call", '{"name": …, "arguments": {…}}')
    calls = [value] if isinstance(value, Mapping) else value
    if not isinstance(calls, list | tuple):
        raise ConversationError(f"{where} has tool calls that are {_kind(value)}; due a list of calls")
    return [_read_call(call, f"{where}, tool call {index},") for index, call in enumerate(calls)]


def _read_call(call: Any, where: str) -> dict[str, Any]:
    if isinstance(call, str):
        call = _decode(call, where, "its text", "an object")
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConversationError(f'{where} has no name; due {{"name": …, "arguments": {{…}}}}, bare or under "function"')
    arguments = function.get("arguments")
    if arguments is None:  # some records call them parameters, and calls without any have neither
        arguments = function.get("parameters")
    if arguments is None:
        arguments = {}
    outer = {key: item for key, item in call.items() if item is not None} if "function" in call else {}
    if "id" in call and call["id"] is not None:
        outer["id"] = call["id"]
    return {"type": "function", **outer, "function": {"name": function["name"], "arguments": arguments}}


def _decode(text: str, where: str, what: str, due: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConversationError(f"{where.rstrip(',')}: {what}: no JSON ({error}); due {due}") from None


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}"
