"""Reads Parquet: some row groups a part, only the columns asked for, of a remote file too."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import pyarrow as pa

from penstock.errors import RecordError
from penstock.sources.files import SourceFile, open_random
from penstock.sources.objects import ObjectBlock, rows_as_objects
from penstock.sources.records import Fields, RecordBlock
from penstock.sources.rows import block_of_rows, require_columns

BATCH_ROWS = 2048


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

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.file.path} [row groups {self.begin}:{self.end}]"

    @property
    def identity(self) -> str:
        """Changes when the input does."""
        return f"{self.file.identity} {self.begin}:{self.end}"

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that `RecordBlock.files` points into."""
        return (self.file.path,)

    def blocks(self) -> Iterator[RecordBlock]:
        """The rows, in order."""
        for table, row, size_bytes in self._tables(self.fields.names):
            yield block_of_rows(table, self.fields, self.file.path, row, size_bytes)

    def objects(self) -> Iterator[ObjectBlock]:
        """The rows with all their columns, in order."""
        for table, row, size_bytes in self._tables(None):
            yield rows_as_objects(table, self.file.path, row, size_bytes)

    def _tables(self, columns: list[str] | None) -> Iterator[tuple[pa.Table, int, int]]:
        """Some rows, the number of the first, and the raw bytes they took."""
        row = self.first_row
        with open_parquet(self.file) as reader:
            groups = list(range(self.begin, self.end))
            try:
                for batch in reader.iter_batches(BATCH_ROWS, groups, columns=columns, use_threads=False):
                    size_bytes = self.size_bytes * batch.num_rows // max(self.num_rows, 1)
                    yield pa.Table.from_batches([batch]), row, size_bytes
                    row += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                raise RecordError(
                    f"{self.file.path}: row {row}: cannot be read: {error}; the file is damaged"
                ) from error


def open_parquet(file: SourceFile) -> Any:
    """Open the file; reads its footer only.

    Raises:
        RecordError: It is not Parquet, or was cut.
    """
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(open_random(file, ahead=False))
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{file.path}: not a whole Parquet file: {error}") from error


def cut_parquet(file: SourceFile, fields: Fields, part_bytes: int) -> Iterator[ParquetPart]:
    """Parts of `part_bytes` raw bytes, about."""
    with open_parquet(file) as reader:
        require_columns(reader.schema_arrow, fields, file.path)
        groups = [reader.metadata.row_group(number) for number in range(reader.metadata.num_row_groups)]
    sizes = [sum(group.column(column).total_compressed_size for column in range(group.num_columns)) for group in groups]
    begin = first_row = 0
    for end in range(1, len(groups) + 1):
        if sum(sizes[begin:end]) >= part_bytes or end == len(groups):
            num_rows = sum(group.num_rows for group in groups[begin:end])
            yield ParquetPart(file, fields, begin, end, first_row, num_rows, sum(sizes[begin:end]))
            begin, first_row = end, first_row + num_rows
