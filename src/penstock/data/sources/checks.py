"""Decides which records are usable, and explains what is wrong with the others.

`check_records` is fast and decides, for whole arrays. `diagnose` and `explain_line` are slow: they
look at one bad record or line and say in words what is wrong. Both follow the same rules, and the
tests compare them.
"""

import json
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.arrays import Bool, Int32, Int64
from penstock.core.arrow import from_numpy, to_numpy
from penstock.core.errors import RecordError
from penstock.core.json_values import JsonObject
from penstock.data.sources.records import Fields, RecordBlock, Reject, Weights, excerpt
from penstock.data.sources.signatures import described

_CHAT_FIELDS = {"messages", "conversations", "conversation", "instruction", "completion", "chosen"}
"""Fields that only conversations have, in the layouts that the chat room reads."""

MAX_LINE_BYTES = 1 << 30
"""A longer line is rejected: pyarrow's blocks end at 2 GiB."""


def check_table(table: pa.Table, fields: Fields, **place: Any) -> RecordBlock:
    """`check_records` for a table with the column types of `Fields.schema`."""
    weights = flat_column(table, fields.weights) if fields.weights else None
    columns = {name: flat_column(table, name) for name in fields.columns}
    return check_records(flat_column(table, fields.text), weights, columns, **place)


def check_records(
    texts: pa.LargeStringArray,
    ranges: pa.ListArray | None,
    columns: dict[str, pa.Array],
    *,
    lines: Int64,
    files: Int32,
    size_bytes: int,
    explain: Callable[[int], Reject],
    rejects: list[Reject],
) -> RecordBlock:
    """Split rows into usable records and rejects.

    Args:
        texts: The texts [rows], valid UTF-8 or null.
        ranges: Loss-weight ranges [rows] of type `WEIGHTS_TYPE`; None if they are not requested.
        columns: Other fields [rows].
        lines: Line or row number of each row in its file, int64 [rows].
        files: Which of the part's files each row comes from, int32 [rows].
        size_bytes: Raw bytes that these rows took.
        explain: Row → reject; called only for bad rows.
        rejects: Records that did not become rows; they join the block's rejects, sorted by line.
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
    """One field, looked up through nested objects, as one array without chunks."""
    root, *path = name.split(".")
    column = table.column(root)
    if path:
        column = pc.struct_field(column, path)
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def check_weights(ranges: pa.Array, texts: pa.Array) -> tuple[Weights, Bool]:
    """Flatten loss-weight ranges and find the rows with a wrong range.

    Args:
        ranges: `list<struct<begin, end, weight>>` [rows], nullable.
        texts: Large strings [rows].

    Returns:
        The ranges of all rows; and bool [rows], True where a range leaves the text, is empty,
        overlaps the one before, or has a negative or infinite weight.
    """
    counts = to_numpy(pc.list_value_length(ranges)).astype(np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    flat = pc.list_flatten(ranges)
    defaults = {"begin": -1, "end": -1, "weight": 1.0}
    begin, end, weight = (
        to_numpy(pc.struct_field(flat, [name]), value) for name, value in defaults.items()
    )
    rows = np.repeat(np.arange(len(ranges)), counts)
    characters = to_numpy(pc.utf8_length(texts)).astype(np.int64)
    previous = np.concatenate([np.zeros(1, np.int64), end[:-1]])
    previous[offsets[:-1][counts > 0]] = 0
    wrong = (
        to_numpy(flat.is_null()) | (begin < previous) | (end <= begin) | (end > characters[rows])
    )
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = weight.astype(np.float32)
    wrong |= ~np.isfinite(narrow) | (weight < 0)
    bad = np.zeros(len(ranges), np.bool_)
    bad[rows[wrong]] = True
    return Weights(offsets, begin, end, narrow, to_numpy(ranges.is_valid())), bad


def _offsets(texts: pa.Array) -> Int64:
    if len(texts) == 0:
        return np.zeros(1, np.int64)
    return np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]


def explain_array(where: str) -> str:
    """Explain that a JSON array stands where a record is expected; `where` begins the sentence."""
    return (
        f"{where} a JSON array; expected: one object per line. If it holds conversations "
        "(ShareGPT, Alpaca, …), set template, and the array is read as it is: to a .jinja "
        "file, or to auto for the tokenizer's own; an array of texts becomes lines with jq "
        "-c '.[]'"
    )


def diagnose(record: object, fields: Fields) -> str | None:
    """What is wrong with one record, given as Python values, in words; None: nothing."""
    if isinstance(record, list):
        return explain_array("the record is")
    if not isinstance(record, dict):
        return (
            f"the record is {kind_of(record)}; expected: an object with the field {fields.text!r}"
        )
    value, known = look_up(record, fields.text)
    if known is not None:
        cure = "set text_field to the field that holds the text"
        if _CHAT_FIELDS & set(known):
            cure = "conversations need a chat template: set template"
        where = "the object it leads to has" if "." in fields.text else "the record has"
        return (
            f"no field {fields.text!r}; {where}: {', '.join(map(repr, known)) or 'no fields'}; "
            f"{cure}"
        )
    if value is None:
        return f"field {fields.text!r} is null; expected: text"
    if not isinstance(value, str):
        return f"field {fields.text!r} holds {kind_of(value)}; expected: text"
    if not value:
        return f"field {fields.text!r} is empty; expected: at least one character"
    surrogate = first_surrogate(value)
    if surrogate is not None:
        return (
            f"field {fields.text!r} has a lone surrogate U+{ord(value[surrogate]):04X} at "
            f"character {surrogate}, which is half of a character and not valid UTF-8; the "
            "text was cut in the middle of it"
        )
    return _diagnose_weights(record, value, fields) or _diagnose_columns(record, fields)


def diagnose_all(records: Iterable[object], fields: Fields) -> list[str | None]:
    """`diagnose` of each record."""
    return [diagnose(record, fields) for record in records]


def first_surrogate(text: str) -> int | None:
    """Where a text has its first half of a surrogate pair, which UTF-8 cannot hold; None:
    nowhere.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _diagnose_weights(record: JsonObject, text: str, fields: Fields) -> str | None:
    ranges = look_up(record, fields.weights)[0] if fields.weights else None
    if ranges is None:
        return None
    expected = "expected: a list of {begin, end, weight}"
    if not isinstance(ranges, list):
        return f"field {fields.weights!r} holds {kind_of(ranges)}; {expected}"
    previous = 0
    for number, item in enumerate(ranges):
        where = f"range {number} of {fields.weights!r}"
        if not isinstance(item, dict):
            return f"{where} is {kind_of(item)}; {expected}"
        begin, end, weight = item.get("begin"), item.get("end"), item.get("weight")
        weight = 1.0 if weight is None else weight
        if not _is_integer(begin) or not _is_integer(end):
            return (
                f"{where} goes from {begin!r} to {end!r}; expected: two whole numbers, in "
                "characters"
            )
        if not previous <= begin < end <= len(text):
            return (
                f"{where} goes from character {begin} to {end}; expected: begin < end, not "
                f"before character {previous}, and inside the text of {len(text)} characters"
            )
        if (
            not isinstance(weight, (int, float))
            or isinstance(weight, bool)
            or not 0 <= weight < math.inf
        ):
            return f"{where} has weight {weight!r}; expected: a finite number, 0 or more"
        if weight > float(np.finfo(np.float32).max):
            return f"{where} has weight {weight!r}; expected: a number that float32 can hold"
        previous = end
    return None


