"""Text that tracks the message and field of each character, through everything that a chat template
does to it.

`Traced` is a `str`: equal, hashed and compared as one. It also has runs, which give the message,
field and offset of stretches of characters. Concatenation, slicing, strip, split, replace, join and
formatting keep the runs exact; any other operation keeps message and field and loses the offset.
Literal text has no message. An operation costs a few microseconds, in proportion to the number of
runs.

`lay_over` handles text that Jinja escapes: `a + b` after `|safe` or `|e` writes `&lt;` for a `<` in
the plain part, in transformers too, and tracing does not see that. So the runs of the traced text
are laid over the plain render, which differs only in escaped characters. Costs some tenths of a
microsecond per character, only where the two texts differ.
"""

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, Self, SupportsIndex, final

from penstock.core.json_values import JsonMapping

_FIELDS = {"thinking": "reasoning_content", "reasoning": "reasoning_content"}
"""One name for each field that templates read under several."""


LITERAL: Final = -1
"""Message number of the template's own text."""
GIVEN: Final = -2
"""Message number of other parts of a conversation: tools, documents, the record's own variables."""
KEY: Final = -2
"""Offset of the name of a field, such as that of an argument; `field` is the field that it
names.
"""
_KEPT: Final = -2
"""Owner n of text that is kept but not written is stored as −2 − n."""


Run = tuple[int, int, str, int, int | None, bool]
"""Origin of some characters: (length, message, field, offset, owner, generated).

- `message`, `field`: the message, and the path in it ("content", "content.0.text"); `LITERAL` and
  "" for literal text, or the part of a content for which it was written, if that is an image
  ("3 content.1", see `part_of`).
- `offset`: of the first character in its field; −1 if the text was changed (escaped, padded),
  except in case, or is a number; `KEY` if it is the field's own name.
- `owner`: the message in the turn of which the text was written; −1: outside all turns; None: not
  yet written.
- `generated`: whether the text is inside `{% generation %}`.

A plain tuple, because a render makes hundreds of them.
"""

_PERCENT = re.compile("%%|%[sd]")

_NAMES = {"<": "lt;", ">": "gt;", "'": "#39;", '"': "#34;"}
_ESCAPED = {character: re.compile(f"&(?:amp;)*{name}") for character, name in _NAMES.items()}
_AMPERSAND = re.compile("&((?:amp;)*)")


def literal(length: int) -> Run:
    """Run of literal text that is not yet written."""
    return (length, LITERAL, "", -1, None, False)


