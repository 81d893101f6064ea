"""Buffers that are used again, but never while somebody still holds them.

Fresh memory costs a page fault for every 4 KiB, as much as filling it. So rows are written into buffers that earlier
rows have given back: a buffer is free when nothing but this pool refers to it. NumPy arrays made from it by slicing
and torch tensors made from those all hold a reference, so an array that a caller keeps is never written to again.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any, final

import numpy as np

Allocate = Callable[[tuple[int, ...], Any], np.ndarray[Any, Any]]
Layout = tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
"""Shape of one row, and dtype, of each array of a set."""
Buffers = tuple[np.ndarray[Any, Any], ...]


def _references(buffers: Buffers) -> int:
    """The most references that any of the arrays has."""
    return max(map(sys.getrefcount, buffers))


_FREE = _references((np.empty(0),))
"""References to an array that only its tuple holds, as `_references` sees it; it differs by Python version."""


@final
class BufferPool:
    """Sets of arrays that are filled together; at most `keep` sets of each shape are kept for another use."""

    def __init__(self, keep: int = 16, allocate: Allocate = np.empty) -> None:
        self._keep, self._allocate = keep, allocate
        self._sets: dict[tuple[int, Layout], list[Buffers]] = {}
        self._lock = threading.Lock()

    def take(self, rows: int, layout: Layout) -> Buffers:
        """Arrays [rows, …] with arbitrary content that nobody else holds."""
        with self._lock:
            known = self._sets.setdefault((rows, layout), [])
            for buffers in known:
                # A tuple that was handed out and let go is held by the list and this loop alone.
                if sys.getrefcount(buffers) == _FREE_SET and _references(buffers) == _FREE:
                    return buffers
            made = tuple(self._allocate((rows, *shape), dtype) for shape, dtype in layout)
            if len(known) < self._keep:
                known.append(made)
            return made


def _free_set() -> int:
    """References to a tuple that only a list holds, as the loop in `take` sees it."""
    for buffers in [(np.empty(0), np.empty(0))]:
        return sys.getrefcount(buffers)
    raise AssertionError


_FREE_SET = _free_set()


def pinned(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Page-locked memory, from which a GPU copies without waiting; the array keeps its tensor alive."""
    import torch

    tensor = torch.empty(shape, dtype=getattr(torch, np.dtype(dtype).name), pin_memory=True)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array
