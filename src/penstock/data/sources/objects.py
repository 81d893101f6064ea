"""Records as whole objects with all their fields, and records from a Python iterable.

Conversations are read from whole objects, whatever their layout. Lines are decoded one by one with
Python's JSON, at about 100 MB/s a core; encoding a conversation costs much more. Every object in a
block is a dict with texts that are valid UTF-8; anything else is among the block's rejects.

An iterable of texts or objects is consumed once, in the process that has it, and cut into parts by
the size of its records. The place of a record is its number, from 0.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import pyarrow as pa

from penstock.chat.records import nulls
from penstock.core.arrays import Int32, Int64
from penstock.core.columnar import as_plain
from penstock.core.json_values import JsonObject
from penstock.data.sources.arrow_values import decoded_rows
from penstock.data.sources.checks import (
    check_table,
    diagnose_all,
    explain_syntax,
    kind_of,
    not_utf8,
)
from penstock.data.sources.files import Extent, SourceFile
from penstock.data.sources.records import (
    Fields,
    OnDamage,
    RecordBlock,
    Reject,
    excerpt,
    stop_at_damage,
)
from penstock.data.sources.tables import records_of

Found = tuple[int, Any, str | None, Any]
"""Line or row, value, what is known to be wrong with it (None: nothing), and its raw form to quote
from.
"""

NAME = "<python>"
"""File name of records from Python."""

BLOCK_RECORDS = 4096

_ESCAPED_SURROGATE = (b"\\ud", b"\\uD")
"""A JSON line with a lone surrogate holds one of these; so does one with a pair."""


@final
@dataclass(frozen=True, slots=True)
class ObjectBlock:
    """Some whole records of one part, in order."""

    objects: list[JsonObject]

    lines: Int64
    """Place of each record in its file: line, from 1; or row, from 0, if the format has rows."""

    files: Int32
    """Which of the part's `files` each record comes from."""

    size_bytes: int
    """Raw bytes of the source that went into this block, for progress."""

    rejects: list[Reject]
    """Records that could not be read, in order."""

    removed: Counter[str] = field(default_factory=Counter)
    """Place in a record → nulls that a columnar format had added there."""

    def __len__(self) -> int:
        return len(self.objects)


def parse_lines(
    data: bytes | memoryview,
    file: str,
    first_line: int,
    size_bytes: int,
    rejects: Sequence[Reject] = (),
) -> ObjectBlock:
    """Decode whole lines with an object each; blank lines are skipped.

    Args:
        data: Lines, the last with or without its newline.
        file: Name for messages.
        first_line: Number of the first line.
        size_bytes: Raw bytes to report as consumed.
        rejects: More rejects of this block.
    """
    found: list[Found] = []
    for number, raw in enumerate(bytes(data).split(b"\n"), first_line):
        if raw and not raw.isspace():
            value, reason = _decode(raw)
            found.append((number, value, reason, raw))
    return gather(found, file, size_bytes, rejects)


def gather(
    found: Sequence[Found], file: str, size_bytes: int, rejects: Sequence[Reject] = ()
) -> ObjectBlock:
    """Build a block from what a reader found.

    Args:
        found: Values, good and bad.
        file: Name for messages.
        size_bytes: Raw bytes to report as consumed.
        rejects: More rejects of this block.
    """
    objects, lines, bad = [], [], list(rejects)
    for line, value, reason, quoted in found:
        if reason is None and are_messages(value):
            value = {"messages": value}
        if reason is None and not isinstance(value, dict):
            reason = (
                f"the record is {kind_of(value)}; expected: an object with messages, or a list of "
                "messages"
            )
        if reason is not None:
            quoted = quoted if isinstance(quoted, bytes | str) else repr(quoted)
            bad.append(Reject(file, line, reason, excerpt(quoted)))
        else:
            objects.append(value)
            lines.append(line)
    bad.sort(key=lambda reject: reject.line)
    return ObjectBlock(
        objects, np.array(lines, np.int64), np.zeros(len(lines), np.int32), size_bytes, bad
    )


def are_messages(value: object) -> bool:
    """Whether a value is a conversation without an object around it: a list whose first item is a
    message.
    """
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], dict):
        return False
    first = value[0]
    return isinstance(first.get("role"), str) or (
        isinstance(first.get("from"), str) and "value" in first
    )


def rows_as_objects(table: pa.Table, file: str, first_row: int, size_bytes: int) -> ObjectBlock:
    """Rows that Arrow has typed, without the nulls that it added; those that cannot be decoded are
    rejects.
    """
    found = [
        (first_row + at, row, reason, row) for at, (row, reason) in enumerate(decoded_rows(table))
    ]
    return without_added_nulls(gather(found, file, size_bytes), columnar=True)


def without_added_nulls(block: ObjectBlock, *, columnar: bool) -> ObjectBlock:
    """A block without the nulls that a columnar format added.

    Args:
        block: Records.
        columnar: They come from such a format; False: they are Python objects, which may.
    """
    objects, removed = [], block.removed.copy()
    for value in block.objects:
        kept, places = nulls.without_added_nulls(value, columnar=columnar)
        objects.append(kept)
        removed.update(places)
    return replace(block, objects=objects, removed=removed)


