"""Reads CSV and TSV files: a header line with the names of the columns, then records whose cells
may hold newlines.

Cells are texts, quoted as in RFC 4180: a cell that begins with `"` ends at the next quote that is
not doubled. An empty cell is an empty text; as a column of another type it is null. A record with
more or fewer cells than the header, or with a wrong quote, is a reject with the line at which it
begins.

Uncompressed files are cut into ranges of whole records. Where a record begins depends on all quotes
before it, so the ranges of a file are found by one scan from its beginning (`record_ends`), as
lines of JSON are counted.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, final

import numpy as np

from penstock.core.arrays import Array
from penstock.core.compiled import address_of
from penstock.core.errors import RecordError
from penstock.data.sources import _csv_kernels as k
from penstock.data.sources.checks import MAX_LINE_BYTES
from penstock.data.sources.csv_cells import read_record, typed_row
from penstock.data.sources.files import (
    Extent,
    RangePart,
    SourceFile,
    open_ranges,
    open_stream,
    refuse_wrong_data,
    shorter,
)
from penstock.data.sources.lines import (
    BLOCK_BYTES,
    BLOCK_LINES,
    BOM,
    REMOTE_BLOCK_BYTES,
    num_newlines,
    read_blocks,
)
from penstock.data.sources.objects import Found, ObjectBlock, block_of_records, gather
from penstock.data.sources.records import Damage, Fields, OnDamage, RecordBlock, stop_at_damage
from penstock.data.stores.remote_files import Unreadable

HEAD_BYTES, HEADER_BYTES = 1 << 14, 1 << 20
"""Bytes that are read for the header: at first, and at most."""
_LONGEST_NAME = 256
"""Characters of the longest name of a column: a longer one is a text."""
_EXPECTED = "expected: a header line with the names of the columns, then the records"


@final
@dataclass(frozen=True, slots=True)
class Header:
    """The first record of a file."""

    names: tuple[str, ...]
    body: int
    """Byte of the file, decompressed, at which the records begin."""
    line: int
    """Line at which they begin."""
    mark: int = 0
    """Bytes of a byte order mark before the header."""


@final
@dataclass(frozen=True, slots=True)
class CsvPart(RangePart):
    """The records of one file that begin in bytes [begin, end); all records of a compressed
    file.
    """

    delimiter: str
    header: Header
    part_bytes: int
    """Bytes of each range of the file; the last may have fewer."""
    first: tuple[int, int] | None = None
    """Byte and line at which its first record begins; None: they are found when they are needed."""
    last: int | None = None
    """Byte at which the record after its last begins."""

    @property
    def identity(self) -> str:
        """Identity of the input: path, range, header and first record, independent of its bytes."""
        names = hashlib.blake2b(json.dumps(self.header.names).encode(), digest_size=8).hexdigest()
        place = "" if self.first is None else f" from byte {self.first[0]} line {self.first[1]}"
        return (
            f"{self.file.key} cells {self.delimiter!r} of {names} bytes "
            f"{self.begin}:{self.end}{place}"
        )

    def extents(self) -> tuple[Extent, ...]:
        """The bytes of a local file that determine the result: its records; the header is in its
        identity.
        """
        if self.file.is_remote:
            return ()
        if not self.is_range:
            return ((self.file, 0, self.file.size_bytes),)
        part = self if self.last is not None else self.placed(self.survey())
        assert part.first is not None
        return ((self.file, part.first[0], max(part.last or 0, part.first[0])),)

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """Yield the records in order of lines."""
        for found, size_bytes in self._found(damaged):
            rows = [
                (line, typed_row(value, self.fields) if reason is None else None, reason, raw)
                for line, value, reason, raw in found
            ]
            yield block_of_records(rows, self.fields, self.file.path, size_bytes)

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """Yield whole records in order of lines; all their values are texts."""
        for found, size_bytes in self._found(damaged):
            yield gather(found, self.file.path, size_bytes)

    def survey(self) -> tuple[tuple[int, int], ...]:
        """Byte and line of the first record at or behind the beginning of each range of the
        file.
        """
        begins = range(self.part_bytes, self.file.size_bytes, self.part_bytes)
        return (
            (self.header.body, self.header.line),
            *find_records(self.file, self.delimiter, self.header, begins),
        )

    def placed(self, places: Sequence[tuple[int, int]]) -> "CsvPart":
        """The same with the places of its first record and of the next part's, by a `survey` of its
        file.
        """
        after = -(-self.end // self.part_bytes)
        last = places[after][0] if after < len(places) else self.file.size_bytes
        return replace(self, first=places[self.begin // self.part_bytes], last=last)

    def _found(self, damaged: OnDamage) -> Iterator[tuple[list[Found], int]]:
        """Yield some records with their lines, and the raw bytes that they took."""
        line, unread = self.header.line, self.size_bytes
        try:
            if damaged is not stop_at_damage:
                refuse_wrong_data(self.file)
            part = (
                self if self.first is not None or not self.is_range else self.placed(self.survey())
            )
            line = part.first[1] if part.first is not None else line
            for records, size_bytes in part._records():
                found: list[Found] = []
                share = size_bytes
                for number, raw in enumerate(records, 1):
                    found += read_record(raw, line, self.header.names, self.delimiter)
                    line += raw.count(b"\n")
                    if number % BLOCK_LINES == 0:
                        yield found, 0
                        found = []
                yield found, share
                unread -= size_bytes
        except Unreadable as error:
            damaged(Damage(self.file.path, line, str(error), self.size_bytes, unread))

    def _records(self) -> Iterator[tuple[list[bytes], int]]:
        """Yield the bytes of whole records, about a block at a time, and the raw bytes that they
        took.
        """
        if self.file.compression or (self.file.is_remote and not self.is_range):
            # A byte order mark is not among the blocks.
            blocks = _after(read_blocks(self.file), self.header.body - self.header.mark)
            yield from _cut(blocks, self.delimiter)
            return
        first, last = self.first[0] if self.first else self.header.body, self.last
        last = self.file.size_bytes if last is None else last
        blocks = _range_blocks(self.file, first, last)
        left = self.size_bytes
        for records, taken in _cut(blocks, self.delimiter):
            share = min(taken, left)
            left -= share
            yield records, share
        yield [], left


def cut_csv(
    file: SourceFile,
    fields: Fields,
    delimiter: str,
    part_bytes: int,
    damaged: OnDamage = stop_at_damage,
) -> Iterator[CsvPart]:
    """Cut a file into parts of about `part_bytes` raw bytes; a compressed one is one part.

    If its beginning is damaged and `damaged` returns, there is one part, which reports that.

    Raises:
        RecordError: It has no header, or lacks a column that is read.
    """
    whole = max(file.size_bytes, 1)
    try:
        header = read_header(file, delimiter)
    except Unreadable as error:
        damaged(Damage(file.path, 1, str(error), file.size_bytes, file.size_bytes))
        yield CsvPart(file, fields, 0, file.size_bytes, delimiter, Header((), 0, 1), whole)
        return
    _require_columns(header, fields, file.path, delimiter)
    size = whole if file.compression else part_bytes
    for begin in range(0, whole, size):
        yield CsvPart(
            file, fields, begin, min(begin + size, file.size_bytes), delimiter, header, size
        )


def read_header(file: SourceFile, delimiter: str) -> Header:
    """The names of the columns of a file.

    Raises:
        RecordError: Its first record is no header.
        Unreadable: Its beginning cannot be read.
    """
    head = _head(file, delimiter)
    body, line = len(head) - len(head.removeprefix(BOM)), 1
    ends, _ = _ends(head[body:], delimiter, k.CELL)
    for begin, end in pairwise(
        [0, *ends.tolist(), *([] if _is_end(head[body:], ends) else [len(head) - body])]
    ):
        raw = head[body + begin : body + end]
        lines = raw.count(b"\n")
        if raw.strip():
            return Header(
                _names(raw, f"{file.path}:{line}", delimiter), body + end, line + lines, body
            )
        line += lines
    raise RecordError(f"{file.path}: is empty; {_EXPECTED}")


def _is_end(data: bytes, ends: Array) -> bool:
    return len(data) == (int(ends[-1]) if len(ends) else 0)


def _head(file: SourceFile, delimiter: str) -> bytes:
    """The first bytes of a file, with a whole record that is not blank, if there is one within
    `HEADER_BYTES`.
    """
    head = b""
    try:
        with open_stream(file, ahead=False) as stream:
            for amount in (HEAD_BYTES, HEADER_BYTES):
                head += stream.read(amount)
                ends, _ = _ends(head.removeprefix(BOM), delimiter, k.CELL)
                if len(ends) and head.removeprefix(BOM)[: int(ends[-1])].strip():
                    return head
    except Unreadable:
        # A file that was cut: its beginning may still be there.
        return next(read_blocks(file))[0]
    if len(head) > HEADER_BYTES:
        raise RecordError(
            f"{file.path}:1: the first line does not end within {HEADER_BYTES:,} bytes; {_EXPECTED}"
        )
    return head


def _names(raw: bytes, where: str, delimiter: str) -> tuple[str, ...]:
    """The names in a header."""
    _, names, reason, _ = read_record(raw, 1, None, delimiter)[0]
    if reason is not None:
        raise RecordError(f"{where}: the header cannot be read: {reason}; {_EXPECTED}")
    text = next(
        (one for one in names if len(one) > _LONGEST_NAME or "\n" in one or one[:1] in ("{", "[")),
        None,
    )
    if text is not None or all(map(_is_number, names)):
        shown = (names[0] if text is None else text)[:40]
        raise RecordError(
            f"{where}: the first line holds {shown!r}, which is no name of a column; {_EXPECTED}"
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RecordError(f"{where}: the header has the column {twice!r} twice; rename one")
    return tuple(names)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _require_columns(header: Header, fields: Fields, path: str, delimiter: str) -> None:
    listed = ", ".join(map(repr, header.names))
    other = next((one for one in ";\t|," if one != delimiter and one in header.names[0]), None)
    seems = (
        f"its cells seem to be separated by {other!r}: set delimiter"
        if len(header.names) == 1 and other
        else ""
    )
    missing = next((name for name in fields.names if name not in header.names), None)
    if missing is not None:
        cure = (
            seems
            or "set text_field to the column that holds the text, or add a header line, if it "
            "has none"
        )
        raise RecordError(f"{path}: no column {missing!r}; the header has: {listed}; {cure}")
    if fields.whole and seems:
        raise RecordError(f"{path}: has one column, {listed}; {seems}")


def place_records(
    parts: Sequence[object],
    apply: Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]] = map,
) -> list[object]:
    """Give ranges of CSV files the places of their first records, at the cost of one scan of each
    file.

    Args:
        parts: Parts of any format.
        apply: `map`, or an equivalent that uses several processes.
    """
    ranges = [part for part in parts if isinstance(part, CsvPart) and part.is_range]
    firsts = list({(part.file, part.delimiter, part.part_bytes): part for part in ranges}.values())
    places = {
        part.file: found for part, found in zip(firsts, apply(CsvPart.survey, firsts), strict=True)
    }
    return [
        part.placed(places[part.file]) if isinstance(part, CsvPart) and part.is_range else part
        for part in parts
    ]


def find_records(
    file: SourceFile, delimiter: str, header: Header, begins: Sequence[int]
) -> list[tuple[int, int]]:
    """Byte and line of the first record that begins at each of some bytes, or behind it; by one
    scan of the file.

    If the file cannot be read further, the rest of it counts as one record; the reader reports it.
    """
    found: list[tuple[int, int]] = []
    position, line, state, end = header.body, header.line, k.CELL, header.body
    begins = [max(begin, header.body) for begin in begins]
    while len(found) < len(begins) and begins[len(found)] <= header.body:
        found.append((header.body, header.line))
    with suppress(Unreadable):
        for data, _ in _range_blocks(file, header.body, file.size_bytes):
            ends, state = _ends(data, delimiter, state)
            places = np.searchsorted(ends, np.array(begins[len(found) :], np.int64) - position)
            for place in places[places < len(ends)].tolist():
                end = int(ends[place])
                found.append((position + end, line + num_newlines(memoryview(data)[:end])))
            line, position = line + num_newlines(data), position + len(data)
    return found + [(file.size_bytes, line)] * (len(begins) - len(found))


def _range_blocks(file: SourceFile, begin: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Bytes [begin, end) of a file in blocks, and how many were read."""
    block = REMOTE_BLOCK_BYTES if file.is_remote else BLOCK_BYTES
    with open_ranges(file) as read:
        position = begin
        while position < end:
            data = read(position, min(block, end - position))
            if not data:
                raise Unreadable(shorter(file.size_bytes), position)
            position += len(data)
            yield data, position - begin


