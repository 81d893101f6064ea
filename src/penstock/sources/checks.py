"""Decides which records are usable: once for whole arrays, and once more, slowly and in words, for a bad one.

`check_records` is quick and decides; `diagnose` looks at one record as Python values and says what is wrong with
it. Both know the same rules, and the tests compare them.
"""

import math
from collections.abc import Callable
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow import from_numpy, to_numpy
from penstock.sources.records import Fields, RecordBlock, Reject, Weights

_CHAT_FIELDS = {"messages", "conversations", "conversation", "instruction", "completion", "chosen"}
"""Fields of records that are conversations, of layouts that the chat room reads."""


def check_table(table: pa.Table, fields: Fields, **place: Any) -> RecordBlock:
    """`check_records` for the columns of a table that has the types of `Fields.schema`."""
    weights = flat_column(table, fields.weights) if fields.weights else None
    columns = {name: flat_column(table, name) for name in fields.columns}
    return check_records(flat_column(table, fields.text), weights, columns, **place)


def check_records(
    texts: pa.LargeStringArray,
    ranges: pa.ListArray | None,
    columns: dict[str, pa.Array],
    *,
    lines: np.ndarray[Any, np.dtype[np.int64]],
    files: np.ndarray[Any, np.dtype[np.int32]],
    size_bytes: int,
    explain: Callable[[int], Reject],
    rejects: list[Reject],
) -> RecordBlock:
    """Split rows into usable records and rejects.

    Args:
        texts: The texts [rows], valid UTF-8 or null.
        ranges: Loss-weight ranges [rows] of type `WEIGHTS_TYPE`, where they are asked for.
        columns: Other fields [rows].
        lines: Place of each row in its file, int64 [rows].
        files: Which of the part's files each row is from, int32 [rows].
        size_bytes: Raw bytes that these rows took.
        explain: Row → reject, called only for bad rows.
        rejects: Records that did not even become rows; the result's list has them too, in order of place.

    Returns:
        The block.
    """
    bad = np.diff(_offsets(texts)) == 0
    if texts.null_count:
        bad |= to_numpy(texts.is_null())
    weights = None
    if ranges is not None:
        weights, bad_weights = check_weights(ranges, texts)
        bad |= bad_weights
    if bad.any():
        rejects = rejects + [explain(int(row)) for row in np.flatnonzero(bad)]
        rows = np.flatnonzero(~bad)
        keep = from_numpy(rows)
        texts, lines, files = texts.take(keep), lines[rows], files[rows]
        columns = {name: column.take(keep) for name, column in columns.items()}
        if ranges is not None:
            weights, _ = check_weights(ranges.take(keep), texts)
    rejects = sorted(rejects, key=lambda reject: reject.line)
    return RecordBlock(texts, lines, files, weights, columns, size_bytes, rejects)


