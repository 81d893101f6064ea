"""Buffers that are used again, but never while a caller still holds them.

Fresh memory costs a page fault for every 4 KiB, as much as filling it. So rows are written into
buffers that earlier rows have given back. The arrays of a set are views of one block of bytes, and
so is all that is ever made of them: NumPy's slices, and what torch makes of those, refer to the
block. So a set is free when nothing but its own arrays refers to its block, and an array that a
caller keeps is never written to again.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Annotated, Any, final

import numpy as np

from penstock.core.arrays import Bytes, UInt64
from penstock.core.compiled import address_of
from penstock.core.vectors import CACHE_LINE

Allocate = Callable[[int], Bytes]
"""Number of bytes → a block of them, uint8 [bytes]."""
Layout = Sequence[tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape of one row, and dtype, of each array of a set."""
Buffers = tuple[np.ndarray[Any, Any], ...]

_APART = 67 * CACHE_LINE
"""Arrays begin at whole cache lines, and not at the same offset in a page, where the arrays of a
row would compete for the same lines of the first-level cache (7 % of the fill, measured).
"""


def heap(size: int) -> Annotated[Bytes, "bytes"]:
    """Ordinary memory."""
    return np.empty(size, np.uint8)


def pinned(size: int) -> Annotated[Bytes, "bytes"]:
    """Page-locked memory, from which a GPU copies without waiting; the array keeps its tensor
    alive.
    """
    import torch

    array: Bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return array


@final
class _Set:
    """The arrays of one block, their addresses, and the reference counts at which the set is
    idle.
    """

    __slots__ = ("_block", "_free", "addresses", "arrays")

    def __init__(self, rows: int, layout: Layout, allocate: Allocate) -> None:
        sizes = [rows * prod(shape) * dtype.itemsize for shape, dtype in layout]
        offsets = [0, *accumulate(-(-size // CACHE_LINE) * CACHE_LINE + _APART for size in sizes)]
        self._block = allocate(offsets[-1])
        self.arrays: Buffers = tuple(
            self._block[offset : offset + size].view(dtype).reshape(rows, *shape)
            for offset, size, (shape, dtype) in zip(offsets, sizes, layout, strict=False)
        )
        self.addresses = np.array(
            [address_of(array) if array.size else 0 for array in self.arrays], np.uint64
        )
        self._free = self._references()

    def _references(self) -> tuple[int, int]:
        """Reference counts of the array tuple (held by `FilledRows`) and of the block (held by
        every view).
        """
        return sys.getrefcount(self.arrays), sys.getrefcount(self._block)

    def is_free(self) -> bool:
        return self._references() == self._free


@final
class BufferPool:
    """Sets of arrays that are filled together; at most `keep` sets of each number of rows are kept
    for another use.
    """

    def __init__(self, layout: Layout, keep: int = 16, allocate: Allocate = heap) -> None:
        self._layout, self._keep, self._allocate = layout, keep, allocate
        self._sets: dict[int, list[_Set]] = {}
        self._lock = threading.Lock()

    def take(self, rows: int) -> tuple[Buffers, Annotated[UInt64, "arrays"]]:
        """Arrays [rows, …] with arbitrary content and no other holder, and where each begins (0: it
        is empty).
        """
        with self._lock:
            known = self._sets.setdefault(rows, [])
            for made in known:
                if made.is_free():
                    return made.arrays, made.addresses
            made = _Set(rows, self._layout, self._allocate)
            if len(known) < self._keep:
                known.append(made)
            return made.arrays, made.addresses


def cuda_in_use() -> bool:
    """Whether torch is imported, and has a GPU."""
    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda.is_available())
