"""Reads tables of a flatbuffer without trusting it: references are checked before they are used."""

import struct
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import DTypeLike

from penstock.core.arrays import Array


@final
@dataclass(frozen=True, slots=True)
class Table:
    """A table of a flatbuffer: its fields are found by number; a missing field has its default."""

    data: bytes
    at: int

    @classmethod
    def root(cls, data: bytes) -> "Table":
        """The table that a flatbuffer begins with."""
        return cls(data, read_number(data, "<I", 0))

    def place(self, field: int) -> int | None:
        """Position of a field; None: it is missing."""
        entries = self.at - read_number(self.data, "<i", self.at)
        if 4 + 2 * field + 2 > read_number(self.data, "<H", entries):
            return None
        offset = read_number(self.data, "<H", entries + 4 + 2 * field)
        return self.at + offset if offset else None

    def number(self, field: int, kind: str) -> Any:
        """A number, in the notation of `struct`; 0: it is missing."""
        place = self.place(field)
        return 0 if place is None else read_number(self.data, kind, place)

    def table(self, field: int) -> "Table":
        """The table that a field refers to."""
        return Table(self.data, self._target(field))

    def text(self, field: int) -> bytes:
        """The bytes of a string."""
        begin = self._target(field)
        size = read_number(self.data, "<I", begin)
        return self.data[begin + 4 : begin + 4 + size]

    def structs(self, field: int, dtype: DTypeLike) -> Array:
        """A vector of structs; empty: it is missing."""
        if self.place(field) is None:
            return np.empty(0, dtype)
        begin = self._target(field)
        return np.frombuffer(self.data, dtype, read_number(self.data, "<I", begin), begin + 4)

    def tables(self, field: int) -> "list[Table]":
        """The tables of a vector."""
        begin = self._target(field)
        count = len(self.structs(field, "<u4"))
        return [
            Table(self.data, at + read_number(self.data, "<I", at))
            for at in range(begin + 4, begin + 4 + 4 * count, 4)
        ]

    def _target(self, field: int) -> int:
        """Position that a field refers to."""
        place = self.place(field)
        if place is None:
            raise ValueError(f"field {field} is missing")
        return place + int(read_number(self.data, "<I", place))


def read_number(data: bytes, kind: str, at: int) -> Any:
    """A number at some byte, in the notation of `struct`.

    Raises:
        ValueError: A reference leads before the data.
        struct.error: It leads beyond them.
    """
    if at < 0:
        raise ValueError(f"a reference to byte {at}")
    return struct.unpack_from(kind, data, at)[0]
