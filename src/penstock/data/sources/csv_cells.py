"""The cells of one CSV record as texts, or what is wrong with them; and as values of the types that
are asked for.

A record comes whole, with all lines of its quoted cells. Python's `csv` reads its quotes, strictly.
"""

import csv
import json
import math
from collections.abc import Sequence
from contextlib import suppress

from penstock.core.json_values import JsonObject
from penstock.data.sources.checks import MAX_LINE_BYTES, not_utf8
from penstock.data.sources.objects import Found
from penstock.data.sources.records import Fields

_RETURN = (
    r"a carriage return in a cell without quotes; lines end in \n or \r\n (tr '\r' '\n' converts "
    r"those in \r)"
)
_INTEGERS = range(-(2**63), 2**63)
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


def read_record(raw: bytes, line: int, names: Sequence[str] | None, delimiter: str) -> list[Found]:
    """A record as what `gather` takes; none if its line is blank. Without `names`, its value is the
    list of cells.
    """
    body = raw.removesuffix(b"\n").removesuffix(b"\r")
    if not body:
        return []
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return [(line, None, not_utf8(body, error), raw)]
    if "\0" in text:
        return [(line, None, "a NUL byte in the record; the file is damaged, or is not text", raw)]
    cells, reason = _cells(text, delimiter)
    if reason is not None:
        return [(line, None, reason, raw)]
    if names is None:
        return [(line, cells, None, raw)]
    if len(cells) != len(names):
        count = f"{len(cells)} cell{'' if len(cells) == 1 else 's'}"
        expected = f"expected: {len(names)}, as in the header ({', '.join(map(repr, names))})"
        return [(line, None, f"the record has {count}; {expected}", raw)]
    return [(line, dict(zip(names, cells, strict=True)), None, raw)]


def _cells(text: str, delimiter: str) -> tuple[list[str], str | None]:
    """The cells of a record, or what is wrong with its quotes."""
    if '"' not in text:
        return (text.split(delimiter), None) if "\r" not in text else ([], _RETURN)
    if csv.field_size_limit() < MAX_LINE_BYTES:
        csv.field_size_limit(MAX_LINE_BYTES)  # 128 KiB by default, which texts exceed
    try:
        return next(csv.reader([text], delimiter=delimiter, strict=True)), None
    except csv.Error as error:
        if "new-line" in str(error):
            return [], _RETURN
        if "unexpected end" in str(error):
            return [], "a quoted cell does not end: a quote is missing, or the file was cut"
        return (
            [],
            (
                f"its quotes are wrong ({error}); expected: quotes around the whole cell, and "
                "doubled inside it"
            ),
        )


def typed_row(value: dict[str, str], fields: Fields) -> JsonObject:
    """The fields that are read, with values of their types; a value that has not its type stays a
    text.
    """
    row: JsonObject = {}
    for name in fields.names:
        kind = "ranges" if name == fields.weights else fields.columns.get(name, "string")
        *parents, leaf = name.split(".")
        branch = row
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = _typed(value[name], kind)
    return row


def _typed(cell: str, kind: str) -> object:
    if kind == "string":
        return cell
    if not cell:
        return None
    with suppress(ValueError, KeyError):
        if kind == "int64":
            return whole if (whole := int(cell)) in _INTEGERS and "_" not in cell else cell
        if kind == "float64":
            return number if math.isfinite(number := float(cell)) and "_" not in cell else cell
        return _TRUTHS[cell.lower()] if kind == "bool" else json.loads(cell)
    return cell
