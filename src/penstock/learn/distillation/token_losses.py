"""Divergences between two distributions over tokens: the same vocabulary, projected, common, or
only sorted.

`Projector` applies a projection: probabilities of student tokens become probabilities of teacher
tokens. Guarantees: the sum of a row of probabilities is kept, except for tokens with an empty row
in the projection; additions have a fixed order (on a GPU with
`torch.use_deterministic_algorithms`). Costs: a multiplication and an addition per cell and
position, forward and backward; learnable weights need about as much memory again as the
probabilities.
"""

from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.errors import ConfigError
from penstock.learn.distillation.blocks import ChunkBlock, Pairing, Side
from penstock.learn.distillation.divergences import (
    LOWEST,
    kl,
    kl_of_logits,
    kl_of_probabilities,
    kl_to_logs,
    listed_log_probs,
    mixed,
    noise_of,
    rest_of,
    sorted_distance,
)
from penstock.learn.distillation.outputs import TeacherOutputs
from penstock.learn.distillation.projection import Projection
from penstock.learn.distillation.settings import LossSettings
from penstock.models.gradients import accumulator

COUNTS_FREELY = ("cpu",)
"""Devices that are asked for numbers of elements; others would have to be waited for."""


@final
class Projector(nn.Module):
    """A projection from the student's to the teacher's vocabulary, fixed or learnable.

    Learnable weights are a softmax over the cells of each row, so rows always sum to 1, and rows of
    one cell stay as they are.

    Args:
        projection: The cells and their initial weights.
        learnable: Whether the weights are parameters.
    """

    filled: Tensor
    cells: Tensor
    rows: Tensor
    columns_of: Tensor
    begins: Tensor
    weights: Tensor

    def __init__(self, projection: Projection, *, learnable: bool = False) -> None:
        super().__init__()
        self.student_size, self.teacher_size = projection.student_size, projection.teacher_size
        indices = torch.from_numpy(projection.indices).long()
        weights = torch.from_numpy(projection.weights)
        filled = indices >= 0
        # Cells ordered by teacher token, so that those of one teacher token are adjacent.
        cells = filled.flatten().nonzero()[:, 0]
        cells = cells[torch.argsort(indices.flatten()[cells], stable=True)]
        columns = indices.flatten()[cells]
        counts = torch.bincount(columns, minlength=self.teacher_size)
        buffers = {
            "filled": filled,
            "cells": cells,
            "rows": cells // indices.shape[1],
            "columns_of": columns,
            "begins": torch.cat((counts.new_zeros(1), counts.cumsum(0))),
            "weights": weights,
        }
        # Not saved with a model: the projection has its own file.
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)
        self.log_weights = (
            nn.Parameter(weights.log().masked_fill(~filled, 0.0)) if learnable else None
        )

    def cell_weights(self) -> Tensor:
        """The current weights, float32 [student vocabulary, k], with gradient if they are
        learnable.
        """
        if self.log_weights is None:
            return self.weights
        # In empty rows all scores are the same large negative number: no 0 / 0, and zeros in the
        # end.
        scores = self.log_weights.masked_fill(~self.filled, torch.finfo(self.log_weights.dtype).min)
        return scores.softmax(1).masked_fill(~self.filled, 0.0)

    def forward(self, probabilities: Tensor) -> Tensor:
        """Project whole rows.

        Args:
            probabilities: [n, student vocabulary], float32 or float64.

        Returns:
            [n, teacher vocabulary], in the dtype of `probabilities`.
        """
        weights = self.cell_weights().flatten()[self.cells].to(probabilities.dtype)
        parts = probabilities.index_select(1, self.rows) * weights
        empty = probabilities.new_zeros(len(probabilities), self.teacher_size)
        projected: Tensor = empty.index_add(1, self.columns_of, parts)
        return projected

    def columns(self, probabilities: Tensor, ids: Tensor) -> Tensor:
        """Project to the teacher tokens `ids` of each row only, on the CPU at the cost of their
        cells alone. The number of these would have to be read from another device, which projects
        whole rows instead.

        Args:
            probabilities: [n, student vocabulary], float32 or float64.
            ids: Teacher ids, int64 [n, K].

        Returns:
            [n, K], in the dtype of `probabilities`.
        """
        begins, counts = self.begins[ids.flatten()], self.begins.diff()[ids.flatten()]
        if ids.device.type not in COUNTS_FREELY:
            return self.forward(probabilities).gather(1, ids)
        outputs: Tensor = torch.repeat_interleave(counts)
        if len(outputs) > len(probabilities) * len(self.cells):
            return self.forward(probabilities).gather(1, ids)
        ends = counts.cumsum(0)
        cells = torch.arange(len(outputs), device=ids.device) + (begins - ends + counts)[outputs]
        weights = self.cell_weights().flatten()[self.cells[cells]].to(probabilities.dtype)
        places = outputs // ids.shape[1] * self.student_size + self.rows[cells]
        parts = probabilities.flatten().index_select(0, places) * weights
        found: Tensor = probabilities.new_zeros(ids.numel()).index_add(0, outputs, parts)
        return found.view(ids.shape)


