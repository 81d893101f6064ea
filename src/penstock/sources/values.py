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
from penstock.sources.files import SourceFile, open_stream
from penstock.sources.objects import Found, ObjectBlock, gather, lone_surrogate
from penstock.sources.records import EXCERPT_CHARACTERS, RecordBlock, Reject

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
        """Changes when the input does."""
        return f"{self.file.identity} values {self.number}/{self.count}"

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that `ObjectBlock.files` points into."""
        return (self.file.path,)

    @property
    def size_bytes(self) -> int:
        """Raw bytes, for progress."""
        return self.file.size_bytes * (self.number + 1) // self.count - self.file.size_bytes * self.number // self.count

    def blocks(self) -> Iterator[RecordBlock]:
        """Not for texts.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{self.file.path}: holds JSON values over several lines; due: one object a line")

    def objects(self) -> Iterator[ObjectBlock]:
        """The records, in order; `lines` are those on which they begin."""
        try:
            with open_stream(self.file) as stream:
                text = stream.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            yield self._unreadable(f"byte {error.start} of the file is not UTF-8 ({error.reason})")
            return
        except OSError as error:
            yield self._unreadable(f"the file cannot be read: {error}; it was cut, or is damaged")
            return
        begin, end = len(text) * self.number // self.count, len(text) * (self.number + 1) // self.count
        found: list[Found] = []
        for at, line, value, reason in _values(text, end):
            if at < begin:
                continue
            found.append((line, value, reason or lone_surrogate(value), text[at : at + EXCERPT_CHARACTERS]))
            if len(found) == BLOCK_VALUES:
                yield gather(found, self.file.path, 0)
                found = []
        yield gather(found, self.file.path, self.size_bytes)

    def _unreadable(self, reason: str) -> ObjectBlock:
        """The file as one reject, which its first part gives."""
        rejects = [Reject(self.file.path, 1, reason, "")] if self.number == 0 else []
        return gather([], self.file.path, self.size_bytes, rejects)


def _values(text: str, end: int) -> Iterator[tuple[int, int, Any, str | None]]:
    """(character, line, value, what is wrong) of each value that begins before `end`; wrong is only the last."""
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
            yield at, line, None, f"not JSON: {words}; what follows in the file cannot be read"
            return
        yield at, line, value, None
        at = _after(text, after)
    if in_array and at >= len(text) == end:
        yield len(text) - 1, line, None, 'the array does not end with "]"; the file was cut'


def _after(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return found.end() if found else at


def holds_values(file: SourceFile) -> bool:
    """Whether a file of JSON begins with an array, or with an object that its first line does not end."""
    try:
        with open_stream(file) as stream:
            head = stream.read(PEEK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError:
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
