"""Turns rows that Arrow has already typed (Parquet, saved `datasets`) into checked blocks.

Text columns may be string, large string, string view or a dictionary of these. Neither format promises that its
strings are UTF-8, so that is checked here.
"""

from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import RecordError
from penstock.sources.checks import check_records, diagnose, flat_column
from penstock.sources.parsing import is_utf8
from penstock.sources.records import Fields, RecordBlock, Reject, excerpt


def require_columns(schema: pa.Schema, fields: Fields, path: str) -> None:
    """Raise when a file has not the columns that are asked for.

    Raises:
        RecordError: A column is missing, or the text is not of a text type.
    """
    if fields.whole:
        return
    for name in fields.names:
        if find_type(schema, name) is None:
            raise RecordError(
                f"{path}: no column {name!r}; the file has: {', '.join(schema.names)}; "
                "name the column that holds the text: --text-field"
            )
    kind = find_type(schema, fields.text)
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)):
        raise RecordError(f"{path}: column {fields.text!r} holds {kind}; due: string")


def find_type(schema: pa.Schema, name: str) -> Any:
    """Type of a field, looked up through structs; None when it is not there."""
    kind: Any = pa.struct(list(schema))
    for part in name.split("."):
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return None
        kind = kind.field(part).type
    return kind


def block_of_rows(table: pa.Table, fields: Fields, path: str, first_row: int, size_bytes: int) -> RecordBlock:
    """Check rows of one file.

    Args:
        table: Rows with at least the columns asked for.
        fields: What to read.
        path: The file, for messages.
        first_row: Number of the first row, from 0.
        size_bytes: What to report as consumed.

    Raises:
        RecordError: A column cannot be read as the type it is asked for.
    """
    raw = flat_column(table, fields.text)
    texts, not_utf8 = _checked_utf8(_cast(raw, pa.large_string(), fields.text, path))
    flat = {name: _cast(flat_column(table, name), _due(fields, name), name, path) for name in fields.names[1:]}

    def explain(row: int) -> Reject:
        if row in not_utf8:
            reason = f"field {fields.text!r}: byte {not_utf8[row].start} is not UTF-8 ({not_utf8[row].reason})"
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


def _due(fields: Fields, name: str) -> pa.DataType:
    return find_type(fields.schema, name)


def _cast(column: pa.Array, kind: pa.DataType, name: str, path: str) -> pa.Array:
    if column.type == kind:
        return column
    try:
        if pa.types.is_list(kind):
            return pa.array(column.to_pylist(), kind)
        return column.cast(kind)
    except (pa.ArrowException, TypeError) as error:
        raise RecordError(f"{path}: column {name!r} holds {column.type}; due: {kind} ({error})") from error


def _checked_utf8(texts: pa.Array) -> tuple[pa.Array, dict[int, UnicodeDecodeError]]:
    """The texts with null for each that is not UTF-8, and what is wrong with those."""
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
    return pa.array([None if row in bad else value for row, value in enumerate(values)], pa.large_binary()).cast(
        pa.large_string()
    ), bad
