"""Ragged arrays: lists of different lengths in two flat arrays, so that a thousand documents are
not objects.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from penstock.core.arrays import Array, Int64


@final
@dataclass(frozen=True, slots=True)
class Ragged:
    """`num_rows` arrays of different lengths, end to end.

    Row i is `values[offsets[i]:offsets[i + 1]]`, a view. `offsets` is int64 [num_rows + 1], starts
    at 0 and never decreases; its last entry is `len(values)`.
    """

    values: Array
    offsets: Int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self[row] for row in range(len(self)))

    @property
    def lengths(self) -> Int64:
        """Length of each row, int64 [num_rows]."""
        return np.diff(self.offsets)

    @classmethod
    def from_rows(cls, rows: Sequence[ArrayLike], dtype: DTypeLike) -> "Ragged":
        """Join a list of 1-D arrays or lists."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(row) for row in arrays], out=offsets[1:])
        return cls(np.concatenate(arrays) if arrays else np.empty(0, dtype), offsets)
