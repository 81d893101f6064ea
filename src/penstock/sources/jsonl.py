"""Reads JSONL: one object a line, a large file in several byte ranges, a compressed one whole.

Ranges know the numbers of their lines because newlines are counted first: of a local file at some GB/s, of a remote one
at the price of reading it twice.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from penstock.sources.files import SourceFile
from penstock.sources.lines import count_newlines, cut_range, cut_stream, num_newlines
from penstock.sources.objects import ObjectBlock, parse_lines
from penstock.sources.parsing import parse_block
from penstock.sources.records import Fields, RecordBlock, Reject


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
        """Changes when the input does."""
        return f"{self.file.identity} {self.begin}:{self.end}"

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that `RecordBlock.files` points into."""
        return (self.file.path,)

    @property
    def size_bytes(self) -> int:
        """Raw bytes, for progress."""
        return self.end - self.begin

    def blocks(self) -> Iterator[RecordBlock]:
        """The records, in order of lines."""
        line = self._first()
        for data, size_bytes, failure in self._cut():
            rejects = self._lost(failure, line)
            block, newlines = parse_block(data, self.file.path, line, self.fields, size_bytes, rejects)
            yield block
            line += newlines

    def objects(self) -> Iterator[ObjectBlock]:
        """The records, whole, in order of lines."""
        line = self._first()
        for data, size_bytes, failure in self._cut():
            yield parse_lines(data, self.file.path, line, size_bytes, self._lost(failure, line))
            line += num_newlines(data)

    def _lost(self, failure: str | None, line: int) -> list[Reject]:
        """A reject where the rest of the file cannot be read."""
        return [Reject(self.file.path, line, failure, "")] if failure else []

    def newlines(self) -> int:
        """Newlines in [begin − 1, end − 1): what ranges add up to number the lines of later ones."""
        return count_newlines(self.file, max(self.begin - 1, 0), self.end - 1)

    def _first(self) -> int:
        """Number of the first line."""
        if self.first_line is not None:
            return self.first_line
        return 1 if self.begin == 0 else count_newlines(self.file, 0, self.begin - 1) + 2

    def _cut(self) -> Iterator[tuple[bytes | memoryview, int, str | None]]:
        """Whole lines, about a block at a time; the raw bytes they took; and why the rest is lost, if it is."""
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