def lone_surrogate(value: object) -> str | None:
    """Where a decoded value contains half of a surrogate pair, in words; None: nowhere."""
    for text in texts_of(value):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            at = error.start
            return (
                f"a text of the record has a lone surrogate U+{ord(text[at]):04X} at "
                f"character {at}, which is half of a character and not valid UTF-8; it was "
                f"cut in the middle: {excerpt(text[max(at - 20, 0) :])!r}"
            )
    return None


def texts_of(value: object) -> list[str]:
    """All texts of a decoded value, including keys."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = [item for pair in value.items() for item in pair]
    return (
        [text for item in value for text in texts_of(item)]
        if isinstance(value, list | tuple)
        else []
    )


def _decode(raw: bytes) -> tuple[Any, str | None]:
    try:
        value = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        return None, not_utf8(raw, error)
    except json.JSONDecodeError as error:
        return None, explain_syntax(raw.decode().strip(), error)
    except RecursionError:
        return None, "the JSON cannot be read: its objects are nested too deeply"
    if any(mark in raw for mark in _ESCAPED_SURROGATE):
        return value, lone_surrogate(value)
    return value, None


@final
@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Some records of an iterable, from number `first` on."""

    records: tuple[Any, ...]
    fields: Fields
    first: int
    size_bytes: int
    columnar: bool = False
    """Whether the records come from a columnar format."""

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{NAME} [records {self.first}:{self.first + len(self.records)}]"

    @property
    def identity(self) -> str:
        """A hash of the records."""
        digest = hashlib.blake2b(digest_size=16)
        for record in self.records:
            text = repr(record).encode("utf-8", "surrogatepass")
            digest.update(len(text).to_bytes(8, "little") + text)
        return f"{self.name} {digest.hexdigest()}"

    @property
    def sources(self) -> tuple[SourceFile, ...]:
        """No file."""
        return ()

    @property
    def files(self) -> tuple[str, ...]:
        """The name that takes the place of a file's."""
        return (NAME,)

    @property
    def addresses(self) -> tuple[str, ...]:
        """As `files`."""
        return (NAME,)

    def extents(self) -> tuple[Extent, ...]:
        """Empty: the identity covers the content."""
        return ()

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """Yield the records in order."""
        for begin in range(0, len(self.records), BLOCK_RECORDS):
            yield self._block(begin, self.records[begin : begin + BLOCK_RECORDS])

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """Yield whole records in order."""
        for begin in range(0, len(self.records), BLOCK_RECORDS):
            records = [as_plain(record) for record in self.records[begin : begin + BLOCK_RECORDS]]
            numbers = range(self.first + begin, self.first + begin + len(records))
            found = list(zip(numbers, records, map(lone_surrogate, records), records, strict=True))
            block = gather(found, NAME, self.size_bytes * len(records) // len(self.records))
            yield without_added_nulls(block, columnar=self.columnar)

    def _block(self, begin: int, records: tuple[object, ...]) -> RecordBlock:
        rows: list[Found] = []
        for number, record in enumerate(records, self.first + begin):
            row = {self.fields.text: record} if isinstance(record, str) else as_plain(record)
            rows.append((number, row, None, repr(record)))
        return block_of_records(
            rows, self.fields, NAME, self.size_bytes * len(records) // len(self.records)
        )


def block_of_records(
    found: Sequence[Found], fields: Fields, file: str, size_bytes: int
) -> RecordBlock:
    """Check the fields of records that are Python values.

    Args:
        found: Records, good and bad.
        fields: What to read.
        file: Name for messages.
        size_bytes: Raw bytes to report as consumed.
    """
    good: list[Found] = []
    rejects: list[Reject] = []
    reasons = diagnose_all([row for _, row, _, _ in found], fields)
    for (line, row, known, quoted), diagnosed in zip(found, reasons, strict=True):
        reason = known or diagnosed
        if reason is None:
            good.append((line, row, None, quoted))
        else:
            rejects.append(Reject(file, line, reason, excerpt(quoted)))
    return check_table(
        pa.Table.from_pylist([row for _, row, _, _ in good], schema=fields.schema),
        fields,
        lines=np.array([line for line, *_ in good], np.int64),
        files=np.zeros(len(good), np.int32),
        size_bytes=size_bytes,
        explain=lambda row: Reject(
            file, good[row][0], "the record cannot be read", excerpt(good[row][3])
        ),
        rejects=rejects,
    )


def cut_records(records: Iterable[object], fields: Fields, part_bytes: int) -> Iterator[MemoryPart]:
    """Consume an iterable, or a table, and yield parts of about `part_bytes` characters of text."""
    rows, columnar = records_of(records)
    waiting = []
    first = size = 0
    for record in rows:
        waiting.append(record)
        text = record.get(fields.text) if isinstance(record, dict) and not fields.whole else record
        text = repr(record) if fields.whole else text
        size += len(text) if isinstance(text, str) else 1
        if size >= part_bytes:
            yield MemoryPart(tuple(waiting), fields, first, size, columnar)
            first, size, waiting = first + len(waiting), 0, []
    if waiting:
        yield MemoryPart(tuple(waiting), fields, first, size, columnar)
