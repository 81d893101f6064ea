"""Reads Parquet and Arrow files, and folders that `datasets` saved (Arrow streams with a list of
their names).

A part of a Parquet file is a few row groups. Only the requested columns are read, also from remote
files. Text columns may be string, large string, string view or a dictionary of these. Neither
format promises that its strings are UTF-8, so this module checks it.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.errors import RecordError
from penstock.core.json_values import JsonObject
from penstock.data.sources.arrow_values import decoded_rows, holds_json, is_json
from penstock.data.sources.checks import check_records, diagnose, flat_column
from penstock.data.sources.files import (
    Extent,
    FilePart,
    SourceFile,
    WholeFilePart,
    local_file,
    open_random,
    other_content,
)
from penstock.data.sources.lines import BLOCK_LINES
from penstock.data.sources.objects import ObjectBlock, block_of_records, rows_as_objects
from penstock.data.sources.parsing import is_utf8
from penstock.data.sources.records import (
    Damage,
    Fields,
    OnDamage,
    RecordBlock,
    Reject,
    excerpt,
    stop_at_damage,
)
from penstock.data.stores.remote_files import Unreadable

BATCH_ROWS = 2048
_FILE_MAGIC = b"ARROW1"
_FOOTER_END = b"....PAR1"
"""What follows the metadata of a Parquet footer: its length and a magic word."""


def require_columns(schema: pa.Schema, fields: Fields, path: str) -> None:
    """Raise when a file lacks a requested column.

    Raises:
        RecordError: A column is missing, or the text column does not hold text.
    """
    if fields.whole:
        return
    for name in fields.names:
        if find_type(schema, name) is None:
            raise RecordError(
                f"{path}: no column {name!r}; the file has: {', '.join(schema.names)}; "
                "set text_field to the column that holds the text"
            )
    kind = find_type(schema, fields.text)
    if is_json(pa.field(fields.text, kind)):
        return  # each value is checked
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (
        pa.types.is_string(value)
        or pa.types.is_large_string(value)
        or pa.types.is_string_view(value)
    ):
        raise RecordError(f"{path}: column {fields.text!r} holds {kind}; expected: string")


def find_type(schema: pa.Schema, name: str) -> Any:
    """Type of a field, looked up through structs, or that of JSON around it; None if it is
    missing.
    """
    kind = pa.struct(list(schema))
    for part in name.split("."):
        if is_json(pa.field(name, kind)):
            return kind
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return None
        kind = kind.field(part).type
    return kind


def _with_json(schema: pa.Schema, names: Sequence[str]) -> bool:
    """Whether one of the fields, or a column around it, holds JSON."""
    columns = {name.partition(".")[0] for name in names}
    return any(field.name in columns and holds_json(field) for field in schema)


def block_of_rows(
    table: pa.Table, fields: Fields, path: str, first_row: int, size_bytes: int
) -> RecordBlock:
    """Check rows of one file.

    Args:
        table: Rows with at least the requested columns.
        fields: What to read.
        path: The file, for messages.
        first_row: Number of the first row, from 0.
        size_bytes: Raw bytes to report as consumed.

    Raises:
        RecordError: A column cannot be converted to the requested type.
    """
    if _with_json(table.schema, fields.names):
        found = [
            (first_row + at, row, reason, repr(row))
            for at, (row, reason) in enumerate(decoded_rows(table))
        ]
        return block_of_records(found, fields, path, size_bytes)
    raw = flat_column(table, fields.text)
    texts, not_utf8 = _checked_utf8(_cast(raw, pa.large_string(), fields.text, path))
    schema = fields.schema
    flat = {
        name: _cast(flat_column(table, name), find_type(schema, name), name, path)
        for name in fields.names[1:]
    }

    def explain(row: int) -> Reject:
        if row in not_utf8:
            reason = (
                f"field {fields.text!r}: byte {not_utf8[row].start} is not UTF-8 "
                f"({not_utf8[row].reason})"
            )
            return Reject(path, first_row + row, reason, excerpt(not_utf8[row].object))
        record = table.slice(row, 1).to_pylist()[0]
        reason = diagnose(record, fields) or "the row cannot be read"
        return Reject(path, first_row + row, reason, excerpt(repr(record)))

    return check_records(
        texts,
        flat.get(fields.weights) if fields.weights else None,
        {name: flat[name] for name in fields.columns},
        lines=first_row + np.arange(len(texts)),
        files=np.zeros(len(texts), np.int32),
        size_bytes=size_bytes,
        explain=explain,
        rejects=[],
    )


def _cast(column: pa.Array, kind: pa.DataType, name: str, path: str) -> pa.Array:
    if column.type == kind:
        return column
    try:
        if pa.types.is_list(kind):
            return pa.array(column.to_pylist(), kind)
        return column.cast(kind)
    except (pa.ArrowException, TypeError) as error:
        raise RecordError(
            f"{path}: column {name!r} holds {column.type}; expected: {kind} ({error})"
        ) from error


def _checked_utf8(texts: pa.Array) -> tuple[pa.Array, dict[int, UnicodeDecodeError]]:
    """The texts, with null in place of each that is not UTF-8, and row → what is wrong with it."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        pass
    else:
        return texts, {}
    bad: dict[int, UnicodeDecodeError] = {}
    values = texts.cast(pa.large_binary()).to_pylist()
    for row, value in enumerate(values):
        if value is not None and not is_utf8(value):
            try:
                value.decode()
            except UnicodeDecodeError as error:
                bad[row] = error
    return pa.array(
        [None if row in bad else value for row, value in enumerate(values)], pa.large_binary()
    ).cast(pa.large_string()), bad


