"""Jinja filters that build text from several values, keeping where each character comes from.

`tojson` gives what `json.dumps` does. A character of a string keeps its offset unless it had to be escaped; brackets,
numbers and names of fields belong to the object or list of the message that they spell. Filters that are not here keep
message and field only (`coarse`), which is enough to tell whose words they are.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import jinja2
from jinja2 import filters, sandbox

from penstock.chat.traced import GIVEN, LITERAL, Run, Traced, coarse, format_percent, join, made, runs_of, spelled

_ESCAPED = re.compile(r'[\\"\x00-\x1f]')
_ESCAPED_OR_WIDE = re.compile(r'[\\"]|[^ -~]')
_PLACE = tuple[int, str] | None
"""Message and path that punctuation belongs to; None for literal text."""


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """`json.dumps` with these arguments, traced."""
    # Nobody asks which words of a tool's schema these are.
    given = hasattr(type(value), "_path") and value._message == GIVEN
    if given or not _holds_traced(value):
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return Traced(coarse(text, [value]))
    if isinstance(indent, int):
        indent = " " * indent
    between, colon = separators or ((",", ": ") if indent is not None else (", ", ": "))
    writer = _Writer(ensure_ascii, indent, between, colon, sort_keys)
    writer.write(value, None, "\n")
    return made("".join(writer.texts), tuple(writer.runs))


def _holds_traced(value: Any) -> bool:
    """Whether any of it comes from a message, or with a conversation."""
    if type(value) is dict:
        return any(map(_holds_traced, value)) or any(map(_holds_traced, value.values()))
    if type(value) in (list, tuple):
        return any(map(_holds_traced, value))
    return isinstance(value, (str, dict, list, tuple)) and type(value) is not str


class _Writer:
    """Lays out JSON piece by piece."""

    def __init__(self, ascii_only: bool, indent: str | None, between: str, colon: str, sort_keys: bool) -> None:
        self._escaped = _ESCAPED_OR_WIDE if ascii_only else _ESCAPED
        self._ascii_only, self._sort_keys = ascii_only, sort_keys
        self._indent, self._between, self._colon = indent, between, colon
        self.texts: list[str] = []
        self.runs: list[Run] = []

    def write(self, value: Any, place: _PLACE, line: str) -> None:
        """Text of a value; `line` is the line break with the indentation of where it stands."""
        if isinstance(value, str):
            self._write_string(value, place)
        elif isinstance(value, dict):
            items = list(value.items())
            self._write_list("{}", sorted(items) if self._sort_keys else items, _place_of(value, place), line)
        elif isinstance(value, (list, tuple)):
            self._write_list("[]", list(value), _place_of(value, place), line)
        else:
            self._put(json.dumps(value, ensure_ascii=self._ascii_only), place)

    def _put(self, text: str, place: _PLACE) -> None:
        """Text that stands in no field as it is."""
        message, field = place or (LITERAL, "")
        self.texts.append(text)
        if self.runs and self.runs[-1][1:4] == (message, field, -1):
            self.runs[-1] = (self.runs[-1][0] + len(text), message, field, -1, None, False)
        else:
            self.runs.append((len(text), message, field, -1, None, False))

    def _write_list(self, brackets: str, items: list[Any], place: _PLACE, line: str) -> None:
        if not items:
            self._put(brackets, place)
            return
        inner = line + (self._indent or "")
        opening, separator, closing = brackets[0], self._between, brackets[1]
        if self._indent is not None:
            opening, separator, closing = opening + inner, separator + inner, line + closing
        before, named = opening, place
        for item in items:
            if brackets == "{}":
                before += _key(item[0], self._ascii_only) + self._colon
                named, item = _place_of(item[0], place), item[1]
            self._put(before, named)
            self.write(item, place, inner)
            before = separator
        self._put(closing, place)

    def _write_string(self, value: str, place: _PLACE) -> None:
        value = Traced(value)
        place = _place_of(value, place)
        self._put('"', place)
        at = 0
        for found in self._escaped.finditer(value):
            self._keep(value, at, found.start())
            at = found.end()
            character = value.cut(found.start(), at)
            escape = json.dumps(str.__str__(character), ensure_ascii=self._ascii_only)[1:-1]
            self._keep(Traced(coarse(escape, [character])), 0, len(escape))
        self._keep(value, at, len(value))
        self._put('"', place)

    def _keep(self, value: Traced, begin: int, end: int) -> None:
        if begin < end:
            part = value.cut(begin, end)
            self.texts.append(part)
            self.runs += part._runs


def _place_of(value: Any, place: _PLACE) -> _PLACE:
    """That of a value itself, if it has one."""
    if isinstance(value, str):
        return runs_of(value)[0][1:3] if value and runs_of(value)[0][1] != LITERAL else place
    path = getattr(value, "_path", None)
    return place if path is None else (value._message, path)


def _key(key: Any, ascii_only: bool) -> str:
    """A key as `json.dumps` writes it; it turns None, booleans and numbers into strings."""
    if isinstance(key, str):
        return json.dumps(key, ensure_ascii=ascii_only)
    return json.dumps({key: 0}, ensure_ascii=ascii_only)[1:].rpartition(": ")[0]


@jinja2.pass_eval_context
def _join(eval_context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(filters.make_attrgetter(eval_context.environment, attribute), value)
    return join(spelled(d), [spelled(part) for part in value])


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    space = width if isinstance(width, str) else " " * width
    lines = (Traced(s) + "\n").splitlines()
    indented = [space + line if number and (line or blank) else line for number, line in enumerate(lines)]
    return space + join("\n", indented) if first else join("\n", indented)


def _format(value: str, *arguments: Any, **named: Any) -> str:
    if arguments and named:
        raise jinja2.exceptions.FilterArgumentError("can't handle positional and keyword arguments at the same time")
    return format_percent(value, named or arguments)


def _title(s: Any) -> str:
    traced = Traced(spelled(s))
    title = filters.do_title(str.__str__(traced))
    return Traced(title, traced._runs) if len(title) == len(traced) else coarse(title, [traced])


class _Recorder(sandbox.SandboxedFormatter):
    """Notes the pieces of which it makes a text; they are not the text where a field has a format of its own."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.pieces: list[str] = []

    def parse(self, format_string: Any) -> Iterator[Any]:
        for parts in super().parse(format_string):
            self.pieces.append(parts[0])
            yield parts

    def format_field(self, value: Any, format_spec: str) -> Any:
        self.pieces.append(spelled(value))
        return super().format_field(value, format_spec)


def format_braces(environment: Any, template: str, arguments: Any, named: Any) -> str:
    """`template.format(*arguments, **named)` in Jinja's sandbox; exact where no field has a format of its own."""
    recorder = _Recorder(environment)
    text = recorder.vformat(template, arguments, named)
    exact = join("", recorder.pieces)
    known = all(run[1] == LITERAL for run in runs_of(template))
    return exact if known and str.__eq__(exact, text) else coarse(text, [template, *arguments, named])


TRACED_FILTERS = {
    "tojson": to_json,
    "join": _join,
    "indent": _indent,
    "format": _format,
    "string": spelled,
    "title": _title,
    "safe": spelled,
}
"""By name; they replace those of the environment."""
