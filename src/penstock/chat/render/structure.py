"""Calls and results in a rendered conversation: whether each name, key and value was written, found
by provenance.

Strings alone prove little of a call: a template may lose the second call, print an object as Python
does, or write keys without their values. `find_lost` looks for every name, key and value of every
call, and for the content of every result, where the origin of the text says that they are. A text
is written if it is there in full, as it is or escaped; a number, if what is there parses to it.
True, false and null have no origin outside of JSON: they are expected between their key and the
next text that has one. Brackets and quotes that close a value are not looked for.

JSON's notation is expected; in a call that is written in Python (`weather(city="Oslo", hot=True)`),
Python's as well. Costs some microseconds for each value.
"""

import json
import re
from ast import literal_eval
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from html import unescape
from typing import Any, NamedTuple, final

from penstock.chat.render.template import Lost, Rendered
from penstock.chat.render.traced_text import KEY, LITERAL, path_of
from penstock.core.json_values import JsonMapping

_WORD = re.compile(r"(?<![\w.])(?:true|false|null|True|False|None)(?![\w.])")
_NONE = re.compile(r"\bNone\b")
_ARGUMENTS = ".function.arguments"
_SHOWN = 40
"""Characters of a value that a message shows."""


class _Span(NamedTuple):
    """A stretch of the text that comes from a field of a message."""

    begin: int
    end: int
    field: str
    offset: int


def find_lost(
    messages: Sequence[JsonMapping], rendered: Rendered, stops: Collection[str] = ()
) -> Iterator[Lost]:
    """Missing parts of the calls and results of a conversation, and how its empty contents were
    written.

    Args:
        messages: As the template got them.
        rendered: What it wrote.
        stops: Texts that end a generation; a reply with calls that goes on after one is reported.
    """
    concerned = {
        number
        for number, message in enumerate(messages)
        if message.get("tool_calls") or message["role"] == "tool" or message.get("content") is None
    }
    if not concerned:
        return
    whole = _Origins(rendered, concerned)
    for number in sorted(concerned):
        message, turn = messages[number], whole.turns[number]
        if message.get("content") is None and whole.writes_none(
            number, message.get("tool_calls") or ()
        ):
            yield Lost(number, "content", "the template writes None for its null content")
        if message["role"] == "tool":
            reasons = _lost_of_result(message.get("content"), _Values(whole, whole.spans[number]))
            yield from (Lost(number, "result", reason) for reason in reasons)
        elif calls := message.get("tool_calls"):
            yield from _lost_of_calls(calls, whole, number)
            if reason := after_stop(whole.text, turn, stops):
                yield Lost(number, "stop", reason)


def after_stop(
    text: str, pieces: Sequence[tuple[int, int, bool]], stops: Collection[str]
) -> str | None:
    """How a turn goes on after text of the template that ends a generation, in words; None if it
    does not.

    Args:
        text: The whole conversation.
        pieces: (begin, end, whether the template's own) of what was written in the turn.
        stops: Texts that end a generation.
    """
    spoken = next((place for place, piece in enumerate(pieces) if not piece[2]), len(pieces))
    for place, (begin, end, is_literal) in enumerate(pieces[spoken:], spoken):
        for stop in stops if is_literal else ():
            at = text.find(stop, begin, end)
            if at < 0:
                continue
            rest = (
                text[at + len(stop) : end] + "".join(text[b:e] for b, e, _ in pieces[place + 1 :])
            ).strip()
            if rest and rest not in stops:
                return (
                    f"the template goes on with {_shown(rest)} after {stop!r}, where the model "
                    "stops"
                )
    return None


@final
class _Origins:
    """A rendered conversation by messages."""

    def __init__(self, rendered: Rendered, messages: Collection[int]) -> None:
        self.text = rendered.text
        self.spans: dict[int, list[_Span]] = {message: [] for message in messages}
        self.turns: dict[int, list[tuple[int, int, bool]]] = {message: [] for message in messages}
        self.begins: list[int] = []
        """First characters of all stretches that come from a message."""
        at = 0
        for length, message, field, offset, owner, _ in rendered.runs:
            if message >= 0:
                self.begins.append(at)
                if message in self.spans:
                    self.spans[message].append(_Span(at, at + length, field, offset))
            if owner in self.turns:
                self.turns[owner].append((at, at + length, message == LITERAL))
            at += length

    def writes_none(self, message: int, calls: Sequence[JsonMapping]) -> bool:
        """Whether the template writes None for the null content of a message; what it writes of
        calls is apart.
        """
        inside = [span for span in self.spans[message] if span.field.startswith("tool_calls.")]
        begin, end = (inside[0].begin, inside[-1].end) if inside else (0, 0)
        end = self.end(end) if "None" in repr(calls) else end
        pieces = [(first, last) for first, last, is_literal in self.turns[message] if is_literal]
        return any(
            not begin <= found.start() < end
            for first, last in pieces
            for found in _NONE.finditer(self.text, first, last)
        )

    def end(self, at: int) -> int:
        """Where the template's own text that follows `at` ends."""
        place = bisect_left(self.begins, at)
        return self.begins[place] if place < len(self.begins) else len(self.text)


