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


def _free_references() -> int:
    """References to an array that only a list holds, as the loop in `take` sees it; it differs by Python version."""
    for buffer in [np.empty(0)]:
        return sys.getrefcount(buffer)
    raise AssertionError


_FREE_REFERENCES = _free_references()


@final
class BufferPool:
    """Arrays by shape and dtype; at most `keep` of each are kept for another use."""

    def __init__(self, keep: int = 16, allocate: Allocate = np.empty) -> None:
        self._keep, self._allocate = keep, allocate
        self._buffers: dict[tuple[Any, ...], list[np.ndarray[Any, Any]]] = {}
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """An array with arbitrary content that nobody else holds."""
        with self._lock:
            buffers = self._buffers.setdefault((shape, dtype), [])
            for buffer in buffers:
                if sys.getrefcount(buffer) == _FREE_REFERENCES:
                    return buffer.view()
            buffer = self._allocate(shape, dtype)
            if len(buffers) < self._keep:
                buffers.append(buffer)
            return buffer.view()


def pinned(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Page-locked memory, from which a GPU copies without waiting; the array keeps its tensor alive."""
    import torch

    tensor = torch.empty(shape, dtype=getattr(torch, np.dtype(dtype).name), pin_memory=True)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array