@final
class Traced(str):
    """A string with runs; create it with `Traced.of` from a field, with `Traced(text)` from literal
    text.
    """

    __slots__ = ("_runs",)
    _runs: tuple[Run, ...]

    def __new__(cls, text: object = "", runs: tuple[Run, ...] | None = None) -> Self:
        """Args: `runs` of the characters in order; default: those of a `Traced`, else one literal
        run.
        """
        new = super().__new__(cls, text)
        if runs is None:
            runs = text._runs if isinstance(text, Traced) else ((literal(len(new)),) if new else ())
        new._runs = runs
        return new

    @classmethod
    def of(cls, text: str, message: int, field: str) -> Self:
        """The text of a field of a message."""
        return cls(text, ((len(text), message, field, 0, None, False),) if text else ())

    def __str__(self) -> str:
        return self

    def __reduce__(self) -> Any:
        return Traced, (str.__str__(self), self._runs)

    def __add__(self, other: str) -> "Traced":
        if not isinstance(other, str):
            return NotImplemented
        return made(str.__add__(self, other), self._runs + runs_of(other))

    def __radd__(self, other: str) -> "Traced":
        if not isinstance(other, str):
            return NotImplemented
        return made(str.__add__(other, self), runs_of(other) + self._runs)

    def __mul__(self, count: SupportsIndex) -> "Traced":
        return Traced(str.__mul__(self, count), self._runs * count.__index__())

    __rmul__ = __mul__

    def __mod__(self, values: object) -> "Traced":
        return format_percent(self, values)

    def __rmod__(self, template: str) -> "Traced":
        return format_percent(template, self)

    def __iter__(self) -> Iterator["Traced"]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice) -> "Traced":
        if not isinstance(key, slice):
            place = operator.index(key)
            key = slice(place, place + 1 or None)
            if not -len(self) <= place < len(self):
                raise IndexError("string index out of range")
        begin, end, step = key.indices(len(self))
        if step != 1:
            return join("", [self.cut(place, place + 1) for place in range(begin, end, step)])
        return self.cut(begin, end)

    def cut(self, begin: int, end: int) -> "Traced":
        """Characters [begin, end), both inside the text."""
        if begin <= 0 and end >= len(self):
            return self
        kept, at = [], 0
        for length, message, field, offset, owner, generated in self._runs:
            first, last = max(begin - at, 0), min(end - at, length)
            if first < last:
                offset = offset + first if offset >= 0 else offset
                kept.append((last - first, message, field, offset, owner, generated))
            at += length
            if at >= end:
                break
        return made(str.__getitem__(self, slice(begin, end)), tuple(kept))

    def strip(self, characters: str | None = None, /) -> "Traced":
        text = str.lstrip(self, characters)
        begin = len(self) - len(text)
        return self.cut(begin, begin + len(str.rstrip(text, characters)))

    def lstrip(self, characters: str | None = None, /) -> "Traced":
        return self.cut(len(self) - len(str.lstrip(self, characters)), len(self))

    def rstrip(self, characters: str | None = None, /) -> "Traced":
        return self.cut(0, len(str.rstrip(self, characters)))

    def removeprefix(self, prefix: str, /) -> "Traced":
        return self.cut(len(prefix), len(self)) if prefix and self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> "Traced":
        return self.cut(0, len(self) - len(suffix)) if suffix and self.endswith(suffix) else self

    # For mypy these return list[str], as those of str do.
    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._find(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._find(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._find(str.splitlines(self, True), "")
        return lines if keepends else [line[: len(str.splitlines(line)[0])] for line in lines]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._three(str.partition(self, sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._three(str.rpartition(self, sep))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> "Traced":
        limit = count.__index__()
        if not old:
            return _coarse(str.replace(self, old, new, limit), [self])
        return join(new, [Traced(part) for part in self.split(old, limit)])

    def join(self, parts: Iterable[str], /) -> "Traced":
        return join(self, list(parts))

    def _find(self, parts: list[str], sep: str | None) -> list[str]:
        """The parts of a split, cut out of this text; `sep` lies between them, or any
        whitespace.
        """
        found: list[str] = []
        at = 0
        for part in parts:
            at = self.index(part, at) if sep is None else at
            found.append(self.cut(at, at + len(part)) if part else Traced(""))
            at += len(part) + len(sep or "")
        return found

    def _three(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        first, second, third = self._find(list(parts), "")
        return first, second, third


def _traced_method(name: str, changes_case: bool) -> Callable[..., Traced]:
    method = getattr(str, name)

    def changed(self: Traced, *arguments: object) -> Traced:
        text: str = method(self, *arguments)
        # A change of case removes no character, so in a text of the same length each keeps its
        # place.
        if changes_case and len(text) == len(self):
            return made(text, self._runs)
        return self if str.__eq__(text, self) else _coarse(text, [self])

    return changed


for _name in ("upper", "lower", "title", "capitalize", "swapcase", "casefold"):
    setattr(Traced, _name, _traced_method(_name, changes_case=True))
for _name in ("center", "ljust", "rjust", "zfill", "expandtabs", "translate"):
    setattr(Traced, _name, _traced_method(_name, changes_case=False))


def made(text: str, runs: tuple[Run, ...]) -> Traced:
    """A `Traced` from text and runs, without the checks of its constructor."""
    new: Traced = str.__new__(Traced, text)
    new._runs = runs
    return new


def written(value: object, owner: int, part: str = "") -> str:
    """A value as it is written in the turn of `owner`; outside all turns (−1): in the turn in which
    it was kept, if any.

    Args:
        value: The value.
        owner: A message, or −1.
        part: The image that it is written for; see `part_of`.
    """
    text = spelled(value)
    if not text:
        return ""
    if not isinstance(text, Traced):
        return made(text, ((len(text), LITERAL, part, -1, owner, False),))
    runs: list[Run] = []
    for length, message, field, offset, old, generated in text._runs:
        new = owner if old is None else old if old > _KEPT else owner if owner >= 0 else _KEPT - old
        named = field or part if message == LITERAL else field
        runs.append((length, message, named, offset, new, generated))
    return made(text, tuple(runs))


def kept(text: str, owner: int, part: str = "") -> Traced:
    """`text` as kept in a variable in the turn of `owner`; writing it in another turn overrides
    that owner. `part`: as for `written`.
    """
    if owner < 0 and not part:
        return Traced(text)
    claim = _KEPT - owner if owner >= 0 else None
    if not isinstance(text, Traced):
        return made(text, ((len(text), LITERAL, part, -1, claim, False),) if text else ())
    runs: list[Run] = []
    for length, message, field, offset, old, generated in text._runs:
        named = field or part if message == LITERAL else field
        runs.append((length, message, named, offset, claim if old is None else old, generated))
    return made(text, tuple(runs))


def part_of(message: int, place: int) -> str:
    """The name of a part of a message's content, in runs of what a template writes for an image."""
    return f"{message} content.{place}"


def runs_of(text: str) -> tuple[Run, ...]:
    """The runs of any string."""
    if isinstance(text, Traced):
        return text._runs
    return (literal(len(text)),) if text else ()


def join(separator: str, parts: list[str]) -> Traced:
    """`separator.join(parts)`."""
    between = runs_of(separator)
    runs: list[Run] = []
    for place, part in enumerate(parts):
        if place and between:
            runs += between
        if type(part) is Traced:
            runs += part._runs
        elif part:
            runs.append((len(part), LITERAL, "", -1, None, False))
    return made(str.join(separator, parts), tuple(runs))


def format_percent(template: str, values: object) -> Traced:
    """`template % values`; exact if the template has no fields other than %s, %d and %%."""
    template = Traced(template)
    text = str.__mod__(template, values)
    given = list(values) if isinstance(values, tuple) else [values]
    waiting = given.copy()
    pieces: list[str] = []
    at = 0
    for found in _PERCENT.finditer(template):
        pieces.append(template.cut(at, found.start()))
        if found[0] == "%%":
            pieces.append(template.cut(found.start(), found.start() + 1))
        else:
            value = waiting.pop(0) if waiting else ""
            pieces.append(spelled(value))
        at = found.end()
    whole = join("", [*pieces, template.cut(at, len(template))])
    if str.__eq__(whole, text):
        return whole
    return _coarse(
        text, [template, *waiting, *(values.values() if isinstance(values, dict) else given)]
    )


def spelled(value: object) -> str:
    """`str(value)`; for a list or object of a message, with that message."""
    return value if isinstance(value, str) else coarse(str(value), [value])


def coarse(text: str, values: Iterable[object]) -> str:
    """The result of an unknown operation on `values`: message and field of the first that has any,
    without offset.
    """
    return text if isinstance(text, Traced) else _coarse(text, values)


def _coarse(text: str, values: Iterable[object]) -> Traced:
    found = _find_words(values) if text else None
    return Traced(text) if found is None else made(str.__str__(text), ((len(text), *found),))


def _find_words(values: Iterable[Any]) -> tuple[int, str, int, int | None, bool] | None:
    """Message and field of the first text in `values`; a role, which may be a marker, only if there
    is no other.
    """
    found = None
    for value in values:
        inner: Any = None
        if isinstance(value, str):
            inner = next(
                ((*run[1:3], -1, *run[4:]) for run in runs_of(value) if run[1] != LITERAL), None
            )
        elif isinstance(value, TRACED):
            inner = (value._message, value._path, -1, None, False)
        elif isinstance(value, (dict, list, tuple)):
            inner = _find_words([*value, *value.values()] if isinstance(value, dict) else value)
        if inner is not None and (found is None or found[1] == "role"):
            found = inner
    return found


def lay_over(text: str, runs: tuple[Run, ...], escaped: str) -> tuple[Run, ...] | None:
    """Runs of `escaped`, if it is `text` with some characters escaped; otherwise None.

    An escaped character keeps its message and field and loses its offset.
    """
    widths, at = [], 0
    for place in range(len(text)):
        widths.append(_width(text, place, escaped, at))
        if not widths[-1]:
            return None
        at += widths[-1]
    return _widen(runs, widths) if at == len(escaped) else None


def _width(text: str, place: int, escaped: str, at: int) -> int:
    """Number of characters of `escaped` that represent one of `text`; 0 if they do not."""
    character = text[place]
    if character == "&":
        was, now = _AMPERSAND.match(text, place), _AMPERSAND.match(escaped, at)
        return 0 if was is None or now is None else 1 + max(len(now[1]) - len(was[1]), 0)
    if escaped.startswith(character, at):
        return 1
    found = _ESCAPED[character].match(escaped, at) if character in _ESCAPED else None
    return len(found[0]) if found else 0


def _widen(runs: tuple[Run, ...], widths: list[int]) -> tuple[Run, ...]:
    wider: list[Run] = []
    at = 0
    for length, message, field, offset, owner, generated in runs:
        for same, places in groupby(range(length), lambda place, at=at: widths[at + place] == 1):  # type: ignore[misc]
            chosen = list(places)
            width = sum(widths[at + place] for place in chosen)
            first = offset + (chosen[0] if offset >= 0 else 0) if same else -1
            wider.append((width, message, field, first, owner, generated))
        at += length
    return tuple(wider)


@final
class TracedDict(dict[Any, Any]):
    """A message (path ""), or an object in one: a part of its content, a tool call, arguments."""

    __slots__ = ("_message", "_path")
    _message: int
    _path: str


@final
class TracedList(list[Any]):
    """A list inside a message."""

    __slots__ = ("_message", "_path")
    _message: int
    _path: str


@final
class TracedInt(int):
    """A whole number inside a message."""

    _message: int = LITERAL
    _path: str = ""


@final
class TracedFloat(float):
    """A number inside a message."""

    __slots__ = ("_message", "_path")
    _message: int
    _path: str


TRACED = (TracedDict, TracedList, TracedInt, TracedFloat)
"""Types of what lies in a message and is no text; a text is a `Traced`."""


def path_of(path: str, key: object) -> str:
    """Path of a field of an object in a message, from that of the object; a dot in a name is not
    one between two.
    """
    return f"{path}.{str(key).replace('.', '․')}" if path else _FIELDS.get(str(key), str(key))


def trace(value: Any, message: int, path: str = "") -> Any:
    """Copy a message, or a value in it, so that each text and number has its message and field."""
    if type(value) is str:
        return made(value, ((len(value), message, path, 0, None, False),) if value else ())
    if isinstance(value, str):
        return Traced.of(str.__str__(value), message, path)
    if value is None or isinstance(value, bool):
        return value  # neither can be subclassed, so outside of JSON their text has no origin
    copied: Any
    if isinstance(value, (int, float)):
        copied = TracedInt(value) if isinstance(value, int) else TracedFloat(value)
    elif isinstance(value, Mapping):
        copied = TracedDict()
        for key, item in value.items():
            field = path_of(path, key)
            # Names of arguments are text of the message too.
            name = (
                made(key, ((len(key), message, field, KEY, None, False),))
                if path and isinstance(key, str)
                else key
            )
            copied[name] = trace(item, message, field)
    elif isinstance(value, (list, tuple)):
        copied = TracedList(
            [trace(item, message, path_of(path, place)) for place, item in enumerate(value)]
        )
    else:
        # Images and other objects: templates may check that they exist, and must not call their
        # methods.
        return f"<{type(value).__name__}>"
    copied._message, copied._path = message, path
    return copied


def trace_messages(messages: Sequence[JsonMapping]) -> list[Any]:
    """The messages of a conversation, traced."""
    return [trace(message, number) for number, message in enumerate(messages)]
