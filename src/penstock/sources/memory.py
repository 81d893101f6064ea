"""Reads records that Python hands over: any iterable of texts or of objects with fields.

The iterable is consumed once, in the process that has it, and cut into parts by the size of what it gives. A record's
place is its number, from 0.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pyarrow as pa

from penstock.sources.checks import check_table, diagnose
from penstock.sources.damage import OnDamage, stop_at_damage
from penstock.sources.files import Extent, SourceFile
from penstock.sources.objects import ObjectBlock, gather, lone_surrogate
from penstock.sources.records import Fields, RecordBlock, Reject, excerpt

NAME = "<python>"
"""What stands for the file name."""

BLOCK_RECORDS = 4096


@final
@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Some records of an iterable, from number `first` on."""

    records: tuple[Any, ...]
    fields: Fields
    first: int
    size_bytes: int

    @property
    def name(self) -> str:
        """For people."""
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
        """What stands for the file name."""
        return (NAME,)

    def extents(self) -> tuple[Extent, ...]:
        """None: the identity says it all."""
        return ()

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """The records, in order."""
        for begin in range(0, len(self.records), BLOCK_RECORDS):
            yield self._block(begin, self.records[begin : begin + BLOCK_RECORDS])

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """The records, whole, in order."""
        for begin in range(0, len(self.records), BLOCK_RECORDS):
            records = self.records[begin : begin + BLOCK_RECORDS]
            numbers = range(self.first + begin, self.first + begin + len(records))
            found = list(zip(numbers, records, map(lone_surrogate, records), records, strict=True))
            yield gather(found, NAME, self.size_bytes * len(records) // len(self.records))

    def _block(self, begin: int, records: tuple[Any, ...]) -> RecordBlock:
        good: list[Any] = []
        lines: list[int] = []
        rejects: list[Reject] = []
        for number, record in enumerate(records, self.first + begin):
            row = {self.fields.text: record} if isinstance(record, str) else record
            reason = diagnose(row, self.fields)
            if reason is None:
                good.append(row)
                lines.append(number)
            else:
                rejects.append(Reject(NAME, number, reason, excerpt(repr(record))))
        return check_table(
            pa.Table.from_pylist(good, schema=self.fields.schema),
            self.fields,
            lines=np.array(lines, np.int64),
            files=np.zeros(len(lines), np.int32),
            size_bytes=self.size_bytes * len(records) // len(self.records),
            explain=lambda row: Reject(NAME, lines[row], "the record cannot be read", excerpt(repr(good[row]))),
            rejects=rejects,
        )


def cut_records(records: Iterable[Any], fields: Fields, part_bytes: int) -> Iterator[MemoryPart]:
    """Consume an iterable and yield parts of `part_bytes` characters of text, about."""
    waiting: list[Any] = []
    first = size = 0
    for record in records:
        waiting.append(record)
        text = record.get(fields.text) if isinstance(record, dict) and not fields.whole else record
        text = repr(record) if fields.whole else text
        size += len(text) if isinstance(text, str) else 1
        if size >= part_bytes:
            yield MemoryPart(tuple(waiting), fields, first, size)
            first, size, waiting = first + len(waiting), 0, []
    if waiting:
        yield MemoryPart(tuple(waiting), fields, first, size)
