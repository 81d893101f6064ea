"""Reads JSON files: lines with one object each (JSONL), and arrays or records that span lines.

JSONL is cut into byte ranges; a compressed file is one part. Ranges know their line numbers because
newlines are counted first, at gigabytes per second; `prepare` keeps what it reads of a remote file
for that (`copies.py`).

Files with JSON values anywhere, such as the arrays of ShareGPT and Alpaca, are read only as whole
objects (see `objects.py`). A value cannot be found without reading all values before it, so each
part reads the file from its start to the part's end and holds it in memory as text. For gigabytes,
lines are the better format (`jq -c '.[]'` makes them).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from penstock.core.errors import ConfigError
from penstock.data.sources.csv_files import CsvPart, place_records
from penstock.data.sources.files import (
    Extent,
    FilePart,
    RangePart,
    SourceFile,
    open_ranges,
    open_stream,
    refuse_wrong_data,
    whole_file,
)
from penstock.data.sources.lines import count_newlines, cut_range, cut_stream, few_lines, next_line
from penstock.data.sources.objects import (
    Found,
    ObjectBlock,
    are_messages,
    gather,
    lone_surrogate,
    parse_lines,
)
from penstock.data.sources.parsing import parse_block
from penstock.data.sources.records import (
    EXCERPT_CHARACTERS,
    Damage,
    OnDamage,
    RecordBlock,
    stop_at_damage,
)
from penstock.data.stores.remote_files import Unreadable

MAX_PARTS = 16
"""Most parts of a file with JSON values anywhere; each part reads all that comes before it."""

BLOCK_VALUES = 512
PEEK_BYTES = 1 << 16
_MESSAGE = re.compile(r'\{\s*"(?:role|from)"\s*:\s*"')
_BETWEEN = re.compile(r"[\s,]*")


@final
@dataclass(frozen=True, slots=True)
class JsonlPart(RangePart):
    """The lines of one file that begin in bytes [begin, end); all lines of a compressed file."""

    first_line: int | None = None
    """Number of the first line; None: counted when it is needed."""

    @property
    def identity(self) -> str:
        """Identity of the input (path and range), independent of its bytes."""
        numbered = "" if self.first_line is None else f" from line {self.first_line}"
        return f"{self.file.key} bytes {self.begin}:{self.end}{numbered}"

    def extents(self) -> tuple[Extent, ...]:
        """The bytes of a local file that determine the result: its lines, and the byte before
        them.
        """
        if self.file.is_remote:
            return ()
        end, size = self.end, self.file.size_bytes
        if 0 < end < size:
            with open_ranges(self.file) as read:
                end = next_line(read, end - 1, size, size)
        return ((self.file, max(self.begin - 1, 0), end),)

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """Yield the records in order of lines."""
        for data, line, size_bytes in self._lines(damaged):
            yield parse_block(data, self.file.path, line, self.fields, size_bytes)[0]

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """Yield whole records in order of lines."""
        for data, line, size_bytes in self._lines(damaged):
            yield parse_lines(data, self.file.path, line, size_bytes)

    def survey(self) -> int:
        """Number of newlines in [begin − 1, end − 1); their sums number the lines of later
        ranges.
        """
        return count_newlines(self.file, max(self.begin - 1, 0), self.end - 1)

    def _lines(self, damaged: OnDamage) -> Iterator[tuple[bytes | memoryview, int, int]]:
        """Yield whole lines, about a block at a time, the number of the first, and the raw bytes
        they took.
        """
        line, unread = self._first(), self.size_bytes
        try:
            if damaged is not stop_at_damage:
                refuse_wrong_data(self.file)
            for block, block_bytes in self._cut():
                for data, newlines, size_bytes in few_lines(block, block_bytes):
                    yield data, line, size_bytes
                    line, unread = line + newlines, unread - size_bytes
        except Unreadable as error:
            damaged(Damage(self.file.path, line, str(error), self.size_bytes, unread))

    def _first(self) -> int:
        """Number of the first line."""
        if self.first_line is not None:
            return self.first_line
        return 1 if self.begin == 0 else count_newlines(self.file, 0, self.begin - 1) + 2

    def _cut(self) -> Iterator[tuple[bytes | memoryview, int]]:
        """Yield whole lines, about a block at a time, and the raw bytes they took."""
        if self.file.compression or (self.file.is_remote and not self.is_range):
            return cut_stream(self.file)
        return cut_range(self.file, self.begin, self.end)


def number_lines(
    parts: Sequence[Any],
    apply: Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]] = map,
) -> list[Any]:
    """Give ranges of large JSONL files their first line numbers, at the cost of counting newlines
    once.

    Args:
        parts: Parts of any format, those of a file in order.
        apply: `map`, or an equivalent that uses several processes.

    Returns:
        The same parts; those of JSONL know their first line, those of CSV their first record.
    """
    ranges = [at for at, part in enumerate(parts) if isinstance(part, JsonlPart) and part.is_range]
    # No line after a file's last range needs a number.
    counted = [at for at in ranges if parts[at].end < parts[at].file.size_bytes]
    counts = dict(zip(counted, apply(JsonlPart.survey, [parts[at] for at in counted]), strict=True))
    numbered, seen = list(parts), 0
    for at in ranges:
        seen = 0 if parts[at].begin == 0 else seen
        numbered[at] = replace(parts[at], first_line=1 if parts[at].begin == 0 else seen + 2)
        seen += counts.get(at, 0)
    return place_records(numbered, apply)


def join_ranges(parts: Iterable[Any]) -> list[Any]:
    """Parts for one reader: adjacent ranges of a remote file become one, whose lines are counted as
    read.
    """
    joined: list[Any] = []
    for part in parts:
        if joined and _continues(joined[-1], part):
            joined[-1] = replace(joined[-1], end=part.end)
        else:
            joined.append(part)
    return joined


def _continues(last: object, part: object) -> bool:
    if not isinstance(last, JsonlPart | CsvPart) or type(last) is not type(part):
        return False
    return part.file.is_remote and (last.file, last.fields, last.end) == (
        part.file,
        part.fields,
        part.begin,
    )


@final
@dataclass(frozen=True, slots=True)
class JsonValuesPart(FilePart):
    """The values of one file that begin in stretch `number` of `count` equal stretches of its
    characters.
    """

    number: int
    count: int

    @property
    def name(self) -> str:
        """Name for messages: the file, and the stretch if there are several."""
        return (
            f"{self.file.path} [{self.number + 1} of {self.count}]"
            if self.count > 1
            else self.file.path
        )

    def extents(self) -> tuple[Extent, ...]:
        """The bytes of a local file that determine the result."""
        return whole_file(self.file)

    @property
    def identity(self) -> str:
        """Identity of the input (path and range), independent of its bytes."""
        return f"{self.file.key} values {self.number}/{self.count}"

    @property
    def size_bytes(self) -> int:
        """Raw bytes, for progress."""
        return (
            self.file.size_bytes * (self.number + 1) // self.count
            - self.file.size_bytes * self.number // self.count
        )

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """Raise a `ConfigError`: such files are read as whole objects only."""
        raise ConfigError(
            f"{self.file.path}: holds JSON values over several lines; expected: one object per line"
        )

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """Yield the records in order; `lines` says where they begin."""
        path, size = self.file.path, self.size_bytes
        try:
            text = self._text()
        except Unreadable as error:
            damaged(Damage(path, 1, str(error), size, size))
            return
        begin, end = (
            len(text) * self.number // self.count,
            len(text) * (self.number + 1) // self.count,
        )
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
            raise Unreadable(
                f"byte {error.start} of the file is not UTF-8 ({error.reason})"
            ) from error


def _values(text: str, end: int) -> Iterator[tuple[int, int, Any, str | None]]:
    """(character, line, value, None) of each value that begins before `end`, then where and why
    reading stopped.
    """
    decode = json.JSONDecoder().raw_decode
    at, line, counted = _after(text, 0), 1, 0
    in_array = text[at : at + 1] == "[" and not _begins_messages(text[at:])
    at = _after(text, at + 1) if in_array else at
    while at < end and text[at] != "]":
        line += text.count("\n", counted, at)
        counted = at
        try:
            value, after = decode(text, at)
        except (json.JSONDecodeError, RecursionError) as error:
            words = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            yield at, line, None, f"not JSON ({words}), so what follows cannot be read"
            return
        yield at, line, value, None
        at = _after(text, after)
    if in_array and at >= len(text) == end:
        yield len(text), line, None, 'the array does not end with "]", so the file was cut'


def _after(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return found.end() if found else at


def holds_values(file: SourceFile) -> bool:
    """Whether a JSON file begins with an array, or with an object that does not end on its first
    line.

    A line that is one list of messages is a record of its own.
    """
    try:
        with open_stream(file, ahead=False) as stream:
            head = stream.read(PEEK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    except Unreadable:
        return False  # the line reader reports what is wrong
    line, newline, _ = head.partition(b"\n")
    if head.startswith(b"["):
        is_line = line.rstrip().endswith(b"]") if newline else len(head) > PEEK_BYTES // 2
        return not (is_line and _begins_messages(head.decode(errors="replace")))
    return bool(newline) and file.suffixes[0] in (".json", "") and line.strip() in (b"{", b"")


def _begins_messages(text: str) -> bool:
    """Whether a text begins with a list of messages, rather than of records."""
    begin = _after(text, 1)
    try:
        return are_messages([json.JSONDecoder().raw_decode(text, begin)[0]])
    except (json.JSONDecodeError, RecursionError):
        return _MESSAGE.match(text, begin) is not None  # a message that goes on


def cut_values(file: SourceFile, part_bytes: int) -> Iterator[JsonValuesPart]:
    """Parts of at least about `part_bytes` raw bytes."""
    count = min(max(file.size_bytes // part_bytes, 1), MAX_PARTS)
    for number in range(count):
        yield JsonValuesPart(file, number, count)
