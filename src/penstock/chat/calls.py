"""Calls of functions in the text of a reply, in the formats of the known families of models.

The family follows from the chat template, which shows the model the format. What stands before the
first call is the reply's content. A reply with anything malformed is content as a whole, so that
nothing is lost.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from penstock.core.json_values import JsonObject

Tools = Sequence[Mapping[str, Any]]
"""As in a request: {"type": "function", "function": {"name": …, "parameters": a JSON schema}}."""
_PYTHON = {"True": True, "False": False, "None": None}


@final
@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function."""

    name: str
    arguments: str
    """A JSON object, as text."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How models of a family write calls."""

    name: str
    shown: tuple[str, ...]
    """Texts that are all in the templates of the family."""
    begins: tuple[str, ...]
    """Texts one of which begins a call."""
    parse: Callable[[str, Tools], list[Call]]
    """All calls of a text that begins with one; ValueError: it holds something else."""
    marks: tuple[str, ...] = ()
    """Further texts in the format that may be control tokens."""
    at_start: bool = False
    """Whether calls only stand at the beginning of a reply."""


def family_of(template: str) -> Family | None:
    """The family of models that a chat template was written for; None: it is not known."""
    return next((one for one in FAMILIES if all(text in template for text in one.shown)), None)


@final
class Splitter:
    """Divides a reply into content and calls while it streams.

    Args:
        family: How calls are written; None: there are none.
        tools: What may be called.
        most: Number of calls that are taken, the first ones; None: all.
    """

    def __init__(self, family: Family | None, tools: Tools, most: int | None = None) -> None:
        self._family, self._tools, self._most = family, tools, most
        self._held = ""
        self._said = self._calls = False

    def push(self, text: str) -> str:
        """Take more text; returns what is content for certain."""
        self._held += text
        if self._family is None or (self._said and self._family.at_start):
            text, self._held = self._held, ""
            return text
        if self._calls:
            return ""
        # White space before a call is no content.
        content = self._held[: self._begin(self._family)].rstrip()
        self._held = self._held[len(content) :]
        self._said = self._said or bool(content)
        return content

    def finish(self) -> tuple[str, list[Call]]:
        """At the end of the reply: the rest of the content, and the calls."""
        held, self._held = self._held, ""
        if not self._calls or self._family is None:
            return held, []
        try:
            found = self._family.parse(held.strip(), self._tools)
        except (ValueError, KeyError, TypeError, RecursionError):
            return held, []
        return ("", found[: self._most]) if found else (held, [])

    def _begin(self, family: Family) -> int:
        """Where calls begin, or may begin; sets `_calls`."""
        if family.at_start and self._held.strip():
            start = len(self._held) - len(self._held.lstrip())
            self._calls = self._held.startswith(family.begins, start)
            if self._calls or any(begin.startswith(self._held[start:]) for begin in family.begins):
                return start
            return len(self._held)
        places = [place for begin in family.begins if (place := self._held.find(begin)) >= 0]
        if places:
            self._calls = True
            return min(places)
        longest = max(map(len, family.begins)) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(begin.startswith(self._held[-count:]) for begin in family.begins):
                return len(self._held) - count
        return len(self._held)


