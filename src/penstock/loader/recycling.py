"""Buffers that are used again, but never while somebody still holds them.

Fresh memory costs a page fault for every 4 KiB, as much as filling it. So rows are written into buffers that earlier
rows have given back. The arrays of a set are views of one block of bytes, and so is all that is ever made of them:
NumPy's slices, and what torch makes of those, refer to the block. So a set is free when nothing but its own arrays
refers to its block, and an array that a caller keeps is never written to again.
"""

import sys
import threading
from collections.abc import Callable
from itertools import accumulate
from math import prod
from typing import Any, final

import numpy as np

Allocate = Callable[[int], np.ndarray[Any, Any]]
"""A block of so many bytes, uint8 [bytes]."""
Layout = tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
"""Shape of one row, and dtype, of each array of a set."""
Buffers = tuple[np.ndarray[Any, Any], ...]

_LINE = 64
_APART = 67 * _LINE
"""Arrays begin at whole cache lines, and not at the same place of a page, where a row's four arrays would compete for
the same lines of the first-level cache (7 % of the fill, measured)."""


def heap(size: int) -> np.ndarray[Any, Any]:
    """Ordinary memory."""
    return np.empty(size, np.uint8)


def pinned(size: int) -> np.ndarray[Any, Any]:
    """Page-locked memory, from which a GPU copies without waiting; the array keeps its tensor alive."""
    import torch

    array: np.ndarray[Any, Any] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return array


@final
class _Set:
    """The arrays of one block, and how many references their being free means."""

    __slots__ = ("_block", "_free", "arrays")

    def __init__(self, rows: int, layout: Layout, allocate: Allocate) -> None:
        sizes = [rows * prod(shape) * dtype.itemsize for shape, dtype in layout]
        places = [0, *accumulate(-(-size // _LINE) * _LINE + _APART for size in sizes)]
        self._block = allocate(places[-1])
        self.arrays: Buffers = tuple(
            self._block[place : place + size].view(dtype).reshape(rows, *shape)
            for place, size, (shape, dtype) in zip(places, sizes, layout, strict=False)
        )
        self._free = self._references()

    def _references(self) -> tuple[int, int]:
        """Of the tuple, which is held while a step is read, and of the block, by what was taken out of it."""
        return sys.getrefcount(self.arrays), sys.getrefcount(self._block)

    def is_free(self) -> bool:
        return self._references() == self._free


@final
class BufferPool:
    """Sets of arrays that are filled together; at most `keep` sets of each shape are kept for another use."""

    def __init__(self, keep: int = 16, allocate: Allocate = heap) -> None:
        self._keep, self._allocate = keep, allocate
        self._sets: dict[tuple[int, Layout], list[_Set]] = {}
        self._lock = threading.Lock()

    def take(self, rows: int, layout: Layout) -> Buffers:
        """Arrays [rows, …] with arbitrary content that nobody else holds."""
        with self._lock:
            known = self._sets.setdefault((rows, layout), [])
            for made in known:
                if made.is_free():
                    return made.arrays
            made = _Set(rows, layout, self._allocate)
            if len(known) < self._keep:
                known.append(made)
            return made.arrays
