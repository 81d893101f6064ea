"""Chunks of two rows as tensors, cut into blocks, and a sum over blocks that never holds the logits
of a whole row.

`Pairing` holds the chunks of a student's and a teacher's row. `chunk_blocks` cuts them into blocks;
a chunk is never cut, so each block's sum is exact by itself. It costs a few passes over the bounds
on the CPU.

`sum_over_blocks` maps the hidden states of each block to a scalar and computes its gradient while
the block's logits still exist. Only the gradients of hidden states and parameters are kept; the
backward pass scales them. `training.cross_entropy` does this for one loss; this function
does it for any. The idea is that of fused linear cross entropy (Liger Kernel, Hsu et al. 2024,
arXiv:2410.10989). There is no second derivative; asking for one raises.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError
from penstock.learn.distillation.teacher_rows import TeacherRow
from penstock.models.gradients import FoundGradients, accumulator
from penstock.plan.inputs.torch_tensors import on_device, on_host

BlockSum = Callable[[Tensor, int], Tensor]
"""Hidden states [n, width] of a block, and the block's index → a scalar."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairing:
    """C chunks of two rows. Bounds are best on the CPU, where they are cut into blocks; weights on
    the student's device.
    """

    student_bounds: Tensor
    """int64 [C, 2] half-open ranges of slots, ascending and disjoint; the predictors of [b, e) are
    b − 1 … e − 2.
    """
    teacher_bounds: Tensor
    """int64 [C, 2], the same in the teacher's row."""
    weights: Tensor
    """float [C]: how much each chunk counts."""

    def __len__(self) -> int:
        return len(self.weights)

    @classmethod
    def of(
        cls, row: TeacherRow, device: torch.device | str = "cpu", weights: Tensor | None = None
    ) -> Self:
        """The chunks of `row`, or the same chunks with other `weights`, float [C]."""
        return cls(
            student_bounds=torch.from_numpy(row.student_bounds.astype(np.int64)).reshape(-1, 2),
            teacher_bounds=torch.from_numpy(row.teacher_bounds.astype(np.int64)).reshape(-1, 2),
            weights=on_device(row.weights if weights is None else weights, torch.device(device)),
        )

    def host_bounds(self) -> tuple[Int64, Int64]:
        """Both sides' bounds in NumPy."""
        return on_host(self.student_bounds), on_host(self.teacher_bounds)