def _hermes(text: str, tools: Tools) -> list[Call]:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, of Hermes and Qwen."""
    return [_call(found) for found in _between(text, "<tool_call>", "</tool_call>", _json)]


def _coder(text: str, tools: Tools) -> list[Call]:
    """<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>, of Qwen 3
    Coder.
    """
    if not text.startswith("<tool_call>"):
        text = "".join(
            f"<tool_call>{part}"
            for part in re.findall(r"<function=.*?</function>\s*|.+\Z", text, re.DOTALL)
        )

    def one(rest: str) -> tuple[Call, str]:
        name, body, rest = _match(r"<function=([^>\n]+)>(.*?)</function>", rest)
        values: JsonObject = {}
        while body.strip():
            key, value, body = _match(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", body)
            values[key] = _typed(value, name, key, tools)
        return Call(name, _compact(values)), rest

    return _between(text, "<tool_call>", "</tool_call>", one)


def _glm(text: str, tools: Tools) -> list[Call]:
    """<tool_call>NAME <arg_key>NAME</arg_key><arg_value>VALUE</arg_value></tool_call>, of GLM 4."""

    def one(rest: str) -> tuple[Call, str]:
        name, rest = _match(r"([^<\s]+)", rest)
        values: JsonObject = {}
        while rest.lstrip().startswith("<arg_key>"):
            key, value, rest = _match(
                r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", rest
            )
            values[key] = _typed(value, name, key, tools)
        return Call(name, _compact(values)), rest

    return _between(text, "<tool_call>", "</tool_call>", one)


def _mistral(text: str, tools: Tools) -> list[Call]:
    """[TOOL_CALLS][{"name": …, "arguments": {…}}, …], or later [TOOL_CALLS]NAME[ARGS]{…} for each
    call.
    """
    first, rest = text.removeprefix("[TOOL_CALLS]").strip(), ""
    if first.startswith("["):
        listed, rest = _json(first)
        if rest.strip():
            raise ValueError(rest)
        return [_call(found) for found in listed]

    def one(rest: str) -> tuple[Call, str]:
        name, rest = _match(r"([^\[{\s]+)(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?", rest)
        arguments, rest = _json(rest)
        return _call({"name": name, "arguments": arguments}), rest

    return _between(text, "[TOOL_CALLS]", "", one)


def _llama(text: str, tools: Tools) -> list[Call]:
    """{"name": …, "parameters": {…}}, of Llama 3; it has no mark of its own, so the name must be
    that of a tool.
    """
    rest, found = text.removeprefix("<|python_tag|>"), []
    names = {tool["function"]["name"] for tool in tools}
    while rest.strip():
        given, rest = _json(rest)
        call = _call(given)
        if call.name not in names:
            raise ValueError(call.name)
        found.append(call)
        rest = rest.lstrip().removeprefix(";")
    return found


def _forced(text: str, tools: Tools) -> list[Call]:
    """[{"name": …, "arguments": {…}}, …], of `forced_schema`."""
    listed, rest = _json(text)
    if rest.strip():
        raise ValueError(rest)
    return [_call(found) for found in listed]


def _deepseek(text: str, tools: Tools) -> list[Call]:
    """Marks around each call and around all; V3 has `function` and a fenced block of JSON, V3.1
    neither.
    """

    def one(rest: str) -> tuple[Call, str]:
        name, rest = _match(r"(?:function<｜tool▁sep｜>)?([^<\n]+?)(?:<｜tool▁sep｜>|\n)", rest)
        fenced = rest.lstrip().startswith("```json")
        arguments, rest = _json(rest.lstrip().removeprefix("```json"))
        if fenced:
            _, rest = _match(r"(```)", rest)
        return _call({"name": name, "arguments": arguments}), rest

    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    inside = text.removeprefix(begin).strip().removesuffix(end)
    return _between(inside, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", one)


FAMILIES = (
    Family(
        name="glm",
        shown=("<tool_call>", "<arg_key>"),
        begins=("<tool_call>",),
        parse=_glm,
        marks=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    Family(
        name="qwen-coder",
        shown=("<function=", "<parameter="),
        begins=("<tool_call>", "<function="),
        parse=_coder,
        marks=("</tool_call>",),
    ),
    Family(
        name="hermes",
        shown=("<tool_call>",),
        begins=("<tool_call>",),
        parse=_hermes,
        marks=("</tool_call>",),
    ),
    Family(
        name="deepseek",
        shown=("<｜tool▁calls▁begin｜>",),
        begins=("<｜tool▁calls▁begin｜>",),
        parse=_deepseek,
        marks=(
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
    ),
    Family(
        name="mistral",
        shown=("[TOOL_CALLS]",),
        begins=("[TOOL_CALLS]",),
        parse=_mistral,
        marks=("[ARGS]", "[CALL_ID]"),
    ),
    Family(
        name="llama",
        shown=("dictionary of argument",),
        begins=("<|python_tag|>", "{"),
        parse=_llama,
        at_start=True,
    ),
)
"""From the most particular to the most general."""


FORCED = Family(name="forced", shown=(), begins=("[",), parse=_forced, at_start=True)
"""How any model writes calls under `forced_schema`."""


def forced_schema(tools: Tools, most: int | None) -> JsonObject:
    """A JSON schema of replies that are calls, at least one.

    Args:
        tools: One of which each call must name; its arguments meet the tool's own schema.
        most: Number of calls; None: any number.
    """
    limit = {} if most is None else {"maxItems": most}
    parameters = {
        f"tool{place}": _moved(
            _of_object(tool["function"].get("parameters") or {}), f"#/$defs/tool{place}"
        )
        for place, tool in enumerate(tools)
    }
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": {"$ref": f"#/$defs/tool{place}"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for place, tool in enumerate(tools)
    ]
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **limit, "$defs": parameters}


def _of_object(schema: JsonObject) -> JsonObject:
    """A schema of arguments, which are an object also where it does not say so."""
    return {"type": "object", **schema}


def _moved(schema: object, place: str) -> Any:
    """A schema whose references are right where it becomes a part of another one."""
    if isinstance(schema, dict):
        return {
            name: place + value[1:]
            if name == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for name, value in schema.items()
        }
    return [_moved(value, place) for value in schema] if isinstance(schema, list) else schema


def allowed_controls(template: str, special_tokens: Mapping[str, int]) -> frozenset[int]:
    """Ids of control tokens that a model must be able to choose to write calls."""
    family = family_of(template)
    names: Iterable[str] = () if family is None else (*family.begins, *family.marks)
    return frozenset(special_tokens[name] for name in names if name in special_tokens)


def _between(text: str, begin: str, end: str, one: Callable[[str], tuple[Any, str]]) -> list[Any]:
    """What `one` finds between marks, repeated to the end of the text; the last end may be
    missing.
    """
    found = []
    while text:
        if not text.startswith(begin):
            raise ValueError(text)
        value, rest = one(text[len(begin) :].lstrip())
        found.append(value)
        rest = rest.strip()
        if end and rest and not rest.startswith(end):
            raise ValueError(rest)
        text = rest.removeprefix(end).strip()
    return found


def _finite(written: str) -> float:
    """A number that JSON can hold: NaN and what is too large for a float cannot be written back."""
    if not math.isfinite(number := float(written)):
        raise ValueError(written)
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _json(text: str) -> tuple[Any, str]:
    """The value at the beginning of a text, and the rest."""
    text = text.lstrip()
    value, end = _DECODER.raw_decode(text)
    return value, text[end:]


def _match(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of a pattern at the beginning of a text, and the rest."""
    found = re.match(pattern, text.lstrip(), re.DOTALL)
    if found is None:
        raise ValueError(text)
    return (*(group or "" for group in found.groups()), text.lstrip()[found.end() :])


def _call(given: Any) -> Call:
    """A call from its JSON."""
    arguments = given["arguments"] if "arguments" in given else given.get("parameters", {})
    if isinstance(arguments, str):
        arguments = _DECODER.decode(arguments or "{}")
    if not isinstance(given["name"], str) or not isinstance(arguments, dict):
        raise TypeError(given)
    return Call(given["name"], _compact(arguments))


def _compact(values: Mapping[str, object]) -> str:
    return json.dumps(values, ensure_ascii=False, allow_nan=False)


def _typed(value: str, function: str, name: str, tools: Tools) -> Any:
    """A value that was written as plain text: JSON, unless the tool's schema says that it is a
    text.
    """
    schemas = [
        tool["function"].get("parameters") or {}
        for tool in tools
        if tool["function"]["name"] == function
    ]
    kind = schemas[0].get("properties", {}).get(name, {}).get("type") if schemas else None
    if kind == "string":
        return value
    if kind in ("boolean", "null") and value in _PYTHON:
        # Some templates show the model Python's words.
        return _PYTHON[value]
    try:
        return _DECODER.decode(value)
    except ValueError:
        return value