def _lost_of_result(content: object, values: "_Values") -> Iterator[str]:
    """Missing parts of the content of a tool's result."""
    parts = [("content", content)]
    if isinstance(content, list | tuple) and content and all(map(_is_part, content)):
        parts = [(f"content.{place}.text", part.get("text")) for place, part in enumerate(content)]
    for path, value in parts:
        if value is not None and (reason := values.lost(value, path, *values.extent())):
            yield f"the template does not write this result in full: {reason}"


def _lost_of_calls(calls: Sequence[JsonMapping], whole: _Origins, message: int) -> Iterator[Lost]:
    """Missing parts of the calls of a message, which are expected in order."""
    by_call: dict[str, list[_Span]] = {}
    for span in whole.spans[message]:
        if span.field.startswith("tool_calls."):
            by_call.setdefault(span.field.split(".", 2)[1], []).append(span)
    last = -1
    for place, call in enumerate(calls):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        named, own = f"call {place} ({name})", by_call.get(str(place), [])
        path = f"tool_calls.{place}.function"
        named_by = [
            one
            for one in own
            if one.field == f"{path}.name" and name in whole.text[one.begin : one.end]
        ]
        if not own:
            yield Lost(message, "arguments", f"the template does not write {named}", weight=3)
            continue
        if own[0].begin < last:
            yield Lost(
                message, "arguments", f"the template writes {named} before the call that it follows"
            )
        last = own[0].begin
        values = _Values(
            whole, own, in_python=bool(named_by) and whole.text.startswith("(", named_by[0].end)
        )
        reasons = [values.lost(arguments, path + ".arguments", *values.extent())]
        for reason in filter(None, [*([] if named_by else ["its name is not there"]), *reasons]):
            yield Lost(
                message, "arguments", f"the template does not write {named} as it is: {reason}"
            )