@final
@dataclass(frozen=True, slots=True)
class ArrowPart(WholeFilePart):
    """One Arrow file, in the stream format or the file format."""

    fields: Fields

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """Yield the rows in order."""
        for table, row, size_bytes in self._tables(damaged):
            require_columns(table.schema, self.fields, self.file.path)
            yield block_of_rows(table, self.fields, self.file.path, row, size_bytes)

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """Yield the rows with all their columns, in order."""
        for table, row, size_bytes in self._tables(damaged):
            yield rows_as_objects(table, self.file.path, row, size_bytes)

    def _tables(self, damaged: OnDamage) -> Iterator[tuple[pa.Table, int, int]]:
        """Yield some rows, the number of the first, and the raw bytes they took."""
        row = counted = 0
        with open_random(self.file) as stream:
            try:
                for batch in _batches(stream):
                    position = max(min(stream.tell(), self.size_bytes), counted)
                    for begin in range(0, batch.num_rows, BLOCK_LINES):
                        rows = batch.slice(begin, BLOCK_LINES)
                        yield pa.Table.from_batches([rows]), row + begin, position - counted
                        counted = position
                    row, counted = row + batch.num_rows, position
            except (pa.ArrowException, OSError, Unreadable) as error:
                reason = f"not sound Arrow: {error}{other_content(self.file)}"
                damaged(
                    Damage(self.file.path, row, reason, self.size_bytes, self.size_bytes - counted)
                )


