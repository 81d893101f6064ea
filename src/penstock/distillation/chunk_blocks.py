"""Chunks in blocks: which slots of both rows a block needs, and what belongs to which of its chunks.

A chunk is never cut, so a block's sum is exact by itself. Costs a few passes over the bounds, on the CPU.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from penstock.distillation.pairing import Pairing
from penstock.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """One side's predictors in a block of C chunks, P of them."""

    slots: Tensor
    """int64 [P] slots of the row."""
    chunks: Tensor
    """int64 [P] number of each one's chunk in the block, rising."""
    lengths: Tensor
    """int64 [C] predictors of each chunk."""

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each chunk's predictors: [P, …] to [C, …]."""
        if len(self.slots) == len(self.lengths):
            return values
        sums = values.new_zeros(len(self.lengths), *values.shape[1:]).index_add(0, self.chunks, values)
        return sums / self.lengths.to(values.dtype)[:, None]

    def log_mean(self, logs: Tensor) -> Tensor:
        """Logarithm of the mean of exp(`logs`) over each chunk's predictors: [P, V] to [C, V], without underflow."""
        if len(self.slots) == len(self.lengths):
            return logs
        index = self.chunks[:, None].expand_as(logs)
        largest = logs.new_full((len(self.lengths), logs.shape[1]), -torch.inf)
        largest = largest.scatter_reduce(0, index, logs, "amax").clamp_min(torch.finfo(logs.dtype).min)
        return self.mean((logs - largest[self.chunks]).exp()).log() + largest

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each chunk's predictors: [P] to [C]."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.chunks, values)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkBlock:
    """Consecutive chunks whose logits exist at the same time."""

    slots: Tensor
    """int64 [n] of the student, without repeats: those whose logits are made."""
    student: Side
    teacher: Side
    student_ends: Tensor
    """int64 [C] last slot of each chunk: what it predicts comes after the chunk."""
    teacher_ends: Tensor
    weights: Tensor
    """[C]"""


def chunk_blocks(
    pairing: Pairing, most: int, device: torch.device, *, first: bool = False, ends: bool = False
) -> list[ChunkBlock]:
    """Cut chunks into blocks of at most `most` predictors of the student and of the teacher, but at least one chunk.

    Args:
        pairing: The chunks.
        most: Predictors.
        device: Where the blocks' tensors go.
        first: Only the first predictor of each chunk.
        ends: `slots` are the predictors and the last slot of each chunk, rising; else the predictors.

    Raises:
        ConfigError: A chunk begins where nothing predicts it.
    """
    student, teacher, weights = pairing.student_bounds.cpu(), pairing.teacher_bounds.cpu(), pairing.weights.cpu()
    if len(pairing) and min(int(student.min()), int(teacher.min())) < 1:
        raise ConfigError("a chunk begins at slot 0, whose token nothing predicts; leave it out, as TeacherRows does")
    if first:
        student = torch.stack((student[:, 0], student[:, 0] + 1), 1)
        teacher = torch.stack((teacher[:, 0], teacher[:, 0] + 1), 1)
    cuts = _cuts(torch.maximum(student.diff()[:, 0], teacher.diff()[:, 0]).tolist(), most)
    blocks = []
    for begin, end in pairwise(cuts):
        part = slice(begin, end)
        side, last = _side(student[part], device), pairing.student_bounds[part, 1].to(device) - 1
        blocks.append(
            ChunkBlock(
                slots=torch.unique(torch.cat((side.slots, last))) if ends else side.slots,
                student=side,
                teacher=_side(teacher[part], device),
                student_ends=last,
                teacher_ends=pairing.teacher_bounds[part, 1].to(device) - 1,
                weights=weights[part].to(device),
            )
        )
    return blocks


def _cuts(lengths: list[int], most: int) -> list[int]:
    """Where blocks begin, and the end."""
    cuts, filled = [0], 0
    for chunk, length in enumerate(lengths):
        if filled and filled + length > most:
            cuts.append(chunk)
            filled = 0
        filled += length
    return [*cuts, len(lengths)] if lengths else [0]


def _side(bounds: Tensor, device: torch.device) -> Side:
    lengths = bounds[:, 1] - bounds[:, 0]
    chunks = torch.repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    slots = torch.arange(len(chunks)) - starts[chunks] + bounds[chunks, 0] - 1
    return Side(slots=slots.to(device), chunks=chunks.to(device), lengths=lengths.to(device))
