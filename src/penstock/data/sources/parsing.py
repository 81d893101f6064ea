"""Parses lines of JSON: with a fast kernel where possible, otherwise with pyarrow, which also finds
bad lines.

The kernel reads blocks in which each line is one plain object with the text field, at 2.6 GB/s a
core. If it stops, or more fields are requested, pyarrow reads the whole block, at 0.7 GB/s. pyarrow
parses objects, not lines. So each non-blank line must begin with `{` and end with `}`, and the
parser must return one row per line; together these prove one object per line. (The first check also
keeps a leading `null` away from pyarrow 26, which crashes on it.) pyarrow does not check that its
input is UTF-8, so that is done first. Duplicate keys are refused in the fields that are read. An
escaped `\\u0000` is an ordinary character; a raw NUL is an error. A bad line costs a few parses of
its neighbours.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from penstock.core.arrays import Bool, Int64
from penstock.core.arrow import empty_table
from penstock.core.compiled import address_of
from penstock.data.sources import _kernels as k
from penstock.data.sources.checks import MAX_LINE_BYTES, check_table, explain_line
from penstock.data.sources.lines import BLOCK_BYTES, NEWLINE
from penstock.data.sources.records import Fields, RecordBlock, Reject, excerpt

Integers = Int64
Flags = Bool
_OPEN, _CLOSE = b"{}"


def parse_block(
    data: bytes | memoryview,
    file: str,
    first_line: int,
    fields: Fields,
    size_bytes: int,
    rejects: Sequence[Reject] = (),
) -> tuple[RecordBlock, int]:
    """Parse whole lines.

    Args:
        data: Lines, the last with or without its newline.
        file: Name for messages.
        first_line: Number of the first line.
        fields: What to read.
        size_bytes: Raw bytes to report as consumed.
        rejects: More rejects of this block.

    Returns:
        The records, with a reject for each line that does not hold one; and the number of newlines.
    """
    found = parse_plain(data, first_line, fields, size_bytes, rejects)
    return found or parse_with_arrow(data, file, first_line, fields, size_bytes, rejects)


def parse_plain(
    data: bytes | memoryview,
    first_line: int,
    fields: Fields,
    size_bytes: int,
    rejects: Sequence[Reject],
) -> tuple[RecordBlock, int] | None:
    """`parse_block` with the kernel; None if a line is not plain, or more than the text is
    requested.
    """
    if fields.weights or fields.columns or "." in fields.text or len(data) > MAX_LINE_BYTES:
        return None
    source, name = np.frombuffer(data, np.uint8), np.frombuffer(fields.text.encode(), np.uint8)
    most = most_texts(len(data), len(name))
    texts, ends, lines = (
        np.empty(len(data), np.uint8),
        np.empty(most + 1, np.int64),
        np.empty(most, np.int64),
    )
    places = np.uint64(address_of(source)), np.uint64(address_of(texts))
    count, newlines = k.read_texts(places[0], len(source), name, places[1], ends, lines)
    if count == k.ODD or not is_utf8(data):
        return None
    array = pa.LargeStringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(texts))
    files = np.zeros(count, np.int32)
    return RecordBlock(
        array, lines[:count] + first_line, files, None, {}, size_bytes, list(rejects)
    ), newlines


def most_texts(size: int, name_bytes: int) -> int:
    """Upper bound of the texts in `size` bytes of lines: no line is shorter than {"name":"a"} and a
    newline.
    """
    return (size + 1) // (name_bytes + len('{"":"a"}\n'))


def parse_with_arrow(
    data: bytes | memoryview,
    file: str,
    first_line: int,
    fields: Fields,
    size_bytes: int,
    rejects: Sequence[Reject],
) -> tuple[RecordBlock, int]:
    """`parse_block` with pyarrow, for any lines."""
    starts, ends = _line_bounds(data)
    fit, blank = _check_edges(data, starts, ends)
    parser = _Parser(data, starts, ends, fields.schema, [], [], [])
    for begin, end in _runs(fit | blank):
        parser.parse(begin, end, blank)
    parser.bad.extend(np.flatnonzero(~(fit | blank)).tolist())

    def explain(line: int) -> Reject:
        raw = bytes(data[starts[line] : ends[line]])
        reason = explain_line(raw, fields) or _parser_message(raw, fields.schema)
        return Reject(file, first_line + line, reason, excerpt(raw))

    table = pa.concat_tables(parser.tables) if parser.tables else empty_table(fields.schema)
    rows = np.concatenate(parser.rows) if parser.rows else np.empty(0, np.int64)
    block = check_table(
        table,
        fields,
        lines=rows + first_line,
        files=np.zeros(len(rows), np.int32),
        size_bytes=size_bytes,
        explain=lambda row: explain(int(rows[row])),
        rejects=[*rejects, *(explain(line) for line in parser.bad)],
    )
    return block, len(ends) - (not _ends_line(data))


@final
@dataclass(frozen=True, slots=True)
class _Parser:
    """Parses runs of lines; halves a run until its bad lines are isolated."""

    data: bytes | memoryview
    starts: Integers
    ends: Integers
    schema: pa.Schema
    tables: list[pa.Table]
    rows: list[Integers]
    bad: list[int]

    def parse(self, begin: int, end: int, blank: Flags) -> None:
        """Parse lines [begin, end), each blank or between braces."""
        rows = begin + np.flatnonzero(~blank[begin:end])
        if len(rows) == 0:
            return
        piece = memoryview(self.data)[self.starts[begin] : self.ends[end - 1]]
        table = _parse(piece, self.schema)
        if table is not None and table.num_rows == len(rows):
            self.tables.append(table)
            self.rows.append(rows)
        elif len(rows) == 1:
            self.bad.append(int(rows[0]))
        else:
            middle = (begin + end) // 2
            self.parse(begin, middle, blank)
            self.parse(middle, end, blank)


def _parse(piece: memoryview, schema: pa.Schema) -> pa.Table | None:
    """The objects of `piece` as a table; None if anything in it is wrong."""
    if len(piece) > MAX_LINE_BYTES + BLOCK_BYTES or not is_utf8(piece):
        return None
    try:
        return _read(piece, schema)
    except pa.ArrowException:
        return None


def _read(piece: memoryview, schema: pa.Schema) -> pa.Table:
    return pj.read_json(
        pa.BufferReader(pa.py_buffer(piece)),
        read_options=pj.ReadOptions(use_threads=False, block_size=len(piece) + 1),
        parse_options=pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )


def _parser_message(raw: bytes, schema: pa.Schema) -> str:
    """The parser's own message about a line that Python's JSON accepts."""
    try:
        _read(memoryview(raw), schema)
    except pa.ArrowException as error:
        return f"not JSON: {str(error).removesuffix(' in row 0').rstrip('.')}"
    return "the line is not one JSON object"


def is_utf8(data: bytes | memoryview) -> bool:
    """Whether all of `data` is UTF-8; 15 GB/s."""
    whole = pa.LargeBinaryArray.from_buffers(
        pa.large_string(),
        1,
        [None, pa.py_buffer(np.array([0, len(data)], np.int64)), pa.py_buffer(data)],
    )
    try:
        whole.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _ends_line(data: bytes | memoryview) -> bool:
    return not len(data) or data[-1] == NEWLINE


def _line_bounds(data: bytes | memoryview) -> tuple[Integers, Integers]:
    """Where each line begins, and where it ends, without its newline."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == NEWLINE)
    if not _ends_line(data):
        ends = np.append(ends, len(data))
    starts = np.zeros(len(ends), np.int64)
    starts[1:] = ends[:-1] + 1
    return starts, ends


def _check_edges(data: bytes | memoryview, starts: Integers, ends: Integers) -> tuple[Flags, Flags]:
    """Which lines begin with `{` and end with `}`, and which are blank."""
    blank = np.zeros(len(starts), np.bool_)
    if not len(starts):
        return blank.copy(), blank
    values = np.frombuffer(data, np.uint8)
    fit = (
        (values[np.minimum(starts, len(data) - 1)] == _OPEN)
        & (values[np.maximum(ends - 1, 0)] == _CLOSE)
        & (ends > starts)
    )
    for line in np.flatnonzero(~fit):
        stripped = bytes(data[starts[line] : ends[line]]).strip(b" \t\r")
        blank[line] = not stripped
        fit[line] = stripped.startswith(b"{") and stripped.endswith(b"}")
    return fit, blank


def _runs(mask: Flags) -> Iterator[tuple[int, int]]:
    """The [begin, end) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return ((int(begin), int(end)) for begin, end in edges.reshape(-1, 2))