@final
class SameVocabulary:
    """kl: one student token against one teacher token, with the same ids."""

    def __init__(
        self, settings: LossSettings, outputs: TeacherOutputs, pairing: Pairing, vocab_size: int
    ) -> None:
        lengths = np.diff(np.concatenate(pairing.host_bounds()))
        if len(lengths) and (longest := int(lengths.max())) != 1:
            raise ConfigError(
                f"loss kl compares token by token, but a chunk has {longest} "
                "tokens; it needs a teacher with the student's tokenizer: use p_kl, h_kl or "
                "alm"
            )
        self._settings, self._outputs = settings, outputs
        self._top_k = (
            None if settings.top_k is None or settings.top_k >= vocab_size else settings.top_k
        )
        if outputs.log_probs is not None and outputs.log_probs.shape[-1] != vocab_size:
            raise ConfigError(
                f"loss kl: the teacher has {outputs.log_probs.shape[-1]} tokens, the student "
                f"{vocab_size}; it needs a teacher with the student's tokenizer: use p_kl, "
                "h_kl or alm"
            )

    def __call__(self, logits: Tensor, block: ChunkBlock) -> Tensor:
        """The divergence of each chunk [C]."""
        logits = logits.to(accumulator(logits.dtype)) / self._settings.temperature
        if self._outputs.log_probs is not None and self._top_k is None:
            log_p = block.teacher.of_row(self._outputs.log_probs, logits)
            return kl_of_logits(logits, log_p, forward=self._settings.forward)
        ids, listed = top_of(self._outputs, block.teacher, self._top_k, logits)
        if ids.shape[-1] == logits.shape[-1]:
            return kl_of_logits(
                logits, listed.scatter(-1, ids, listed), forward=self._settings.forward
            )
        # A rest of 0, which rounding can cause, would be infinitely far from the student's.
        rest = rest_of(listed.exp()).clamp_min(torch.finfo(listed.dtype).eps)
        log_p, log_q = torch.cat((listed, rest.log()), -1), listed_log_probs(logits, ids)
        return mixed(self._settings.forward, lambda: kl(log_p, log_q), lambda: kl(log_q, log_p))