def _after(blocks: Iterator[tuple[bytes, int]], body: int) -> Iterator[tuple[bytes, int]]:
    """Blocks of a decompressed file without the first `body` bytes."""
    for data, position in blocks:
        yield data[body:], position
        body = max(body - len(data), 0)


def _cut(blocks: Iterator[tuple[bytes, int]], delimiter: str) -> Iterator[tuple[list[bytes], int]]:
    """Whole records of blocks, and the raw bytes that were read for them."""
    carry: list[bytes] = []
    state, waiting, counted, position = k.CELL, 0, 0, 0
    for data, position in blocks:
        ends, state = _ends(data, delimiter, state)
        if not len(ends):
            carry.append(data)
            waiting += len(data)
            if waiting > MAX_LINE_BYTES:
                raise Unreadable(
                    f"a record does not end within {MAX_LINE_BYTES:,} bytes; a quote may be "
                    "missing",
                    position,
                )
            continue
        records = [data[begin:end] for begin, end in pairwise([0, *ends.tolist()])]
        records[0] = b"".join([*carry, records[0]])
        carry, waiting = [data[ends[-1] :]], len(data) - int(ends[-1])
        yield records, max(position - counted, 0)
        counted = max(position, counted)
    rest = b"".join(carry)
    yield [rest] if rest else [], max(position - counted, 0)


def _ends(data: bytes, delimiter: str, state: int) -> tuple[Any, int]:
    """Where records end in some bytes, and the state after them."""
    source = np.frombuffer(data, np.uint8)
    ends = np.empty(num_newlines(data), np.int64)
    if not len(source):
        return ends, state
    count, state = k.record_ends(
        np.uint64(address_of(source)), len(source), ord(delimiter), state, ends
    )
    return ends[:count], int(state)
