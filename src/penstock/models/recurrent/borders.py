"""Where the documents of a row begin and end, and how recurrent layers cut them into chunks.

Chunks begin where documents begin, so no chunk holds two documents. They are ordered by their number within their
document, and within that by falling length of the documents. So the j-th chunks of all documents that have one lie side
by side, and a scan needs as many sequential steps as the longest document has chunks, however many documents there are.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

LENGTHS = (8, 16, 32, 64)
"""Chunk lengths to choose from."""
STEP_COST, MATRIX_COST = 1_000_000, 180_000
"""Multiplications in the time of one more sequential step, and of one more small matrix in each product; on a CPU core
(`bench_recurrent.py`)."""


@final
class Borders:
    """The documents of one row of T slots.

    Attributes:
        cu_seqlens: int64 [documents + 1], borders from 0 to T; a document may be empty.
        device: Where its index tensors are.
    """

    def __init__(self, cu_seqlens: Any, device: torch.device | str = "cpu") -> None:
        self.cu_seqlens = np.asarray(cu_seqlens, np.int64)
        self.device = torch.device(device)
        self._chunks: dict[int, Chunks] = {}
        self._positions: Tensor | None = None
        self._restarts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._filled: tuple[Tensor, Tensor] | None = None
        self._numbers: Tensor | None = None

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.cu_seqlens) - 1

    @property
    def positions(self) -> Tensor:
        """int64 [T]: index of each slot in its document."""
        if self._positions is None:
            starts = np.repeat(self.cu_seqlens[:-1], np.diff(self.cu_seqlens))
            self._positions = self.place(np.arange(self.cu_seqlens[-1]) - starts)
        return self._positions

    @property
    def numbers(self) -> Tensor:
        """int32 [1, T]: number of the document of each slot, as kernels want it that call it `seq_idx`."""
        if self._numbers is None:
            documents = np.arange(len(self), dtype=np.int32)
            self._numbers = self.place(np.repeat(documents, np.diff(self.cu_seqlens))[None])
        return self._numbers

    @property
    def filled(self) -> tuple[Tensor, Tensor]:
        """int64 borders of the documents that are not empty, for kernels that want `cu_seqlens`; and their numbers."""
        if self._filled is None:
            real = np.flatnonzero(np.diff(self.cu_seqlens))
            self._filled = self.place(np.append(self.cu_seqlens[real], self.cu_seqlens[-1])), self.place(real)
        return self._filled

    def place(self, array: Any) -> Tensor:
        """An array of numpy on the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def chunks(self, work: Callable[[int], float]) -> "Chunks":
        """Chunks of the length that costs least.

        Args:
            work: Length of a chunk → multiplications in it.
        """
        lengths, best = np.diff(self.cu_seqlens), (float("inf"), LENGTHS[0])
        for length in LENGTHS:
            counts = -(-lengths // length)
            cost = work(length) * int(counts.sum()) + STEP_COST * int(counts.max(initial=0))
            best = min(best, (cost, length))
        return self.chunks_of(best[1])

    def chunks_of(self, length: int) -> "Chunks":
        """Chunks of at most `length` slots."""
        if length not in self._chunks:
            self._chunks[length] = Chunks(self, length)
        return self._chunks[length]

    def restarts(self, taps: int) -> tuple[Tensor, Tensor, Tensor]:
        """For a causal convolution: the slots whose window reaches into the document before.

        Returns:
            slots: int64 [n], in rising order.
            windows: int64 [n, taps], the slots that each would read, from the earliest; 0 where the row has none.
            inside: bool [n, taps], which of them belong to the slot's own document.
        """
        if taps not in self._restarts:
            begins, ends = self.cu_seqlens[1:-1], self.cu_seqlens[2:]
            offsets = np.arange(taps - 1)
            slots = (begins[:, None] + offsets)[begins[:, None] + offsets < ends[:, None]]
            windows = slots[:, None] + np.arange(1 - taps, 1)
            starts = self.cu_seqlens[np.searchsorted(self.cu_seqlens, slots, side="right") - 1]
            inside = windows >= starts[:, None]
            self._restarts[taps] = (
                self.place(slots),
                self.place(np.maximum(windows, 0)),
                self.place(inside),
            )
        return self._restarts[taps]


@final
class Chunks:
    """The documents of a row in chunks of `length` slots; the last of a document may have padding at its end.

    Attributes:
        length: Slots of a chunk, C.
        counts: For each step of a scan, how many documents have a chunk of that number; their sum is N.
    """

    def __init__(self, borders: Borders, length: int) -> None:
        cu = borders.cu_seqlens
        total, needed = int(cu[-1]), -(-np.diff(cu) // length)
        order = np.argsort(-needed, kind="stable")
        self.length, self.documents = length, len(borders)
        self.counts = [int((needed > number).sum()) for number in range(int(needed.max(initial=0)))]
        numbers = np.repeat(np.arange(len(self.counts)), self.counts)
        owners = np.concatenate([order[:count] for count in self.counts] or [order[:0]])
        slots = (cu[owners] + numbers * length)[:, None] + np.arange(length)
        real = slots < cu[owners + 1][:, None]
        back = np.empty(total, np.int64)
        back[slots[real]] = np.flatnonzero(real.ravel())
        places = np.empty(len(borders), np.int64)
        places[order] = np.arange(len(borders))
        self._padded = not real.all()
        self._slots = borders.place(np.where(real, slots, total))
        self._back, self._order, self._places = (borders.place(array) for array in (back, order, places))

    def cut(self, row: Tensor, padding: float = 0.0) -> Tensor:
        """[T, …] → [N, C, …]."""
        found: Tensor = _Cut.apply(row, self._slots, self._back, padding if self._padded else None)
        return found

    def join(self, chunks: Tensor) -> Tensor:
        """[N, C, …] → [T, …]."""
        found: Tensor = _Join.apply(chunks, self._slots, self._back, 0.0 if self._padded else None)
        return found

    def scan(
        self, step: Callable[..., Tensor], inputs: Sequence[Tensor], state: Tensor | None, zero: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Carry states through the chunks of all documents at once.

        Args:
            step: (states [n, …], chunks of each input [n, …]) → states after these chunks.
            inputs: [N, …] each.
            state: [documents, …] states before the documents; None: zeros.
            zero: A state of zeros, […].

        Returns:
            [N, …] states before each chunk, and [documents, …] states after each document.
        """
        current = zero.expand(self.documents, *zero.shape) if state is None else state[self._order]
        starts: list[Tensor] = []
        ends: list[Tensor] = []
        for pieces in zip(*(chunks.split(self.counts) for chunks in inputs), strict=True):
            active = len(pieces[0])
            if active < len(current):
                ends.append(current[active:])
                current = current[:active]
            starts.append(current)
            current = step(current, *pieces)
        ends.append(current)
        before = torch.cat(starts) if starts else current[:0]
        return before, torch.cat(ends[::-1])[self._places]


class _Cut(torch.autograd.Function):
    """Rows to chunks. Each slot has one place, so the way back is a gather too, much cheaper than adding by index."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, slots: Tensor, back: Tensor, padding: float | None) -> Tensor:
        ctx.save_for_backward(slots, back)
        ctx.padding = padding
        if padding is not None:
            row = torch.cat([row, row.new_full((1, *row.shape[1:]), padding)])
        found: Tensor = row.index_select(0, slots.flatten()).unflatten(0, slots.shape)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        slots, back = ctx.saved_tensors
        return _Join.apply(gradients[0], slots, back, None if ctx.padding is None else 0.0), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunks: Tensor, slots: Tensor, back: Tensor, padding: float | None) -> Tensor:
        ctx.save_for_backward(slots, back)
        ctx.padding = padding
        return chunks.flatten(0, 1).index_select(0, back)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        slots, back = ctx.saved_tensors
        return _Cut.apply(gradients[0], slots, back, ctx.padding), None, None, None


def wide(values: Tensor) -> Tensor:
    """In float64, where the device has it: sums of decays are subtracted, and float32 would lose what remains."""
    return values if values.device.type == "mps" else values.double()
