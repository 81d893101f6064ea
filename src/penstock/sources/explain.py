"""Says in words what is wrong with one line of JSON; slow, so only for lines that are known to be bad."""

import json
from collections.abc import Callable
from typing import Any

from penstock.errors import RecordError
from penstock.sources.checks import diagnose, explain_array
from penstock.sources.records import Fields, excerpt

MAX_LINE_BYTES = 1 << 30
"""A longer line is rejected: pyarrow's blocks end at 2 GiB."""


def explain_line(raw: bytes, fields: Fields) -> str | None:
    """What is wrong with one line, in words."""
    if len(raw) > MAX_LINE_BYTES:
        return f"the line has {len(raw)} bytes; due: at most {MAX_LINE_BYTES}"
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "the line begins with the byte order mark of UTF-16; due: UTF-8 (iconv -f UTF-16 -t UTF-8 makes it so)"
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} of the line, 0x{raw[error.start]:02x}, is not UTF-8 ({error.reason})"
    if "\0" in text:
        return f"a NUL byte at column {text.index(chr(0)) + 1}; the file was damaged, or is not text"
    try:
        record = json.loads(text, object_pairs_hook=_refuse_duplicates(fields))
    except RecordError as error:
        return str(error)
    except json.JSONDecodeError as error:
        return explain_syntax(text.strip(), error)
    except RecursionError:
        return None
    return diagnose(record, fields)


def explain_syntax(text: str, error: json.JSONDecodeError) -> str:
    """What is wrong with a line that is not JSON, in words."""
    if error.msg == "Extra data":
        rest = text[error.pos :].lstrip()
        what = "a second value" if rest[:1] in '{["' else "more text"
        found = f"{what} after the end of the object, at column {error.colno}: {excerpt(rest)[:40]!r}"
        return f"{found}; due: one object a line"
    if text.startswith("\ufeff"):
        return "a byte order mark (U+FEFF) in the middle of the file, where two files were joined; remove it"
    if text.startswith("["):
        return explain_array("the line begins")
    cut = "" if text.endswith("}") else "; the line does not end with '}', so it may have been cut"
    return f"not JSON: {error.msg.removesuffix(' starting at')} at column {error.colno}{cut}"


def _refuse_duplicates(fields: Fields) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """A hook that refuses an object with a field that is read twice in it."""
    read = {part for name in fields.names for part in name.split(".")}

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next((name for name in names if names.count(name) > 1 and name in read), None)
            if twice is not None:
                raise RecordError(f"field {twice!r} is there twice; due: once")
        return record

    return build