def _diagnose_columns(record: JsonObject, fields: Fields) -> str | None:
    types: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "int64": (int,),
        "float64": (int, float),
        "bool": (bool,),
        "ranges": (list,),
    }
    for name, kind in fields.columns.items():
        value = look_up(record, name)[0]
        if value is None:
            continue
        if not isinstance(value, types[kind]) or (isinstance(value, bool) and kind != "bool"):
            return (
                f"field {name!r} holds {kind_of(value)}; expected: {kind}, as declared "
                f"(to declare another type, set columns (--column {name}:TYPE))"
            )
    return None


def look_up(record: JsonObject, name: str) -> tuple[Any, list[str] | None]:
    """The value of a field; and, if it is missing, the names of the fields that exist instead."""
    value: Any = record
    for part in name.split("."):
        if value is None:
            return None, None
        if not isinstance(value, dict) or part not in value:
            return None, list(value) if isinstance(value, dict) else []
        value = value[part]
    return value, None


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def kind_of(value: object) -> str:
    """The type of a decoded value, in words."""
    names = {
        str: "text",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def explain_line(raw: bytes, fields: Fields) -> str | None:
    """What is wrong with one line, in words."""
    if len(raw) > MAX_LINE_BYTES:
        return f"the line has {len(raw)} bytes; expected: at most {MAX_LINE_BYTES}"
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return (
            "the line begins with the byte order mark of UTF-16; expected: UTF-8 (convert: iconv "
            "-f UTF-16 -t UTF-8)"
        )
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return not_utf8(raw, error)
    if "\0" in text:
        return f"a NUL byte at column {text.index(chr(0)) + 1}; the file is damaged, or is not text"
    try:
        record = json.loads(text, object_pairs_hook=_refuse_duplicates(fields))
    except RecordError as error:
        return str(error)
    except json.JSONDecodeError as error:
        return explain_syntax(text.strip(), error)
    except RecursionError:
        return None
    return diagnose(record, fields)


def not_utf8(raw: bytes, error: UnicodeDecodeError) -> str:
    """What is wrong with a line that is not UTF-8, in words: it may be the beginning of a file of
    another kind.
    """
    return described(raw) or (
        f"byte {error.start + 1} of the line, 0x{raw[error.start]:02x}, is not UTF-8 "
        f"({error.reason})"
    )


def explain_syntax(text: str, error: json.JSONDecodeError) -> str:
    """What is wrong with a line that is not JSON, in words."""
    if error.msg == "Extra data":
        rest = text[error.pos :].lstrip()
        what = "a second value" if rest[:1] in '{["' else "more text"
        found = (
            f"{what} after the end of the object, at column {error.colno}: {excerpt(rest)[:40]!r}"
        )
        return f"{found}; expected: one object per line"
    if text.startswith("\ufeff"):
        return (
            "a byte order mark (U+FEFF) in the middle of the file, where two files were joined; "
            "remove it"
        )
    if text.startswith("["):
        return explain_array("the line begins")
    cut = "" if text.endswith("}") else "; the line does not end with '}', so it may have been cut"
    return f"not JSON: {error.msg.removesuffix(' starting at')} at column {error.colno}{cut}"


def _refuse_duplicates(fields: Fields) -> Callable[[list[tuple[str, Any]]], JsonObject]:
    """A `json` hook that refuses an object in which a field that is read occurs twice."""
    read = {part for name in fields.names for part in name.split(".")}

    def build(pairs: list[tuple[str, Any]]) -> JsonObject:
        record = dict(pairs)
        if len(record) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next((name for name in names if names.count(name) > 1 and name in read), None)
            if twice is not None:
                raise RecordError(f"field {twice!r} occurs twice; expected: once")
        return record

    return build
