"""Reads JSONL: one object a line, a large file in several byte ranges, a compressed one whole.

Ranges know the numbers of their lines because newlines are counted first: of a local file at some GB/s, of a remote one
at the price of reading it twice.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from penstock.sources.damage import Damage, OnDamage, Unreadable, stop_at_damage
from penstock.sources.files import Extent, SourceFile, open_ranges, refuse_wrong_data
from penstock.sources.lines import count_newlines, cut_range, cut_stream, few_lines, next_line
from penstock.sources.objects import ObjectBlock, parse_lines
from penstock.sources.parsing import parse_block
from penstock.sources.records import Fields, RecordBlock


@final
@dataclass(frozen=True, slots=True)
class JsonlPart:
    """The lines of one file whose first byte lies in [begin, end); of a compressed file, all lines."""

    file: SourceFile
    fields: Fields
    begin: int
    end: int
    first_line: int | None = None
    """Number of the first line; None: counted when it is needed."""

    @property
    def name(self) -> str:
        """For people: the file, and the range where there are several."""
        return f"{self.file.path} [bytes {self.begin}:{self.end}]" if self.is_range else self.file.path

    @property
    def is_range(self) -> bool:
        """Whether other parts read the rest of the file."""
        return self.begin > 0 or self.end < self.file.size_bytes

    @property
    def identity(self) -> str:
        """What it reads, whatever that holds."""
        numbered = "" if self.first_line is None else f" from line {self.first_line}"
        return f"{self.file.path} bytes {self.begin}:{self.end}{numbered}"

    @property
    def sources(self) -> tuple[SourceFile, ...]:
        """What it reads from."""
        return (self.file,)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that `RecordBlock.files` points into."""
        return (self.file.path,)

    @property
    def size_bytes(self) -> int:
        """Raw bytes, for progress."""
        return self.end - self.begin

    def extents(self) -> tuple[Extent, ...]:
        """The bytes that decide what comes of it, of a local file: its lines, and the byte before them."""
        if self.file.is_remote:
            return ()
        end, size = self.end, self.file.size_bytes
        if 0 < end < size:
            with open_ranges(self.file) as read:
                end = next_line(read, end - 1, size, size)
        return ((self.file, max(self.begin - 1, 0), end),)

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """The records, in order of lines."""
        for data, line, size_bytes in self._lines(damaged):
            yield parse_block(data, self.file.path, line, self.fields, size_bytes)[0]

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """The records, whole, in order of lines."""
        for data, line, size_bytes in self._lines(damaged):
            yield parse_lines(data, self.file.path, line, size_bytes)

    def newlines(self) -> int:
        """Newlines in [begin − 1, end − 1): what ranges add up to number the lines of later ones."""
        return count_newlines(self.file, max(self.begin - 1, 0), self.end - 1)

    def _lines(self, damaged: OnDamage) -> Iterator[tuple[bytes | memoryview, int, int]]:
        """Whole lines, about a block at a time; the number of the first, and the raw bytes they took."""
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
        """Whole lines, about a block at a time, and the raw bytes they took."""
        if self.file.compression or (self.file.is_remote and not self.is_range):
            return cut_stream(self.file)
        return cut_range(self.file, self.begin, self.end)


def number_lines(
    parts: Sequence[Any], apply: Callable[[Callable[[Any], int], Iterable[Any]], Iterable[int]] = map
) -> list[Any]:
    """Tell ranges of large files the numbers of their first lines, at the cost of counting newlines once.

    Args:
        parts: Parts of any format, those of a file in order.
        apply: `map`, or one that runs in several processes.

    Returns:
        The same parts; those of JSONL know their first line.
    """
    ranges = [at for at, part in enumerate(parts) if isinstance(part, JsonlPart) and part.is_range]
    # After the last range of a file no line needs a number.
    counted = [at for at in ranges if parts[at].end < parts[at].file.size_bytes]
    counts = dict(zip(counted, apply(JsonlPart.newlines, [parts[at] for at in counted]), strict=True))
    numbered, seen = list(parts), 0
    for at in ranges:
        seen = 0 if parts[at].begin == 0 else seen
        numbered[at] = replace(parts[at], first_line=1 if parts[at].begin == 0 else seen + 2)
        seen += counts.get(at, 0)
    return numbered