def _batches(stream: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    is_file = stream.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    stream.seek(0)
    if is_file:
        reader = pa.ipc.open_file(stream)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(stream)


def find_saved(folder: str | os.PathLike[str]) -> list[SourceFile] | None:
    """The data files of a folder that `datasets` saved, in its order; None if it is not such a
    folder.

    Raises:
        RecordError: The folder holds several splits, or rows chosen by an index file.
    """
    path = os.path.expanduser(os.fspath(folder))
    if os.path.isfile(os.path.join(path, "dataset_dict.json")):
        splits = _read_json(os.path.join(path, "dataset_dict.json")).get("splits", [])
        cures = ", ".join(os.path.join(path, split) for split in splits)
        raise RecordError(
            f"{path}: holds {len(splits)} splits of a `datasets` dictionary; name one: {cures}"
        )
    state_path = os.path.join(path, "state.json")
    if not os.path.isfile(state_path) or not os.path.isfile(
        os.path.join(path, "dataset_info.json")
    ):
        return None
    state = _read_json(state_path)
    if state.get("_indices_files"):
        raise RecordError(
            f"{state_path}: rows are chosen by an index file; save it again after "
            ".flatten_indices()"
        )
    names = [entry["filename"] for entry in state.get("_data_files", [])]
    missing = next((name for name in names if not os.path.isfile(os.path.join(path, name))), None)
    if missing or not names:
        raise RecordError(
            f"{state_path}: names the data file {missing!r}, which is not there; the folder was cut"
        )
    return [local_file(os.path.join(path, name)) for name in names]


def _read_json(path: str) -> JsonObject:
    try:
        with open(path, encoding="utf-8") as stream:
            content: JsonObject = json.load(stream)
    except ValueError as error:
        raise RecordError(f"{path}: not JSON: {error}") from error
    return content


@final
@dataclass(frozen=True, slots=True)
class ParquetPart(FilePart):
    """Row groups [begin, end) of one file."""

    fields: Fields
    begin: int
    end: int
    first_row: int
    num_rows: int
    size_bytes: int
    span: tuple[int, int] = (0, 0)
    """Bytes [begin, end) of the file that hold the row groups."""
    footer_bytes: int = 0

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.file.path} [row groups {self.begin}:{self.end}]"

    @property
    def identity(self) -> str:
        """Identity of the input (path and range), independent of its bytes."""
        return f"{self.file.key} row groups {self.begin}:{self.end} from row {self.first_row}"

    def extents(self) -> tuple[Extent, ...]:
        """The bytes of a local file that determine the result: the row groups and the footer."""
        if self.file.is_remote:
            return ()
        size = self.file.size_bytes
        return (self.file, *self.span), (self.file, max(size - self.footer_bytes, 0), size)

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """Yield the rows in order."""
        for table, row, size_bytes in self._tables(self.fields.names, damaged):
            yield block_of_rows(table, self.fields, self.file.path, row, size_bytes)

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """Yield the rows with all their columns, in order."""
        for table, row, size_bytes in self._tables(None, damaged):
            yield rows_as_objects(table, self.file.path, row, size_bytes)

    def _tables(
        self, columns: list[str] | None, damaged: OnDamage
    ) -> Iterator[tuple[pa.Table, int, int]]:
        """Yield some rows, the number of the first, and the raw bytes they took."""
        row, unread = self.first_row, self.size_bytes
        try:
            with open_parquet(self.file) as reader:
                groups = list(range(self.begin, self.end))
                if columns is not None and _with_json(reader.schema_arrow, columns):
                    columns = list(dict.fromkeys(name.partition(".")[0] for name in columns))
                for batch in reader.iter_batches(
                    BATCH_ROWS, groups, columns=columns, use_threads=False
                ):
                    size_bytes = self.size_bytes * batch.num_rows // max(self.num_rows, 1)
                    yield pa.Table.from_batches([batch]), row, size_bytes
                    row, unread = row + batch.num_rows, unread - size_bytes
        except (pa.ArrowException, OSError, Unreadable) as error:
            damaged(
                Damage(self.file.path, row, f"not sound Parquet: {error}", self.size_bytes, unread)
            )


def open_parquet(file: SourceFile) -> Any:
    """Open the file; only its footer is read.

    Raises:
        Unreadable: The file is not Parquet, or was cut.
    """
    stream = open_random(file, ahead=False)
    try:
        return pq.ParquetFile(stream)
    except (pa.ArrowException, OSError) as error:
        raise Unreadable(f"not a whole Parquet file ({error}){other_content(file)}") from error


def cut_parquet(
    file: SourceFile, fields: Fields, part_bytes: int, damaged: OnDamage = stop_at_damage
) -> Iterator[ParquetPart]:
    """Cut a file into parts of about `part_bytes` raw bytes.

    If the file is damaged and `damaged` returns, there is one part, without a row group.
    """
    try:
        with open_parquet(file) as reader:
            require_columns(reader.schema_arrow, fields, file.path)
            footer_bytes = reader.metadata.serialized_size + len(_FOOTER_END)
            groups = [
                reader.metadata.row_group(number)
                for number in range(reader.metadata.num_row_groups)
            ]
    except Unreadable as error:
        damaged(Damage(file.path, 0, str(error), file.size_bytes, file.size_bytes))
        yield ParquetPart(file, fields, 0, 0, 0, 0, file.size_bytes)
        return
    sizes = [
        sum(group.column(column).total_compressed_size for column in range(group.num_columns))
        for group in groups
    ]
    begin = first_row = 0
    for end in range(1, len(groups) + 1):
        if sum(sizes[begin:end]) >= part_bytes or end == len(groups):
            num_rows = sum(group.num_rows for group in groups[begin:end])
            span = _span(groups[begin]), _span(groups[end - 1])
            place = min(span[0][0], span[1][0]), max(span[0][1], span[1][1])
            yield ParquetPart(
                file,
                fields,
                begin,
                end,
                first_row,
                num_rows,
                sum(sizes[begin:end]),
                place,
                footer_bytes,
            )
            begin, first_row = end, first_row + num_rows


def _span(group: pq.RowGroupMetaData) -> tuple[int, int]:
    """Bytes [begin, end) of the file that hold a row group."""
    columns = [group.column(number) for number in range(group.num_columns)]
    begins = [one.dictionary_page_offset or one.data_page_offset for one in columns]
    ends = [begin + one.total_compressed_size for begin, one in zip(begins, columns, strict=True)]
    return min(begins, default=0), max(ends, default=0)
