"""Where the documents of a row begin and end, and how recurrent layers cut them into chunks.

Chunks begin where documents begin, so no chunk holds two documents. They are ordered by their
number within their document, and within that by falling length of the documents. So the j-th chunks
of all documents that have one lie side by side, and a scan needs as many sequential steps as the
longest document has chunks, however many documents there are.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.plan.inputs.torch_tensors import on_device

LIKE_LENGTH, LIKE_SLOTS = 1.5, 8
"""Documents run side by side if the longest has at most this many times, or slots more than, the
shortest.
"""
LENGTHS = (8, 16, 32, 64)
"""Chunk lengths to choose from."""
STEP_COST, MATRIX_COST = 1_000_000, 180_000
"""Multiplications in the time of one more sequential step, and of one more small matrix in each
product; on a CPU core (`bench_recurrent.py`).
"""


@final
class Borders:
    """The documents of one row of T slots.

    Attributes:
        cu_seqlens: int64 [documents + 1], borders from 0 to T; a document may be empty.
        device: Where its index tensors are.
    """

    def __init__(self, cu_seqlens: object, device: torch.device | str = "cpu") -> None:
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
        """int32 [1, T]: number of the document of each slot, as kernels want it that call it
        `seq_idx`.
        """
        if self._numbers is None:
            documents = np.arange(len(self), dtype=np.int32)
            self._numbers = self.place(np.repeat(documents, np.diff(self.cu_seqlens))[None])
        return self._numbers

    @property
    def filled(self) -> tuple[Tensor, Tensor]:
        """int64 borders of the documents that are not empty, for kernels that want `cu_seqlens`;
        and their numbers.
        """
        if self._filled is None:
            real = np.flatnonzero(np.diff(self.cu_seqlens))
            self._filled = (
                self.place(np.append(self.cu_seqlens[real], self.cu_seqlens[-1])),
                self.place(real),
            )
        return self._filled

    def place(self, array: object) -> Tensor:
        """An array of numpy on the device."""
        return on_device(np.asarray(array), self.device)

    def chunks(
        self, work: Callable[[int], float], lengths: Sequence[int] = LENGTHS, *, later: float = 1.0
    ) -> "Chunks":
        """Chunks of the length that costs least.

        Args:
            work: Length of a chunk → multiplications in it.
            lengths: To choose from.
            later: How many times as much work a chunk is that is not the first of its document.
        """
        documents, best = np.diff(self.cu_seqlens), (float("inf"), lengths[0])
        for length in lengths:
            counts = -(-documents // length)
            first, most = int((counts > 0).sum()), int(counts.max(initial=0))
            chunks = first + later * (int(counts.sum()) - first)
            best = min(best, (work(length) * chunks + STEP_COST * most, length))
        return self.chunks_of(best[1])

    def chunks_of(self, length: int) -> "Chunks":
        """Chunks of at most `length` slots."""
        if length not in self._chunks:
            self._chunks[length] = Chunks(self, length)
        return self._chunks[length]

    def restarts(self, taps: int) -> tuple[Tensor, Tensor, Tensor]:
        """For a causal convolution: the slots whose window reaches into the document before.

        Returns:
            heads: int64 [documents − 1, taps − 1], the first slots of each document but the first;
            slots of shorter
                documents go on into the next, or stay at the end of the row.
            chosen: int64 [n], which of these, flattened, are slots of their own document.
            slots: int64 [n], those slots, in rising order.
        """
        if taps not in self._restarts:
            begins, ends = self.cu_seqlens[1:-1, None], self.cu_seqlens[2:, None]
            heads = begins + np.arange(taps - 1)
            own = np.flatnonzero(heads < ends)
            # The last slot of a row is no head where this matters.
            inside = np.minimum(heads, max(int(self.cu_seqlens[-1]) - 1, 0))
            self._restarts[taps] = (
                self.place(inside),
                self.place(own),
                self.place(heads.ravel()[own]),
            )
        return self._restarts[taps]


@final
class Chunks:
    """The documents of a row in chunks of `length` slots; the last of a document may have padding
    at its end.

    Attributes:
        length: Slots of a chunk, C.
        counts: For each step of a scan, how many documents have a chunk of that number; their sum
            is N.
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
        # Documents of a row that follow each other as their chunks do, such as a single one, need
        # no gather.
        self._in_order = not self._padded and bool((back[1:] > back[:-1]).all())
        self._slots = borders.place(np.where(real, slots, total))
        self._back, self._order, self._places = (
            borders.place(array) for array in (back, order, places)
        )

    def cut(self, row: Tensor, padding: float = 0.0) -> Tensor:
        """[T, …] → [N, C, …]."""
        if self._in_order:
            return row.view(*self._slots.shape, *row.shape[1:])
        found: Tensor = _Cut.apply(row, self._slots, self._back, padding if self._padded else None)
        return found

    def join(self, chunks: Tensor) -> Tensor:
        """[N, C, …] → [T, …]."""
        if self._in_order:
            return chunks.flatten(0, 1)
        found: Tensor = _Join.apply(chunks, self._slots, self._back, 0.0 if self._padded else None)
        return found

    def fresh(self, state: Tensor | None) -> int:
        """How many chunks, the first ones, begin with a state of zeros: without states, those at
        documents' starts.
        """
        return self.counts[0] if state is None and self.counts else 0

    def scan(
        self,
        step: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        later: Sequence[Tensor],
        state: Tensor | None,
        zero: Tensor,
        *,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Carry states through the chunks of all documents at once.

        Args:
            step: (states [n, …] or None for zeros, chunks of each input and of each later one) →
                states after these chunks. Later inputs are None where states are.
            inputs: [N, …] each.
            later: [N − fresh, …] each, for the chunks behind the fresh ones.
            state: [documents, …] states before the documents; None: zeros.
            zero: A state of zeros, […].
            keep: Whether states after the documents are wanted.

        Returns:
            [N − fresh, …] states before each chunk that is not fresh; and, if they are kept,
            [documents, …] states after each document.
        """
        following = [*self.counts[1:], 0]
        wanted = self.counts if keep else following
        sizes = [
            size for n, count in zip(wanted, self.counts, strict=True) for size in (n, count - n)
        ]
        begun = state is not None or not self.counts
        pieces = [x.split(sizes)[::2] for x in inputs]
        # None stands for what fresh chunks lack.
        missing: tuple[Tensor | None, ...] = () if begun else (None,)
        pieces_later = [(*missing, *x.split(sizes if begun else sizes[2:])[::2]) for x in later]
        current = None if state is None else state[self._order]
        active = self.counts[0] if self.counts else 0
        # Documents without tokens come last in the order.
        empty = (
            zero.expand(self.documents - active, *zero.shape)
            if current is None
            else current[active:]
        )
        starts, ends = [], [empty]
        if current is not None:
            current = current[:active]
        for number, (count, after) in enumerate(zip(wanted, following, strict=True)):
            if current is not None:
                starts.append(current)
            if count == 0:
                break
            begin = None if current is None else current[:count]
            given = (x[number] for x in (*pieces, *pieces_later))
            current, ended = step(begin, *given).split([after, count - after])
            ends.append(ended)
        before = torch.cat(starts) if starts else zero.expand(0, *zero.shape)
        return before, torch.cat(ends[::-1])[self._places] if keep else None


class _Cut(torch.autograd.Function):
    """Rows to chunks. Each slot has one place, so the way back is a gather too, much cheaper than
    adding by index.
    """

    @staticmethod
    def forward(
        ctx: Any, row: Tensor, slots: Tensor, back: Tensor, padding: float | None
    ) -> Tensor:
        ctx.save_for_backward(slots, back)
        ctx.padding = padding
        if padding is not None:
            row = torch.cat([row, row.new_full((1, *row.shape[1:]), padding)])
        found: Tensor = row.index_select(0, slots.flatten()).unflatten(0, slots.shape)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        slots, back = ctx.saved_tensors
        return (
            _Join.apply(gradients[0], slots, back, None if ctx.padding is None else 0.0),
            None,
            None,
            None,
        )


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chunks: Tensor, slots: Tensor, back: Tensor, padding: float | None
    ) -> Tensor:
        ctx.save_for_backward(slots, back)
        ctx.padding = padding
        return chunks.flatten(0, 1).index_select(0, back)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        slots, back = ctx.saved_tensors
        return _Cut.apply(gradients[0], slots, back, ctx.padding), None, None, None


def wide(values: Tensor) -> Tensor:
    """In float64, where the device has it: sums of decays are subtracted, and float32 would lose
    what remains.
    """
    return values if values.device.type == "mps" else values.double()


def document_batches(
    begins: Any,
    ends: Any,
    total: int,
    like_length: float = LIKE_LENGTH,
    like_slots: int = LIKE_SLOTS,
) -> list[tuple[Any, Any]]:
    """Documents of a row in batches of like length.

    Args:
        begins: int64 [documents], first slot of each.
        ends: int64 [documents], the slot after the last of each.
        total: Slots of the row; what padding refers to.
        like_length: The longest of a batch has at most this many times the tokens of the shortest,
        like_slots: or this number more.

    Returns:
        For each batch, the longest first: int64 [n, longest], slots of the row; bool of that shape,
        false in padding.
    """
    lengths = ends - begins
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    batches = []
    while len(order):
        longest = lengths[order[0]]
        count = int((lengths[order] >= min(longest / like_length, longest - like_slots)).sum())
        chosen, order = order[:count], order[count:]
        slots = begins[chosen][:, None] + np.arange(longest)
        inside = slots < ends[chosen][:, None]
        batches.append((np.where(inside, slots, total), inside))
    return batches
