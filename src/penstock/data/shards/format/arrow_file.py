"""The record batches of an Arrow file and the places of their buffers, read without trusting it.

Arrow's own reader follows whatever a file says, and a forged one can crash it. The reader here
reads the footer and the head of each record batch, which are flatbuffers, checks every reference
that it follows, and touches nothing else. It supports what our shards use: no dictionaries, no
compression. Source: Arrow's `format/File.fbs`, `Message.fbs`, `Schema.fbs`.
"""

import struct
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike

from penstock.core.arrays import Array
from penstock.core.errors import FormatError
from penstock.data.stores.files import reading

_MARK = b"ARROW1"
_SCHEMA, _RECORD_BATCH = 1, 3
_INT, _FLOAT = 2, 3
_BLOCK = np.dtype([("offset", "<i8"), ("head", "<i4"), ("padding", "<i4"), ("body", "<i8")])
_PAIR = np.dtype([("pair", "<i8", (2,))])
_MAX_SCHEMA = 2**16
"""Maximum bytes of the schema message; ours take about one thousand."""
_MAX_FIELDS, _MAX_DEPTH = 64, 4
"""Maximum number of fields in a group, and of nested levels: a shard has fewer; a forged one may
repeat references.
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlaces:
    """The arrays and buffers of one record batch."""

    rows: int
    nodes: Array
    """int64 [arrays, 2]: values and nulls of each array, children after their parent."""
    buffers: Array
    """int64 [buffers, 2]: first byte in the file and size of each; inside the file."""


def read_places(data: Array, schema: pa.Schema) -> list[BatchPlaces]:
    """The record batches of a file.

    Args:
        data: uint8 [bytes], the file.
        schema: The `pyarrow.Schema` that it must have.

    Raises:
        FormatError: It is not an Arrow IPC file, or has other columns.
    """
    try:
        return _read(data, schema)
    except (struct.error, ValueError, OverflowError) as error:
        raise FormatError(f"not a sound Arrow IPC file: {error}") from None


def _read(data: Array, schema: pa.Schema) -> list[BatchPlaces]:
    if len(data) < 20 or data[:6].tobytes() != _MARK or data[-6:].tobytes() != _MARK:
        raise ValueError(f"it does not begin and end with {_MARK.decode()}")
    (size,) = struct.unpack("<i", data[-10:-6].tobytes())
    if not 0 < size <= len(data) - 10:
        raise ValueError(f"a footer of {size} bytes")
    footer = _Table.root(data[len(data) - 10 - size : len(data) - 10].tobytes())
    expected, first = (
        _columns_of(schema.serialize().to_pybytes()),
        _columns_of(data[8 : 8 + _MAX_SCHEMA].tobytes()),
    )
    found = _columns(footer.table(1))
    if found != expected or first != expected:
        names = ([column[0] for column in columns] for columns in (found, expected))
        raise ValueError("columns are {}, expected {}".format(*names))
    if len(footer.structs(2, "V24")):
        raise ValueError("it has dictionaries")
    return [
        _batch(data, offset, head, body)
        for offset, head, _, body in reading(data, footer.structs(3, _BLOCK).tolist())
    ]


def _batch(data: Array, offset: int, head: int, body: int) -> BatchPlaces:
    """One record batch: a head with the positions of its buffers in the body that follows."""
    if offset < 8 or head < 8 or body < 0 or offset + head + body > len(data):
        raise ValueError(f"a batch at byte {offset} of {head} and {body} bytes")
    message = _Table.root(_message(data[offset : offset + head].tobytes()))
    if message.number(1, "<B") != _RECORD_BATCH or message.number(3, "<q") != body:
        raise ValueError(f"not a record batch at byte {offset}")
    batch = message.table(2)
    if batch.place(3) is not None:
        raise ValueError("it is compressed")
    nodes, buffers = (batch.structs(field, _PAIR)["pair"] for field in (1, 2))
    if (buffers < 0).any() or (buffers > body).any() or (buffers.sum(1) > body).any():
        raise ValueError(f"a buffer of the batch at byte {offset} leaves it")
    return BatchPlaces(
        rows=batch.number(0, "<q"), nodes=nodes, buffers=buffers + np.array([offset + head, 0])
    )


def _message(data: bytes) -> bytes:
    """The flatbuffer in an encapsulated message: −1, its size, its bytes."""
    mark, size = struct.unpack_from("<ii", data)
    if mark != -1 or not 0 < size <= len(data) - 8:
        raise ValueError(f"a message of {size} bytes")
    return data[8 : 8 + size]


def _columns_of(message: bytes) -> list[Any]:
    """The columns in a schema message, which also begins the file."""
    return _columns(_Table.root(_message(message)).table(2))


def _columns(schema: "_Table") -> list[Any]:
    """Names and types of the columns, comparable."""
    return _fields(schema, 1, _MAX_DEPTH)


def _fields(owner: "_Table", number: int, depth: int) -> list[Any]:
    tables = owner.tables(number)
    if not depth or len(tables) > _MAX_FIELDS:
        raise ValueError("more columns than a shard has")
    return [_field(table, depth) for table in tables]


def _field(field: "_Table", depth: int) -> tuple[Any, ...]:
    kind = field.number(2, "<B")
    details: tuple[Any, ...] = ()
    if kind == _INT:
        details = field.table(3).number(0, "<i"), field.table(3).number(1, "<?")
    elif kind == _FLOAT:
        details = (field.table(3).number(0, "<h"),)
    encoded = field.place(4) is not None
    return (
        field.text(0),
        kind,
        details,
        encoded,
        _fields(field, 5, depth - 1) if field.place(5) is not None else [],
    )


@final
@dataclass(frozen=True, slots=True)
class _Table:
    """A table of a flatbuffer: its fields are found by number; a missing field has its default."""

    data: bytes
    at: int

    @classmethod
    def root(cls, data: bytes) -> "_Table":
        return cls(data, _number(data, "<I", 0))

    def place(self, field: int) -> int | None:
        """Position of a field; None: it is missing."""
        entries = self.at - _number(self.data, "<i", self.at)
        if 4 + 2 * field + 2 > _number(self.data, "<H", entries):
            return None
        offset = _number(self.data, "<H", entries + 4 + 2 * field)
        return self.at + offset if offset else None

    def number(self, field: int, kind: str) -> Any:
        place = self.place(field)
        return 0 if place is None else _number(self.data, kind, place)

    def table(self, field: int) -> "_Table":
        return _Table(self.data, self._target(field))

    def text(self, field: int) -> bytes:
        begin = self._target(field)
        size = _number(self.data, "<I", begin)
        return self.data[begin + 4 : begin + 4 + size]

    def structs(self, field: int, dtype: DTypeLike) -> Array:
        if self.place(field) is None:
            return np.empty(0, dtype)
        begin = self._target(field)
        return np.frombuffer(self.data, dtype, _number(self.data, "<I", begin), begin + 4)

    def tables(self, field: int) -> "list[_Table]":
        begin = self._target(field)
        count = len(self.structs(field, "<u4"))
        return [
            _Table(self.data, at + _number(self.data, "<I", at))
            for at in range(begin + 4, begin + 4 + 4 * count, 4)
        ]

    def _target(self, field: int) -> int:
        """Position that a field refers to."""
        place = self.place(field)
        if place is None:
            raise ValueError(f"field {field} is missing")
        return place + int(_number(self.data, "<I", place))


def _number(data: bytes, kind: str, at: int) -> Any:
    if at < 0:
        raise ValueError(f"a reference to byte {at}")
    return struct.unpack_from(kind, data, at)[0]
