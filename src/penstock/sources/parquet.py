"""Reads Parquet: some row groups a part, only the columns asked for, of a remote file too."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import pyarrow as pa

from penstock.sources.damage import Damage, OnDamage, Unreadable, stop_at_damage
from penstock.sources.files import Extent, SourceFile, open_random
from penstock.sources.objects import ObjectBlock, rows_as_objects
from penstock.sources.records import Fields, RecordBlock
from penstock.sources.rows import block_of_rows, require_columns

BATCH_ROWS = 2048
_FOOTER_END = b"....PAR1"
"""What follows the footer's metadata: its length, and a magic word."""


@final
@dataclass(frozen=True, slots=True)
class ParquetPart:
    """Row groups [begin, end) of one file."""

    file: SourceFile
    fields: Fields
    begin: int
    end: int
    first_row: int
    num_rows: int
    size_bytes: int
    span: tuple[int, int] = (0, 0)
    """Bytes of the file in which the row groups lie."""
    footer_bytes: int = 0

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.file.path} [row groups {self.begin}:{self.end}]"

    @property
    def identity(self) -> str:
        """What it reads, whatever that holds."""
        return f"{self.file.path} row groups {self.begin}:{self.end} from row {self.first_row}"

    @property
    def sources(self) -> tuple[SourceFile, ...]:
        """What it reads from."""
        return (self.file,)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that `RecordBlock.files` points into."""
        return (self.file.path,)

    def extents(self) -> tuple[Extent, ...]:
        """The bytes that decide what comes of it, of a local file: the row groups, and what describes them."""
        if self.file.is_remote:
            return ()
        size = self.file.size_bytes
        return (self.file, *self.span), (self.file, max(size - self.footer_bytes, 0), size)

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """The rows, in order."""
        for table, row, size_bytes in self._tables(self.fields.names, damaged):
            yield block_of_rows(table, self.fields, self.file.path, row, size_bytes)

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """The rows with all their columns, in order."""
        for table, row, size_bytes in self._tables(None, damaged):
            yield rows_as_objects(table, self.file.path, row, size_bytes)

    def _tables(self, columns: list[str] | None, damaged: OnDamage) -> Iterator[tuple[pa.Table, int, int]]:
        """Some rows, the number of the first, and the raw bytes they took."""
        row, unread = self.first_row, self.size_bytes
        try:
            with open_parquet(self.file) as reader:
                groups = list(range(self.begin, self.end))
                for batch in reader.iter_batches(BATCH_ROWS, groups, columns=columns, use_threads=False):
                    size_bytes = self.size_bytes * batch.num_rows // max(self.num_rows, 1)
                    yield pa.Table.from_batches([batch]), row, size_bytes
                    row, unread = row + batch.num_rows, unread - size_bytes
        except (pa.ArrowException, OSError, Unreadable) as error:
            damaged(Damage(self.file.path, row, f"not sound Parquet: {error}", self.size_bytes, unread))


def open_parquet(file: SourceFile) -> Any:
    """Open the file; reads its footer only.

    Raises:
        Unreadable: It is not Parquet, or was cut.
    """
    import pyarrow.parquet as pq

    stream = open_random(file, ahead=False)
    try:
        return pq.ParquetFile(stream)
    except (pa.ArrowException, OSError) as error:
        raise Unreadable(f"not a whole Parquet file ({error})") from error


def cut_parquet(
    file: SourceFile, fields: Fields, part_bytes: int, damaged: OnDamage = stop_at_damage
) -> Iterator[ParquetPart]:
    """Parts of `part_bytes` raw bytes, about; where the file is damaged and that does not stop, one of no row group."""
    try:
        with open_parquet(file) as reader:
            require_columns(reader.schema_arrow, fields, file.path)
            footer_bytes = reader.metadata.serialized_size + len(_FOOTER_END)
            groups = [reader.metadata.row_group(number) for number in range(reader.metadata.num_row_groups)]
    except Unreadable as error:
        damaged(Damage(file.path, 0, str(error), file.size_bytes, file.size_bytes))
        yield ParquetPart(file, fields, 0, 0, 0, 0, file.size_bytes)
        return
    sizes = [sum(group.column(column).total_compressed_size for column in range(group.num_columns)) for group in groups]
    begin = first_row = 0
    for end in range(1, len(groups) + 1):
        if sum(sizes[begin:end]) >= part_bytes or end == len(groups):
            num_rows = sum(group.num_rows for group in groups[begin:end])
            span = _span(groups[begin]), _span(groups[end - 1])
            place = min(span[0][0], span[1][0]), max(span[0][1], span[1][1])
            yield ParquetPart(file, fields, begin, end, first_row, num_rows, sum(sizes[begin:end]), place, footer_bytes)
            begin, first_row = end, first_row + num_rows


def _span(group: Any) -> tuple[int, int]:
    """The bytes of a file in which a row group lies."""
    columns = [group.column(number) for number in range(group.num_columns)]
    begins = [one.dictionary_page_offset or one.data_page_offset for one in columns]
    ends = [begin + one.total_compressed_size for begin, one in zip(begins, columns, strict=True)]
    return min(begins, default=0), max(ends, default=0)