@final
class Projected:
    """p_kl: the student's distribution, projected to the teacher's most likely tokens and a bucket
    for the rest.

    The teacher's probability on tokens that no student token maps to teaches nothing. So the
    student is compared with the teacher's other tokens, scaled by their total probability. Over the
    whole vocabulary the teacher has no rest. Then the student's rest, from tokens with an empty row
    in the projection, has no bucket either: it counts as the probability that the other tokens
    lack. With its own bucket, the reverse divergence would be infinite.
    """

    def __init__(
        self,
        settings: LossSettings,
        outputs: TeacherOutputs,
        projector: Projector | None,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        if projector is None:
            raise ConfigError(
                "loss p_kl needs a projection of the student's vocabulary: pass projector"
            )
        if projector.student_size != vocab_size:
            raise ConfigError(
                f"loss p_kl: the projection is for {projector.student_size} student tokens, "
                f"the student has {vocab_size}; make it again with `penstock distill project`"
            )
        self._settings, self._outputs, self._projector = settings, outputs, projector
        with torch.no_grad():
            self._reached = projector(torch.ones(1, vocab_size, device=device))[0] > 0

    def __call__(self, logits: Tensor, block: ChunkBlock) -> Tensor:
        """The divergence of each chunk [C]."""
        student = student_mean(logits, block.student, self._settings.temperature)
        if self._outputs.log_probs is not None:
            teacher = teacher_mean(self._outputs, block.teacher, student)
            if self._settings.top_k is None or self._settings.top_k >= teacher.shape[-1]:
                return self._compare_all(teacher, self._projector(student), block)
            teacher, ids = teacher.topk(self._settings.top_k)
            student = self._projector.columns(student, ids)
        else:
            teacher, ids, known = known_mean(
                self._outputs, block.teacher, self._settings.top_k, student
            )
            student = self._projector.columns(student, ids) * known
        return self._compare(teacher, student, self._reached[ids], rest_of(teacher))

    def _compare_all(self, teacher: Tensor, student: Tensor, block: ChunkBlock) -> Tensor:
        """Over the whole vocabulary: both [C, V], the student projected."""
        # The teacher's rest is exactly 0, without rounding.
        rest = torch.zeros_like(teacher[:, :1])
        return mixed(
            self._settings.forward,
            lambda: kl_of_probabilities(*self._sides(teacher, student, self._reached, rest)),
            lambda: self._reverse_of_all(
                student, teacher_log_mean(self._outputs, block.teacher, student)
            ),
        )

    def _reverse_of_all(self, q: Tensor, log_p: Tensor) -> Tensor:
        """KL(student ‖ teacher) of projected student probabilities and the teacher's
        log-probabilities, both [C, V].
        """
        lost = log_p.exp().masked_fill(self._reached, 0.0).sum(-1, keepdim=True)
        return kl_to_logs(q * (1 - lost), log_p.masked_fill(~self._reached, LOWEST))

    def _compare(self, p: Tensor, q: Tensor, reached: Tensor, rest: Tensor) -> Tensor:
        """KL of the teacher's and the student's listed probabilities, both [C, K], and of the
        rest.
        """
        p, q = self._sides(p, q, reached, rest)
        return mixed(
            self._settings.forward,
            lambda: kl_of_probabilities(p, q),
            lambda: kl_of_probabilities(q, p),
        )

    @staticmethod
    def _sides(p: Tensor, q: Tensor, reached: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        """Both with the rest, [C, K + 1]."""
        lost, noise = p.masked_fill(reached, 0.0).sum(-1, keepdim=True), noise_of(p.dtype)
        p = torch.cat((p.masked_fill(~reached, 0.0), rest + noise), -1)
        return p, torch.cat((q, rest_of(q) + noise), -1) * (1 - lost)


@final
class CommonVocabulary:
    """h_kl: KL over the common tokens with one bucket for the others, plus the sorted distance of
    the others.

    If the side that KL compares with has no other tokens, its bucket is empty and KL would be
    infinite. Then the bucket is left out, and its probability counts as what the common tokens
    lack.
    """

    def __init__(
        self, settings: LossSettings, outputs: TeacherOutputs, pairs: Tensor | None, vocab_size: int
    ) -> None:
        full = full_log_probs(outputs, "h_kl")
        if pairs is None or not len(pairs):
            raise ConfigError(
                "loss h_kl needs the common vocabulary: pass pairs=Projection.pairs(…)"
            )
        self._settings, self._outputs = settings, outputs
        self._pairs = pairs.to(torch.int64)
        sizes = vocab_size, full.shape[-1]
        self._uncommon = [_others(self._pairs[:, side], size) for side, size in enumerate(sizes)]
        # Of KL from the teacher's side, and from the student's.
        self._buckets = [len(self._pairs) + bool(len(others)) for others in self._uncommon]

    def __call__(self, logits: Tensor, block: ChunkBlock) -> Tensor:
        """The divergence of each chunk [C]."""
        student = student_mean(logits, block.student, self._settings.temperature)
        teacher = teacher_mean(self._outputs, block.teacher, student)
        (common_q, others_q), (common_p, others_p) = (
            self._parts(found, number) for number, found in enumerate((student, teacher))
        )
        q = torch.cat((common_q, others_q.sum(-1, keepdim=True)), -1)
        p = torch.cat((common_p, others_p.sum(-1, keepdim=True)), -1)
        ahead, back = (slice(count) for count in self._buckets)
        apart = mixed(
            self._settings.forward,
            lambda: kl_of_probabilities(p[:, ahead], q[:, ahead]),
            lambda: kl_to_logs(q[:, back], self._teacher_logs(block, student)[:, back]),
        )
        return apart + sorted_distance(others_p, others_q, self._settings.top_k)

    def _teacher_logs(self, block: ChunkBlock, like: Tensor) -> Tensor:
        """Logarithms of the teacher's common tokens and of all others together, [C, n + 1]."""
        logs = teacher_log_mean(self._outputs, block.teacher, like)
        common, others = self._parts(logs, 1)
        return torch.cat((common, others.logsumexp(-1, keepdim=True)), -1)

    def _parts(self, found: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """The columns of the common tokens and those of the others; side 0 is the student, 1 the
        teacher.
        """
        return (
            found.index_select(1, self._pairs[:, side]),
            found.index_select(1, self._uncommon[side]),
        )


def _others(used: Tensor, size: int) -> Tensor:
    """The ids below `size` that are not used, each of which is used once at most."""
    marks = torch.zeros(size, dtype=torch.bool, device=used.device).index_fill(0, used, True)
    if used.device.type in COUNTS_FREELY:
        return (~marks).nonzero()[:, 0]
    # Those that are used are moved to the end, and cut off: their number is known.
    return marks.to(torch.int8).argsort(stable=True)[: size - len(used)]


@final
class SortedProbabilities:
    """uld: the distance between both distributions' sorted probabilities, whatever their tokens
    are.
    """

    def __init__(self, settings: LossSettings, outputs: TeacherOutputs, vocab_size: int) -> None:
        full_log_probs(outputs, "uld")
        self._settings, self._outputs = settings, outputs

    def __call__(self, logits: Tensor, block: ChunkBlock) -> Tensor:
        """The divergence of each chunk [C]."""
        student = student_mean(logits, block.student, self._settings.temperature)
        teacher = teacher_mean(self._outputs, block.teacher, student)
        return sorted_distance(teacher, student, self._settings.top_k)


def student_mean(logits: Tensor, side: Side, temperature: float) -> Tensor:
    """Mean probabilities of each chunk [C, V], from logits [P, V]."""
    # The same operations as for the teacher's, so that rounding is the same.
    logs = torch.log_softmax(logits.to(accumulator(logits.dtype)) / temperature, -1)
    return side.mean(logs.exp())


def teacher_mean(outputs: TeacherOutputs, side: Side, like: Tensor) -> Tensor:
    """Mean probabilities of each chunk [C, V], from the full distributions."""
    assert outputs.log_probs is not None
    return side.mean(side.of_row(outputs.log_probs, like).exp())


def teacher_log_mean(outputs: TeacherOutputs, side: Side, like: Tensor) -> Tensor:
    """Logarithms of the mean probabilities of each chunk [C, V], from the full distributions."""
    assert outputs.log_probs is not None
    return side.log_mean(side.of_row(outputs.log_probs, like))


def full_log_probs(outputs: TeacherOutputs, kind: str) -> Tensor:
    """The teacher's full distributions, which sorting needs.

    Raises:
        ConfigError: The outputs hold only the top-k tokens.
    """
    if outputs.log_probs is None:
        raise ConfigError(
            f"loss {kind} needs the teacher's full distribution, but its outputs hold only "
            "the likeliest tokens (as a cache does); ask with Wanted(top_k=None), or use kl, "
            "p_kl or alm"
        )
    return outputs.log_probs


def top_of(
    outputs: TeacherOutputs, side: Side, top_k: int | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    """The teacher's most likely tokens at each slot: ids [P, k] and log-probabilities [P, k]."""
    if outputs.log_probs is not None:
        assert top_k is not None
        logs, ids = side.of_row(outputs.log_probs, like).topk(top_k)
        return ids, logs
    assert outputs.top_ids is not None
    assert outputs.top_log_probs is not None
    ids = side.of_row(outputs.top_ids[:, :top_k], side.slots)
    return ids, side.of_row(outputs.top_log_probs[:, :top_k], like)


def known_mean(
    outputs: TeacherOutputs, side: Side, top_k: int | None, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean probabilities of each chunk, if only each slot's most likely tokens are known.

    Only tokens that are known at *all* of a chunk's slots are listed; otherwise a token that one
    slot does not list would count as impossible there. All others are in the rest.

    Returns:
        Probabilities [C, k], 0 where unknown; ids [C, k]; and which are known, [C, k] 1 or 0.
    """
    ids, logs = top_of(outputs, side, top_k, like)
    probabilities = logs.exp()
    if len(side.slots) == len(side.lengths):
        return probabilities, ids, torch.ones_like(probabilities)
    starts = side.lengths.cumsum(0) - side.lengths
    wanted = ids[starts]
    ordered, order = ids.sort(-1)
    of_slot = wanted[side.chunks]
    places = torch.searchsorted(ordered, of_slot).clamp_max(ids.shape[-1] - 1)
    here = ordered.gather(-1, places) == of_slot
    found = probabilities.gather(-1, order.gather(-1, places)) * here
    known = (side.mean(here.to(like.dtype)) > 1 - 0.5 / side.lengths[:, None]).to(like.dtype)
    return side.mean(found) * known, wanted, known