def sum_over_blocks(
    block_sum: BlockSum,
    hidden: Tensor,
    slots: Sequence[Tensor],
    parameters: Sequence[Tensor],
    scale: float,
    used: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`scale` × Σ over blocks of `block_sum(hidden[slots[b]], b)`.

    Args:
        block_sum: Depends on no tensors with gradients except its states and `parameters` (`used`).
        hidden: [T, width].
        slots: int64 [n] for each block, without repeats; a slot may be in several blocks.
        parameters: Other tensors that get a gradient.
        scale: Factor of the sum.
        used: What `block_sum` uses in place of each of `parameters`, such as a copy in another
            dtype, whose gradients become theirs; None: themselves.

    Returns:
        The scaled sum with gradient, which is zero if there are no blocks; and the plain sum,
        float64, without gradient.
    """
    pairs = zip(parameters, parameters if used is None else used, strict=True)
    wanted = [pair for pair in pairs if pair[0].requires_grad]
    if not torch.is_grad_enabled() or not (hidden.requires_grad or wanted):
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for number, places in enumerate(slots):
            total += block_sum(hidden.index_select(0, places), number).detach()
        return (total * scale).to(accumulator(hidden.dtype)), total
    result: tuple[Tensor, Tensor] = _SumOverBlocks.apply(
        block_sum, hidden, slots, scale, [leaf for _, leaf in wanted], *(one for one, _ in wanted)
    )
    return result


class _SumOverBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        block_sum: BlockSum,
        hidden: Tensor,
        slots: Sequence[Tensor],
        scale: float,
        used: list[Tensor],
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        of_hidden = torch.zeros_like(hidden) if hidden.requires_grad else None
        of_parameters = [torch.zeros_like(p, dtype=accumulator(p.dtype)) for p in parameters]
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for number, places in enumerate(slots):
            with torch.enable_grad():
                states = (
                    hidden.detach().index_select(0, places).requires_grad_(of_hidden is not None)
                )
                value = block_sum(states, number)
            inputs = used if of_hidden is None else [states, *used]
            found = list(
                torch.autograd.grad(value, inputs, torch.full_like(value, scale), allow_unused=True)
            )
            if of_hidden is not None:
                new = found.pop(0)
                if new is not None:
                    of_hidden.index_add_(0, places, new)
            for sums, new in zip(of_parameters, found, strict=True):
                if new is not None:
                    sums += new
            total += value.detach()
        ctx.found = FoundGradients(of_hidden, of_parameters, [p.dtype for p in parameters])
        ctx.mark_non_differentiable(total)
        return (total * scale).to(accumulator(hidden.dtype)), total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, others = ctx.found.times(incoming)
        return None, hidden, None, None, None, *others


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """One side's predictors in a block of C chunks, P of them."""

    slots: Tensor
    """int64 [P] slots of the row."""
    chunks: Tensor
    """int64 [P] chunk of each predictor, as an index in the block, ascending."""
    lengths: Tensor
    """int64 [C] number of predictors of each chunk."""
    host_slots: Int64
    """`slots` in NumPy."""

    def of_row(self, values: Tensor, like: Tensor) -> Tensor:
        """[P, …] what a teacher's row [T, …] has at the slots, on the device and in the dtype of
        `like`. A row on the host is read there, and only its part is sent.
        """
        if values.device == self.slots.device:
            return values[self.slots].to(like)
        found = values[on_device(self.host_slots, values.device)]
        return on_device(found, like.device).to(like.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each chunk's predictors: [P, …] to [C, …]."""
        if len(self.slots) == len(self.lengths):
            return values
        sums = values.new_zeros(len(self.lengths), *values.shape[1:]).index_add(
            0, self.chunks, values
        )
        return sums / self.lengths.to(values.dtype)[:, None]

    def log_mean(self, logs: Tensor) -> Tensor:
        """Logarithm of the mean of exp(`logs`) over each chunk's predictors: [P, V] to [C, V],
        without underflow.
        """
        if len(self.slots) == len(self.lengths):
            return logs
        index = self.chunks[:, None].expand_as(logs)
        largest = logs.new_full((len(self.lengths), logs.shape[1]), -torch.inf)
        largest = largest.scatter_reduce(0, index, logs, "amax").clamp_min(
            torch.finfo(logs.dtype).min
        )
        return self.mean((logs - largest[self.chunks]).exp()).log() + largest

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each chunk's predictors: [P] to [C]."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.chunks, values)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkBlock:
    """Consecutive chunks for which logits are computed together."""

    slots: Tensor
    """int64 [n] slots of the student's row for which logits are computed, without repeats."""
    student: Side
    teacher: Side
    student_ends: Tensor
    """int64 [C] last slot of each chunk; it predicts the token after the chunk."""
    teacher_ends: Tensor
    weights: Tensor
    """[C]"""


def chunk_blocks(
    pairing: Pairing, most: int, device: torch.device, *, first: bool = False, ends: bool = False
) -> list[ChunkBlock]:
    """Cut chunks into blocks of at least one chunk and, beyond that, at most `most` predictors on
    either side.

    Args:
        pairing: The chunks.
        most: Number of predictors.
        device: Where the blocks' tensors go.
        first: Use only the first predictor of each chunk.
        ends: Let `slots` hold the last slot of each chunk too, in ascending order.

    Raises:
        ConfigError: A chunk begins at slot 0.
    """
    device = torch.device(device)
    student, teacher = pairing.host_bounds()
    weights = on_device(pairing.weights, device)
    last = student[:, 1] - 1, teacher[:, 1] - 1
    if len(pairing) and min(int(student.min()), int(teacher.min())) < 1:
        raise ConfigError(
            "a chunk begins at slot 0, but no slot predicts the first token; leave the chunk "
            "out, as TeacherRows does"
        )
    if first:
        student = np.stack((student[:, 0], student[:, 0] + 1), 1)
        teacher = np.stack((teacher[:, 0], teacher[:, 0] + 1), 1)
    lengths = np.maximum(np.diff(student)[:, 0], np.diff(teacher)[:, 0])
    blocks = []
    for begin, end in pairwise(_cuts(lengths.tolist(), most)):
        part = slice(begin, end)
        side = _side(student[part], device)
        slots = side.slots
        if ends:
            slots = on_device(np.union1d(side.host_slots, last[0][part]), device)
        blocks.append(
            ChunkBlock(
                slots=slots,
                student=side,
                teacher=_side(teacher[part], device),
                student_ends=on_device(last[0][part], device),
                teacher_ends=on_device(last[1][part], device),
                weights=weights[part],
            )
        )
    return blocks


def _cuts(lengths: list[int], most: int) -> list[int]:
    """First chunk of each block, and the number of chunks."""
    cuts, filled = [0], 0
    for chunk, length in enumerate(lengths):
        if filled and filled + length > most:
            cuts.append(chunk)
            filled = 0
        filled += length
    return [*cuts, len(lengths)] if lengths else [0]


def _side(bounds: Int64, device: torch.device) -> Side:
    lengths = bounds[:, 1] - bounds[:, 0]
    chunks = np.repeat(np.arange(len(lengths)), lengths)
    starts = lengths.cumsum() - lengths
    slots = np.arange(len(chunks)) - starts[chunks] + bounds[chunks, 0] - 1
    return Side(
        slots=on_device(slots, device),
        chunks=on_device(chunks, device),
        lengths=on_device(lengths, device),
        host_slots=slots,
    )
