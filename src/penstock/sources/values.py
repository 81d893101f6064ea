"""Reads a file that holds JSON values anywhere, not one a line: an array of records, or records over several lines.

ShareGPT's and Alpaca's data are such arrays. Only whole objects are read from them (see `objects.py`). A value cannot
be found without reading those before it, so a part reads the file from its start up to its own end, and the file lies
in memory as text: lines are the better format for gigabytes (`jq -c '.[]'` makes them).
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from penstock.errors import ConfigError
from penstock.sources.damage import Damage, OnDamage, Unreadable, stop_at_damage
from penstock.sources.files import Extent, SourceFile, open_stream, whole_file
from penstock.sources.objects import Found, ObjectBlock, gather, lone_surrogate
from penstock.sources.records import EXCERPT_CHARACTERS, RecordBlock

MAX_PARTS = 16
"""The most parts of a file, each of which reads what is before it."""

BLOCK_VALUES = 512
PEEK_BYTES = 1 << 20
_BETWEEN = re.compile(r"[\s,]*")


@final
@dataclass(frozen=True, slots=True)
class JsonValuesPart:
    """The values of one file that begin in its `number`-th of `count` equal stretches of characters."""

    file: SourceFile
    number: int
    count: int

    @property
    def name(self) -> str:
        """For people: the file, and the stretch where there are several."""
        return f"{self.file.path} [{self.number + 1} of {self.count}]" if self.count > 1 else self.file.path

    @property
    def identity(self) -> str:
        """What it reads, whatever that holds."""
        return f"{self.file.path} values {self.number}/{self.count}"

    @property
    def sources(self) -> tuple[SourceFile, ...]:
        """What it reads from."""
        return (self.file,)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that `ObjectBlock.files` points into."""
        return (self.file.path,)

    @property
    def size_bytes(self) -> int:
        """Raw bytes, for progress."""
        return self.file.size_bytes * (self.number + 1) // self.count - self.file.size_bytes * self.number // self.count

    def extents(self) -> tuple[Extent, ...]:
        """The bytes that decide what comes of it, of a local file."""
        return whole_file(self.file)

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """Not for texts.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{self.file.path}: holds JSON values over several lines; expected: one object a line")

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """The records, in order; `lines` are those on which they begin."""
        path, size = self.file.path, self.size_bytes
        try:
            text = self._text()
        except Unreadable as error:
            damaged(Damage(path, 1, str(error), size, size))
            return
        begin, end = len(text) * self.number // self.count, len(text) * (self.number + 1) // self.count
        found: list[Found] = []
        unread = 0
        for at, line, value, fault in _values(text, end):
            if fault is not None:
                unread = size * (end - max(at, begin)) // max(end - begin, 1)
                damaged(Damage(path, line, fault, size, unread))
                break
            if at < begin:
                continue
            found.append((line, value, lone_surrogate(value), text[at : at + EXCERPT_CHARACTERS]))
            if len(found) == BLOCK_VALUES:
                yield gather(found, path, 0)
                found = []
        yield gather(found, path, size - unread)

    def _text(self) -> str:
        try:
            with open_stream(self.file) as stream:
                return stream.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise Unreadable(f"byte {error.start} of the file is not UTF-8 ({error.reason})") from error


def _values(text: str, end: int) -> Iterator[tuple[int, int, Any, str | None]]:
    """(character, line, value, None) of each value that begins before `end`, then where and why reading had to stop."""
    decode = json.JSONDecoder().raw_decode
    at, line, counted = _after(text, 0), 1, 0
    in_array = text[at : at + 1] == "["
    at = _after(text, at + 1) if in_array else at
    while at < end and text[at] != "]":
        line += text.count("\n", counted, at)
        counted = at
        try:
            value, after = decode(text, at)
        except (json.JSONDecodeError, RecursionError) as error:
            words = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            yield at, line, None, f"not JSON ({words}), so what follows it cannot be read"
            return
        yield at, line, value, None
        at = _after(text, after)
    if in_array and at >= len(text) == end:
        yield len(text), line, None, 'the array does not end with "]", so the file was cut'


def _after(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return found.end() if found else at


def holds_values(file: SourceFile) -> bool:
    """Whether a file of JSON begins with an array, or with an object that its first line does not end."""
    try:
        with open_stream(file) as stream:
            head = stream.read(PEEK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    except Unreadable:
        return False  # the reader of lines says what is wrong with it
    if head.startswith(b"["):
        return True
    line, newline, _ = head.partition(b"\n")
    return bool(newline) and file.suffixes[0] == ".json" and line.strip() in (b"{", b"")


def cut_values(file: SourceFile, part_bytes: int) -> Iterator[JsonValuesPart]:
    """Parts of `part_bytes` raw bytes, about, or larger."""
    count = min(max(file.size_bytes // part_bytes, 1), MAX_PARTS)
    for number in range(count):
        yield JsonValuesPart(file, number, count)
