"""Rows of Arrow tables as Python objects: JSON columns are decoded, maps become objects.

`datasets` (from 4.8 on) stores fields of mixed types as Arrow's extension type `arrow.json`, at any
depth, and decodes them when it reads them; so do we. A pyarrow without this type (before 19) shows
it in the metadata of the field.

Source of the type: Arrow's canonical extension types,
https://arrow.apache.org/docs/format/CanonicalExtensions.html
"""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from penstock.core.columnar import OwnNulls, has_none
from penstock.core.json_values import JsonObject

_NAME = b"ARROW:extension:name"
_JSON = "arrow.json"
_ONE = "item"
"""Name of the field of list items, where its metadata are lost."""

Row = tuple[JsonObject | None, str | None]
"""A row, or None, and what is wrong with it."""


def is_json(field: pa.Field) -> bool:
    """Whether a field holds JSON text that is to be decoded."""
    kind = field.type
    if isinstance(kind, pa.BaseExtensionType):
        return str(kind.extension_name) == _JSON
    return bool(field.metadata) and field.metadata.get(_NAME) == _JSON.encode()


def holds_json(field: pa.Field) -> bool:
    """Whether a field or one inside it holds JSON text that is to be decoded."""
    return is_json(field) or any(map(holds_json, _inner(field.type)))


def decoded_rows(table: pa.Table) -> Iterator[Row]:
    """The rows of a table in order; one that cannot be decoded is None, with the reason."""
    try:
        yield from ((row, None) for row in _rows(table))
    except (UnicodeDecodeError, ValueError, RecursionError):
        for number in range(table.num_rows):
            yield _one_row(table.slice(number, 1))


def _one_row(table: pa.Table) -> Row:
    try:
        return _rows(table)[0], None
    except UnicodeDecodeError:
        return None, "a text of the row is not UTF-8"
    except (ValueError, RecursionError) as error:
        return None, f"the row has a column of JSON that cannot be decoded: {error}"


def _rows(table: pa.Table) -> list[JsonObject]:
    if not any(map(_needs_work, table.schema)):
        rows: list[JsonObject] = table.to_pylist()
        return rows
    columns = [
        [value for chunk in table.column(number).chunks for value in _values(field, chunk)]
        for number, field in enumerate(table.schema)
    ]
    names = table.schema.names
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _inner(kind: pa.DataType) -> list[pa.Field]:
    if isinstance(kind, pa.BaseExtensionType):
        return _inner(kind.storage_type)
    if pa.types.is_map(kind):
        return [kind.key_field, kind.item_field]
    if pa.types.is_dictionary(kind):
        return _inner(kind.value_type)
    return (
        [kind.field(number) for number in range(kind.num_fields)]
        if pa.types.is_nested(kind)
        else []
    )


def _needs_work(field: pa.Field) -> bool:
    """Whether pyarrow's own conversion gives something else than we want."""
    kind = field.type
    return (
        is_json(field)
        or pa.types.is_map(kind)
        or (not pa.types.is_union(kind) and any(map(_needs_work, _inner(kind))))
    )


def _values(field: pa.Field, array: pa.Array) -> list[object]:
    """The values of an array whose type may hold JSON or maps."""
    if is_json(field):
        texts = array.storage if isinstance(array, pa.ExtensionArray) else array
        return [None if text is None else _decode(text) for text in texts.to_pylist()]
    kind = array.type
    if not _needs_work(field):
        return list(array.to_pylist())
    if isinstance(array, pa.ExtensionArray):
        return _values(pa.field(_ONE, kind.storage_type), array.storage)
    if pa.types.is_dictionary(kind):
        return _values(pa.field(_ONE, kind.value_type), array.dictionary_decode())
    if pa.types.is_struct(kind):
        return _objects(kind, array)
    if pa.types.is_map(kind):
        return _maps(kind, array)
    return _lists(kind.value_field, array)


def _objects(kind: pa.StructType, array: pa.StructArray) -> list[object]:
    fields = [kind.field(number) for number in range(kind.num_fields)]
    # A struct array may be a slice, and its own nulls are not those of its fields: flatten() heeds
    # both.
    columns = [
        _values(field, column) for field, column in zip(fields, array.flatten(), strict=True)
    ]
    names = [field.name for field in fields]
    there = array.is_valid().to_pylist()
    rows = zip(*columns, strict=True) if columns else ((),) * len(there)
    return [
        dict(zip(names, row, strict=True)) if valid else None
        for row, valid in zip(rows, there, strict=True)
    ]


def _maps(kind: pa.MapType, array: pa.MapArray) -> list[Any]:
    offsets = array.offsets.to_pylist()
    begin, end = offsets[0], offsets[-1]
    keys = [key if isinstance(key, str) else str(key) for key in array.keys[begin:end].to_pylist()]
    values = _values(kind.item_field, array.items[begin:end])
    found = []
    for valid, first, last in zip(array.is_valid().to_pylist(), offsets, offsets[1:], strict=False):
        pairs = dict(
            zip(
                keys[first - begin : last - begin],
                values[first - begin : last - begin],
                strict=True,
            )
        )
        found.append(_noted(pairs) if valid else None)
    return found


def _lists(field: pa.Field, array: pa.Array) -> list[object]:
    # By offsets: pyarrow's flatten() and slices by value fail on lists of JSON with nulls.
    kind, size = array.type, len(array)
    if pa.types.is_fixed_size_list(kind):
        width = kind.list_size
        begins = [(array.offset + at) * width for at in range(size)]
        ends = [begin + width for begin in begins]
    else:
        begins = array.offsets.to_pylist()
        views = isinstance(array, (pa.ListViewArray, pa.LargeListViewArray))
        ends = (
            [a + n for a, n in zip(begins, array.sizes.to_pylist(), strict=True)]
            if views
            else begins[1:]
        )
    first, last = min(begins[:size], default=0), max(ends, default=0)
    items = _values(field, array.values[first:last])
    pairs = zip(array.is_valid().to_pylist(), begins, ends, strict=False)
    return [items[begin - first : end - first] if valid else None for valid, begin, end in pairs]


def _decode(text: str) -> object:
    value = json.loads(text)
    return with_own_nulls(value) if "null" in text else value


def with_own_nulls(value: object) -> object:
    """A decoded value whose objects with nulls say that these are their own."""
    if isinstance(value, dict):
        return _noted({key: with_own_nulls(item) for key, item in value.items()})
    return [with_own_nulls(item) for item in value] if isinstance(value, list) else value


def _noted(found: JsonObject) -> JsonObject:
    return OwnNulls(found) if has_none(found) else found
