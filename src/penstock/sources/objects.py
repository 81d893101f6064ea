"""Records as whole objects, with all their fields: what conversations are read from, whatever their layout.

Lines are decoded one by one with Python's JSON, at some 100 MB/s a core; that is little beside encoding a conversation.
An object in a block is a dict whose texts UTF-8 can hold. What is none is among the block's rejects.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, final

import numpy as np
import pyarrow as pa

from penstock.sources.checks import kind_of
from penstock.sources.explain import explain_syntax
from penstock.sources.records import Reject, excerpt

Found = tuple[int, Any, str | None, Any]
"""Line or row, value, what is wrong with it if that is known, and what to quote of it."""

_ESCAPED_SURROGATE = (b"\\ud", b"\\uD")
"""What a JSON line holds wherever a lone surrogate may be: pairs are written so too."""


@final
@dataclass(frozen=True, slots=True)
class ObjectBlock:
    """Some whole records of one part, in order."""

    objects: list[dict[str, Any]]

    lines: np.ndarray[Any, np.dtype[np.int64]]
    """Where each record is in its file: line, from 1; or row, from 0, where the format has rows."""

    files: np.ndarray[Any, np.dtype[np.int32]]
    """Which of the part's `files` each record is from."""

    size_bytes: int
    """Raw bytes of the source that went into this block, for progress."""

    rejects: list[Reject]
    """What could not be read, in order."""

    def __len__(self) -> int:
        return len(self.objects)


def parse_lines(
    data: bytes | memoryview, file: str, first_line: int, size_bytes: int, rejects: Sequence[Reject] = ()
) -> ObjectBlock:
    """Decode whole lines, an object each; blank ones are passed over.

    Args:
        data: Lines, the last with or without its newline.
        file: Name for messages.
        first_line: Number of the first line.
        size_bytes: What to report as consumed.
        rejects: More rejects of this block.
    """
    found: list[Found] = []
    for number, raw in enumerate(bytes(data).split(b"\n"), first_line):
        if raw and not raw.isspace():
            value, reason = _decode(raw)
            found.append((number, value, reason, raw))
    return gather(found, file, size_bytes, rejects)


def gather(found: Sequence[Found], file: str, size_bytes: int, rejects: Sequence[Reject] = ()) -> ObjectBlock:
    """A block of what a reader found.

    Args:
        found: Values, good and bad.
        file: Name for messages.
        size_bytes: What to report as consumed.
        rejects: More rejects of this block.
    """
    objects, lines, bad = [], [], list(rejects)
    for line, value, reason, quoted in found:
        if reason is None and not isinstance(value, dict):
            reason = f"the record is {kind_of(value)}; due: an object with messages"
        if reason is not None:
            quoted = quoted if isinstance(quoted, bytes | str) else repr(quoted)
            bad.append(Reject(file, line, reason, excerpt(quoted)))
        else:
            objects.append(value)
            lines.append(line)
    bad.sort(key=lambda reject: reject.line)
    return ObjectBlock(objects, np.array(lines, np.int64), np.zeros(len(lines), np.int32), size_bytes, bad)


def rows_as_objects(table: pa.Table, file: str, first_row: int, size_bytes: int) -> ObjectBlock:
    """Rows that Arrow has typed; texts that are not UTF-8 are rejects."""
    try:
        rows = table.to_pylist()
    except UnicodeDecodeError:
        rows = [_row_or_none(table.slice(row, 1)) for row in range(table.num_rows)]
    reasons = ("a text of the row is not UTF-8" if row is None else None for row in rows)
    return gather(list(zip(count(first_row), rows, reasons, rows, strict=False)), file, size_bytes)


def lone_surrogate(value: Any) -> str | None:
    """Where in a decoded value half of a surrogate pair stands, in words; None where there is none."""
    for text in texts_of(value):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            at = error.start
            return (
                f"a text of the record has a lone surrogate U+{ord(text[at]):04X} at character {at}, half of a "
                f"character that no UTF-8 can hold; it was cut in the middle: {excerpt(text[max(at - 20, 0) :])!r}"
            )
    return None


def texts_of(value: Any) -> Iterator[str]:
    """All texts of a decoded value, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from texts_of(key)
            yield from texts_of(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_of(inner)


def _decode(raw: bytes) -> tuple[Any, str | None]:
    try:
        value = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        return None, f"byte {error.start + 1} of the line, 0x{raw[error.start]:02x}, is not UTF-8 ({error.reason})"
    except json.JSONDecodeError as error:
        return None, explain_syntax(raw.decode().strip(), error)
    except RecursionError:
        return None, "not JSON that can be read: its objects are nested too deeply"
    if any(mark in raw for mark in _ESCAPED_SURROGATE):
        return value, lone_surrogate(value)
    return value, None


def _row_or_none(row: pa.Table) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = row.to_pylist()[0]
    except UnicodeDecodeError:
        return None
    return record