def flat_column(table: pa.Table, name: str) -> pa.Array:
    """One field, found through its objects, as one array without chunks."""
    root, *path = name.split(".")
    column = table.column(root)
    if path:
        column = pc.struct_field(column, path)
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def check_weights(ranges: pa.Array, texts: pa.Array) -> tuple[Weights, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Flatten loss-weight ranges and find the rows whose ranges break a rule.

    Args:
        ranges: `list<struct<begin, end, weight>>` [rows], nullable.
        texts: Large strings [rows].

    Returns:
        The ranges of all rows, and bool [rows], True where some range is not inside the text, not rising, overlaps
        the one before, or has a negative or infinite weight.
    """
    counts = to_numpy(pc.list_value_length(ranges)).astype(np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    flat = pc.list_flatten(ranges)
    holes = [to_numpy(flat.is_null())]
    values = []
    for name, default in (("begin", -1), ("end", -1), ("weight", 1.0)):
        values.append(to_numpy(pc.struct_field(flat, [name]), default))
    begin, end, weight = values
    rows = np.repeat(np.arange(len(ranges)), counts)
    characters = to_numpy(pc.utf8_length(texts)).astype(np.int64)
    previous = np.concatenate([np.zeros(1, np.int64), end[:-1]])
    previous[offsets[:-1][counts > 0]] = 0
    wrong = holes[0] | (begin < previous) | (end <= begin) | (end > characters[rows])
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = weight.astype(np.float32)
    wrong |= ~np.isfinite(narrow) | (weight < 0)
    bad = np.zeros(len(ranges), np.bool_)
    bad[rows[wrong]] = True
    return Weights(offsets, begin, end, narrow, to_numpy(ranges.is_valid())), bad


def _offsets(texts: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    if len(texts) == 0:
        return np.zeros(1, np.int64)
    return np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]


def explain_array(where: str) -> str:
    """What is wrong with a JSON array where a record is expected; `where` is the beginning of the sentence."""
    return (
        f"{where} a JSON array; expected: one object a line. If it holds conversations (ShareGPT, Alpaca, …), name "
        "their chat template, and the array is read as it is: --template FILE.jinja, or --template auto for the "
        "tokenizer's own; an array of texts becomes lines with jq -c '.[]'"
    )


def diagnose(record: Any, fields: Fields) -> str | None:
    """Say what is wrong with one record, given as Python values; None when nothing is."""
    if isinstance(record, list):
        return explain_array("the record is")
    if not isinstance(record, dict):
        return f"the record is {kind_of(record)}; due: an object with the field {fields.text!r}"
    value, known = _look_up(record, fields.text)
    if known is not None:
        cure = "name the field that holds the text: --text-field"
        if _CHAT_FIELDS & set(known):
            cure = "conversations need a chat template: --template"
        where = "where its dots lead there are" if "." in fields.text else "the record has"
        return f"no field {fields.text!r}; {where}: {', '.join(map(repr, known)) or 'no fields'}; {cure}"
    if value is None:
        return f"field {fields.text!r} is null; due: text"
    if not isinstance(value, str):
        return f"field {fields.text!r} holds {kind_of(value)}; due: text"
    if not value:
        return f"field {fields.text!r} is empty; due: at least one character"
    surrogate = next((at for at, character in enumerate(value) if "\ud800" <= character <= "\udfff"), None)
    if surrogate is not None:
        return (
            f"field {fields.text!r} has a lone surrogate U+{ord(value[surrogate]):04X} at character {surrogate}, "
            "half of a character that no UTF-8 can hold; it was cut in the middle"
        )
    return _diagnose_weights(record, value, fields) or _diagnose_columns(record, fields)


def _diagnose_weights(record: dict[str, Any], text: str, fields: Fields) -> str | None:
    ranges = _look_up(record, fields.weights)[0] if fields.weights else None
    if ranges is None:
        return None
    due = "due: a list of {begin, end, weight}"
    if not isinstance(ranges, list):
        return f"field {fields.weights!r} holds {kind_of(ranges)}; {due}"
    previous = 0
    for number, item in enumerate(ranges):
        where = f"range {number} of {fields.weights!r}"
        if not isinstance(item, dict):
            return f"{where} is {kind_of(item)}; {due}"
        begin, end, weight = item.get("begin"), item.get("end"), item.get("weight")
        weight = 1.0 if weight is None else weight
        if not _is_integer(begin) or not _is_integer(end):
            return f"{where} goes from {begin!r} to {end!r}; due: two whole numbers, in characters"
        if not previous <= begin < end <= len(text):
            return (
                f"{where} goes from character {begin} to {end}; due: rising, after character {previous}, "
                f"inside the text of {len(text)} characters"
            )
        if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not 0 <= weight < math.inf:
            return f"{where} weighs {weight!r}; due: a number from 0"
        if weight > float(np.finfo(np.float32).max):
            return f"{where} weighs {weight!r}; due: a number that float32 can hold"
        previous = end
    return None


def _diagnose_columns(record: dict[str, Any], fields: Fields) -> str | None:
    due: dict[str, tuple[type, ...]] = {"string": (str,), "int64": (int,), "float64": (int, float), "bool": (bool,)}
    for name, kind in fields.columns.items():
        value = _look_up(record, name)[0]
        if value is None:
            continue
        if not isinstance(value, due[kind]) or (isinstance(value, bool) and kind != "bool"):
            return (
                f"field {name!r} holds {kind_of(value)}; due: {kind}, as declared; "
                f"to declare another type: --column {name}:TYPE"
            )
    return None


def _look_up(record: dict[str, Any], name: str) -> tuple[Any, list[str] | None]:
    """The value of a field; and, when it is missing, the names that are there instead."""
    value: Any = record
    for part in name.split("."):
        if value is None:
            return None, None
        if not isinstance(value, dict) or part not in value:
            return None, list(value) if isinstance(value, dict) else []
        value = value[part]
    return value, None


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def kind_of(value: Any) -> str:
    """What a decoded value is, in words."""
    names = {str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