@final
class _Values:
    """The values in one call or result, as a template wrote them."""

    def __init__(self, whole: _Origins, spans: Sequence[_Span], *, in_python: bool = False) -> None:
        self._whole, self._text, self._spans, self._in_python = whole, whole.text, spans, in_python
        self._begins = [span.begin for span in spans]
        self._fields: dict[str, list[_Span]] = {}
        for span in spans:
            self._fields.setdefault(span.field, []).append(span)

    def extent(self) -> tuple[int, int]:
        """Its characters, with the template's own text after it."""
        return (
            (self._spans[0].begin, self._whole.end(self._spans[-1].end)) if self._spans else (0, 0)
        )

    def lost(self, value: object, path: str, begin: int, end: int) -> str | None:
        """Missing part of a value that is expected within [begin, end), in words; None: nothing is
        missing.
        """
        if isinstance(value, str):
            return self._lost_text(value, path, begin, end)
        if isinstance(value, Mapping | list | tuple):
            if not value:
                return self._lost_empty(value, path, begin, end)
            printed = self._written(path, begin, end)
            if any(_is_json(text, value) for text in printed) or (
                self._in_python and str(value) in printed
            ):
                return None
            if any(str(value) in text for text in printed):
                return (
                    f"{_named(path)} is written as Python prints it, {_shown(str(value))}; "
                    "expected JSON"
                )
            if isinstance(value, Mapping):
                return self._lost_object(value, path, begin, end)
            return self._lost_list(value, path, begin, end)
        found = [text.strip() for text in self._written(path, begin, end)]
        if found:
            expected = [_json(value), str(value)] if self._in_python else [_json(value)]
            fit = any(text in expected or _is_number(text, value) for text in found)
            return None if fit else f"{_named(path)} is {_json(value)}, found {_shown(found[0])}"
        return self._lost_words([value], path, begin, end)

    def _written(self, path: str, begin: int, end: int) -> list[str]:
        """Written stretches of a field, without its name; adjacent ones are joined."""
        groups: list[str] = []
        last = -1
        for span in self._fields.get(path, ()):
            if span.offset == KEY or not begin <= span.begin < end:
                continue
            if span.begin == last:
                groups[-1] += self._text[span.begin : span.end]
            else:
                groups.append(self._text[span.begin : span.end])
            last = span.end
        return groups

    def _lost_text(self, value: str, path: str, begin: int, end: int) -> str | None:
        if not value.strip():
            return None
        found = self._written(path, begin, end)
        if path.endswith(_ARGUMENTS):  # JSON text as it is, not once more as JSON
            return None if value.strip() in map(str.strip, found) else _missing(path)
        if value in found or any(_is_spelling(text, value) for text in (*found, "".join(found))):
            quoted = any(f"{mark}{value}{mark}" in self._text[begin:end] for mark in "\"'")
            bare = self._in_python and value in found and not quoted and _is_literal(value)
            return (
                f"{_named(path)} is the text {_shown(value)}, which reads as another value "
                "without quotes"
                * bare
                or None
            )
        return (
            f"{_named(path)} is {_shown(value)}, found {_shown(found[0])}"
            if found
            else _missing(path)
        )

    def _lost_empty(self, value: object, path: str, begin: int, end: int) -> str | None:
        """An empty object or list; templates may write nothing for a call without arguments."""
        spelled = "{}" if isinstance(value, Mapping) else "[]"
        fit = path.endswith(_ARGUMENTS) or spelled in self._text[begin:end]
        return None if fit else f"{_named(path)} is {spelled}, which is not there"

    def _lost_object(self, value: JsonMapping, path: str, begin: int, end: int) -> str | None:
        places = []
        for key in value:
            inside = path_of(path, key)
            found = [
                span
                for span in self._fields.get(inside, ())
                if span.offset == KEY
                and begin <= span.begin < end
                and _is_key(self._text[span.begin : span.end], key)
            ]
            if not found:
                return _missing(inside)
            places.append((found[0].begin, found[0].end, inside, key))
        places.sort()  # templates may sort the names
        borders = [*(place[0] for place in places[1:]), end]
        reasons = (
            self.lost(value[key], inside, first, border)
            for (_, first, inside, key), border in zip(places, borders, strict=True)
        )
        return next(filter(None, reasons), None)

    def _lost_list(self, values: Sequence[object], path: str, begin: int, end: int) -> str | None:
        if not self._inside(path, begin, end) and "[" not in self._text[begin:end]:
            return _missing(path)
        at, unplaced = begin, list[Any]()
        for place, value in enumerate(values):
            inside = path_of(path, place)
            spans = self._inside(inside, at, end)
            if not spans:
                unplaced.append(value)
                continue
            reason = self._lost_words(unplaced, path, at, spans[0].begin) or self.lost(
                value, inside, at, end
            )
            if reason is not None:
                return reason
            unplaced, at = [], spans[-1].end
        return self._lost_words(unplaced, path, at, end)

    def _inside(self, path: str, begin: int, end: int) -> Sequence[_Span]:
        """Written stretches of a field and of the fields in it."""
        some = self._spans[bisect_left(self._begins, begin) : bisect_left(self._begins, end)]
        return [span for span in some if span.field == path or span.field.startswith(f"{path}.")]

    def _lost_words(self, values: Sequence[object], path: str, begin: int, end: int) -> str | None:
        """Missing values without an origin: true, false and null are the last such words there."""
        words = [value for value in values if value is None or isinstance(value, bool)]
        others = [value for value in values if not (value is None or isinstance(value, bool))]
        if any(not self._is_blank(value, begin, end) for value in others):
            return f"{_named(path)} is not there in full" if len(values) > 1 else _missing(path)
        found = _WORD.findall(self._text, begin, end)[-len(words) :] if words else []
        fit = len(found) == len(words) and all(
            text == _json(word) or (self._in_python and text == str(word))
            for text, word in zip(found, words, strict=True)
        )
        expected = ", ".join(map(_json, words))
        return (
            None if fit else f"{_named(path)} is {expected}, found {', '.join(found) or 'nothing'}"
        )

    def _is_blank(self, value: object, begin: int, end: int) -> bool:
        """Whether a value leaves no text with an origin: white space, and an empty object or list
        outside of JSON.
        """
        if isinstance(value, Mapping | list | tuple) and not value:
            return ("{}" if isinstance(value, Mapping) else "[]") in self._text[begin:end]
        return isinstance(value, str) and not value.strip()


def _is_part(part: object) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("type"), str)


def _is_key(text: str, key: str) -> bool:
    """Whether some text is the name of a field, as it is, escaped, or in JSON with its colon."""
    return (
        text == key or text.rstrip(" :") in (json.dumps(key), _json(key)) or unescape(text) == key
    )


def _is_spelling(text: str, value: str) -> bool:
    """Whether some text is a value, as it is, escaped, or in JSON, apart from white space around
    it.
    """
    quoted = _json(value), json.dumps(value)
    spellings = {value.strip(), *quoted, *(one[1:-1].strip() for one in quoted)}
    return text.strip() in spellings or unescape(text.strip()) in spellings


def _is_literal(text: str) -> bool:
    """Whether a text without quotes reads as something else than a text, in Python or in JSON."""
    for read in (literal_eval, json.loads):
        try:
            return not isinstance(read(text.strip()), str)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return False


def _is_json(text: str, value: object) -> bool:
    """Whether some text is the JSON of a value, apart from white space."""
    try:
        return json.dumps(json.loads(text), sort_keys=True) == json.dumps(value, sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return False


def _is_number(text: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return not isinstance(found, bool) and found == value and abs(found) != float("inf")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=repr)


def _named(path: str) -> str:
    """A field in words."""
    rest = (
        path.partition(_ARGUMENTS)[2]
        if path.startswith("tool_calls")
        else path.removeprefix("content")
    )
    return f"{rest.removeprefix('.')!r}" if rest else "it"


def _missing(path: str) -> str:
    return f"{_named(path)} is not there"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
