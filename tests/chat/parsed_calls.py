"""Calls as a server reads them back from a model's text: a small parser for each syntax, without
provenance.
"""

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

_DECODER = json.JSONDecoder()


class Raw(str):
    """A value that stands in the text without quotes: a text, or the JSON of anything else."""


def parsed_calls(text: str) -> list[tuple[str, Any]]:
    """(name, arguments) of all calls in a text, in order; arguments may hold `Raw` values."""
    for parse in (
        _in_tags,
        _in_argument_tags,
        _of_gemma,
        _to_functions,
        _in_code_blocks,
        _in_python,
        _in_json,
    ):
        if found := list(parse(text)):
            return found
    return []


def is_same(found: Any, expected: Any) -> bool:
    """Whether parsed arguments are the expected ones, types included."""
    if isinstance(found, Raw):
        if isinstance(expected, str):
            return str(found) == expected
        try:
            return is_same(json.loads(found), expected)
        except ValueError:
            return False
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and set(map(str, found)) == set(expected)
            and all(is_same(found[key], expected[str(key)]) for key in found)
        )
    if isinstance(expected, list):
        same_length = isinstance(found, list) and len(found) == len(expected)
        return same_length and all(is_same(*pair) for pair in zip(found, expected, strict=True))
    if isinstance(expected, bool) or isinstance(found, bool) or expected is None:
        return found is expected
    return bool(found == expected)


def _in_tags(text: str) -> Iterator[tuple[str, Any]]:
    """<function=name><parameter=key>value</parameter></function>."""
    for call in re.finditer(r"<function=([^>\n]+)>\n(.*?)</function>", text, re.DOTALL):
        pairs = re.findall(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>", call[2], re.DOTALL)
        yield call[1], {key: Raw(value) for key, value in pairs}


def _in_argument_tags(text: str) -> Iterator[tuple[str, Any]]:
    """<tool_call>name <arg_key>key</arg_key> <arg_value>value</arg_value></tool_call>."""
    if "<tool_call>" not in text or re.search(r"<tool_call>\s*\{", text):
        return
    for call in re.finditer(r"<tool_call>([^\n<{]+)\n(.*?)</tool_call>", text, re.DOTALL):
        pairs = re.findall(
            r"<arg_key>(.*?)</arg_key>\n<arg_value>(.*?)</arg_value>", call[2], re.DOTALL
        )
        yield call[1], {key: Raw(value) for key, value in pairs}


def _of_gemma(text: str) -> Iterator[tuple[str, Any]]:
    """call:name{key:<|"|>text<|"|>,other:3}."""
    for call in re.finditer(r"<\|tool_call>call:([^{]+)", text):
        value, _ = _gemma_value(text, call.end())
        yield call[1], value


def _gemma_value(text: str, at: int) -> tuple[Any, int]:
    quote = '<|"|>'
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        return text[at + len(quote) : end], end + len(quote)
    if text[at] in "{[":
        closing, items, at = {"{": "}", "[": "]"}[text[at]], [], at + 1
        while text[at] != closing:
            key = None
            if closing == "}":
                end = text.index(":", at)
                key, at = text[at:end].removeprefix(quote).removesuffix(quote), end + 1
            value, at = _gemma_value(text, at)
            items.append((key, value))
            at += text[at] == ","
        return (dict(items) if closing == "}" else [value for _, value in items]), at + 1
    found = re.compile(r"[^,{}\[\]]*").match(text, at)
    return (Raw(found[0]) if found else Raw("")), found.end() if found else at


def _to_functions(text: str) -> Iterator[tuple[str, Any]]:
    """to=functions.name<|channel|>commentary json<|message|>{…}<|call|>."""
    for call in re.finditer(r"to=functions\.([^<\s]+).*?<\|message\|>", text):
        yield call[1], _json_at(text, call.end())


def _in_code_blocks(text: str) -> Iterator[tuple[str, Any]]:
    """<｜tool▁sep｜>name, then JSON in a code block."""
    for call in re.finditer(r"<｜tool▁sep｜>([^\n`]+)\n```json\n", text):
        yield call[1], _json_at(text, call.end())


def _in_python(text: str) -> Iterator[tuple[str, Any]]:
    """[name(key=value, other=3)]; texts may be without quotes."""
    for listed in re.finditer(r"\[(?=\w+\()(.*)\]", text, re.DOTALL):
        for call in re.finditer(r"(\w+)\((.*?)\)(?=, \w+\(|\Z)", listed[1], re.DOTALL):
            pairs = re.findall(r"([^\s=,]+)=(.*?)(?=, [^\s=,]+=|\Z)", call[2], re.DOTALL)
            yield call[1], {key: _python_value(value) for key, value in pairs}


def _python_value(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return Raw(text)
    return Raw(text) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _in_json(text: str) -> Iterator[tuple[str, Any]]:
    """{"name": …, "arguments": {…}}, or parameters; and name[ARGS]{…} of Mistral."""
    of_mistral = list(re.finditer(r"\[TOOL_CALLS\]([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]", text))
    yield from ((call[1], _json_at(text, call.end())) for call in of_mistral)
    at = len(text) if of_mistral else 0
    while (at := text.find("{", at)) >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except ValueError:
            at += 1
            continue
        name = value.get("name", value.get("tool_name")) if isinstance(value, dict) else None
        arguments = (
            value.get("arguments", value.get("parameters")) if isinstance(value, dict) else None
        )
        if isinstance(name, str) and arguments is not None:
            yield name, arguments
            at = end
        else:
            at += 1


def _json_at(text: str, at: int) -> Any:
    try:
        return _DECODER.raw_decode(text, at)[0]
    except ValueError:
        return Raw(text[at : at + 40])
