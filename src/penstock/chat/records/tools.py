"""Tools and tool calls, from every form that records use to the one that chat templates expect.

Arrow cannot hold objects of different shapes, so many published datasets keep tools, their
parameters and arguments of calls as JSON text, at any depth. JSON text is decoded wherever an
object is expected.

`shorten_ids` gives calls ids of nine letters and digits: Mistral's templates raise on any other id,
and few published tool sets have such. An id is a function of the call and its place. So ids look as
varied to the model as in real traffic, and preparing again gives the same bytes.
"""

import hashlib
import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ConversationError
from penstock.core.json_values import JsonObject, JsonValue

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
LENGTH = 9
SCHEMAS = ("input_schema", "inputSchema")


def read_tools(value: object, where: str) -> tuple[JsonObject, ...] | None:
    """The tools of a record: a list of objects, where the list or each object may be JSON text.
    None: no tools.

    Raises:
        ConversationError: Text is not JSON, or a tool has no name.
    """
    if isinstance(value, str):
        value = _decode(value, where, "its tools", "a list of tools") if value.strip() else None
    if isinstance(value, Mapping):
        value = [value]
    if value is None or (isinstance(value, list | tuple) and not value):
        return None
    if not isinstance(value, list | tuple):
        raise ConversationError(
            f"{where}: its tools are {_kind(value)}; expected a list of tools, or its JSON text"
        )
    return tuple(_read_tool(tool, f"{where}: tool {index}") for index, tool in enumerate(value))


def _read_tool(tool: Any, where: str) -> JsonObject:
    if isinstance(tool, str):
        tool = _decode(tool, where, "its text", "an object")
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConversationError(
            f'{where} has no name; expected {{"type": "function", "function": {{"name": …, '
            '"parameters": …}}'
        )
    function = {
        key: item
        for key, item in function.items()
        if item is not None and (key != "type" or "function" in tool)
    }
    for name in SCHEMAS:  # as Anthropic's API and MCP call them
        if name in function and "parameters" not in function:
            function["parameters"] = function.pop(name)
    if isinstance(function.get("parameters"), str):
        function["parameters"] = _decode(
            function["parameters"], where, "its parameters", "an object"
        )
    outer = (
        {key: item for key, item in tool.items() if item is not None} if "function" in tool else {}
    )
    return {"type": "function", **outer, "function": function}


def read_calls(value: object, where: str) -> list[JsonObject]:
    """The tool calls of a message: one or a list, or the JSON text of either; wrapped in `function`
    or bare.

    Arguments stay as the record has them, an object or its JSON text; `forms.py` changes them for
    templates that need the other. An empty text, which many servers give for a call without
    arguments, is an empty object.

    Raises:
        ConversationError: Text is not JSON, a call has no name, or its arguments are no object.
    """
    if isinstance(value, str):
        value = _decode(value, where, "its tool call", '{"name": …, "arguments": {…}}')
    calls = [value] if isinstance(value, Mapping) else value
    if not isinstance(calls, list | tuple):
        raise ConversationError(
            f"{where} has tool calls that are {_kind(value)}; expected a list of calls"
        )
    return [_read_call(call, f"{where}, tool call {index},") for index, call in enumerate(calls)]


def _read_call(call: Any, where: str) -> JsonObject:
    if isinstance(call, str):
        call = _decode(call, where, "its text", "an object")
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConversationError(
            f'{where} has no name; expected {{"name": …, "arguments": {{…}}}}, bare or under '
            '"function"'
        )
    arguments = function.get("arguments")
    if arguments is None:  # some records call them parameters, and calls without any have neither
        arguments = function.get("parameters")
    _check_arguments(arguments, f"{where} {function['name']}:")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    outer = (
        {key: item for key, item in call.items() if item is not None} if "function" in call else {}
    )
    if "id" in call and call["id"] is not None:
        outer["id"] = call["id"]
    return {
        "type": "function",
        **outer,
        "function": {"name": function["name"], "arguments": arguments},
    }


def _check_arguments(arguments: object, where: str) -> None:
    """Check that arguments are an object, or the JSON text of one, or nothing."""
    if (
        arguments is None
        or isinstance(arguments, Mapping)
        or (isinstance(arguments, str) and not arguments.strip())
    ):
        return
    reason = ""
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            reason = f" ({error})"
        else:
            if isinstance(value, dict):
                return
    raise ConversationError(
        f"{where} its arguments are {_kind(arguments)}{reason}; expected an object such as "
        f'{{"city": "Oslo"}}, or its '
        "JSON text; repair the record or skip it"
    )


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _decode(text: str, where: str, what: str, expected: str) -> JsonValue:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConversationError(
            f"{where.rstrip(',')}: {what}: not JSON ({error}); expected {expected}"
        ) from None


def _kind(value: object) -> str:
    return f"{type(value).__name__} {value!r:.60}"


def shorten_ids(messages: list[JsonObject]) -> list[JsonObject]:
    """The messages with an id of nine characters for each call and its result.

    A result is matched by its old id; a result without an id takes the first call without a result.
    A result that answers no call keeps its id, which the template may refuse.
    """
    waiting: deque[tuple[Any, str]] = (
        deque()
    )  # the old id of each call without a result, and its new one
    shortened = []
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            calls = []
            for place, call in enumerate(message["tool_calls"]):
                new = _short_id(index, place, call["function"])
                waiting.append((call.get("id"), new))
                calls.append({**call, "id": new})
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            old = message.get("tool_call_id")
            answered = next((pair for pair in waiting if old is None or pair[0] == old), None)
            if answered is not None:
                waiting.remove(answered)
                message = {**message, "tool_call_id": answered[1]}
        shortened.append(message)
    return shortened


def _short_id(message: int, place: int, function: JsonObject) -> str:
    digest = hashlib.blake2b(repr((message, place, function)).encode(), digest_size=8).digest()
    number, characters = int.from_bytes(digest, "little"), []
    for _ in range(LENGTH):
        number, digit = divmod(number, len(_DIGITS))
        characters.append(_DIGITS[digit])
    return "".join(characters)
