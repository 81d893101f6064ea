"""The distillation loss of a row: how far a student's predictions are from a teacher's, by any of
the divergences.

    loss = scale × Σ over chunks of weight × divergence × temperature²      (alm: × τ)

Guarantees: each chunk's divergence depends on that chunk alone and is at least 0; it is 0, with
gradient 0, if both sides predict the same. Logits beyond the tokenizer's ids are cut off. The
predictor of a token is the slot before it. A row without chunks has loss 0 and zero gradients, so
collectives still run. Logits exist only for a block of chunks at a time (see `sum_over_blocks`).

Approximate likelihood matching (`ChunkLikelihood`) compares how likely a chunk of text is to both
sides, whatever its tokens. A chunk's probability p is the product of its tokens' probabilities,
times the probability that a boundary follows (debias: without it, a tokenizer that would continue
with a longer token seems to predict another text). The outcomes p^(1/τ) and 1 − p^(1/τ) are
compared by KL; the paper uses cross entropy, which differs by the teacher's entropy, so the
gradient is the same, but KL is 0 if both are equal. A chunk after which the teacher hardly expects
a boundary is joined with the next.

Sources: X-Token's P-KL and H-KL in NeMo-RL (#2508); GOLD in TRL; ALM: Minixhofer et al. 2025,
arXiv:2503.20083; ULD: Boizard et al. 2024, arXiv:2402.12030.
"""

from collections.abc import Callable
from typing import final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.learn.distillation.blocks import ChunkBlock, Pairing, chunk_blocks, sum_over_blocks
from penstock.learn.distillation.divergences import mixed, not_negative
from penstock.learn.distillation.outputs import TeacherOutputs
from penstock.learn.distillation.settings import LossSettings
from penstock.learn.distillation.token_losses import (
    CommonVocabulary,
    Projected,
    Projector,
    SameVocabulary,
    SortedProbabilities,
)
from penstock.models.gradients import accumulator
from penstock.models.head import Head, Logits
from penstock.plan.inputs.torch_tensors import on_device, on_host

Divergence = Callable[[Tensor, ChunkBlock], Tensor]
"""The student's logits [n, V] of `block.slots`, and the block → the divergence of each chunk
[C].
"""

LEAST_SLOTS = 256
"""Minimum predictors in a block: each block adds a gradient as large as the head to a sum."""
ELEMENTS_CPU, ELEMENTS_GPU = 1 << 20, 1 << 27
"""Logits in a larger block: 4 MiB and 512 MiB in float32, of which a few copies exist at once."""
MOST_TOKENS = 64
"""Maximum student tokens in a joined chunk; without it, text without boundaries (Chinese, numbers)
would become one chunk a document.
"""
MARGIN = 1e-6
"""Subtracted from log p^(1/τ) on both sides, so that 1 − p is not 0; as in the paper's code."""


def distillation_loss(
    logits_of: Logits,
    hidden: Tensor,
    outputs: TeacherOutputs,
    pairing: Pairing,
    settings: LossSettings,
    *,
    vocab_size: int,
    projector: Projector | None = None,
    pairs: Tensor | None = None,
    boundary: Tensor | None = None,
    targets: Tensor | None = None,
    scale: float = 1.0,
    block: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The divergence of a row's chunks between student and teacher.

    Args:
        logits_of: The student's head: hidden states [n, width] to logits [n, ≥ vocab_size]. A
            `Head` shares cast weights with other losses of the pass.
        hidden: [T, width], the student's final hidden states at distance 1.
        outputs: The teacher's predictions for its own row, at the temperature of `settings`.
        pairing: The chunks of both rows.
        settings: Which divergence, and its settings.
        vocab_size: Number of ids of the student's tokenizer.
        projector: p_kl: maps the student's vocabulary to the teacher's.
        pairs: h_kl: int64 [n, 2] (student id, teacher id), see `Projection.pairs`.
        boundary: alm with debias: bool [vocab_size], see `starts_boundary`.
        targets: alm: int64 [T], the token after each slot; only those inside chunks are used.
        scale: Factor of the loss, usually 1 / the step's denominator.
        block: Number of predictors with logits at the same time; None: by vocabulary and device.

    Returns:
        The scaled loss, a scalar with gradient to `hidden`, the head and the projector; and the
        plain sum of weight × divergence × temperature² (alm: × τ), float64, without gradient.

    Raises:
        ConfigError: Something that the divergence needs is missing or does not fit.
    """
    if outputs.temperature != settings.temperature and settings.kind != "alm":
        raise ConfigError(
            f"the teacher's outputs have temperature {outputs.temperature}, the loss expects "
            f"{settings.temperature}; make the cache again, or ask with the loss's "
            "temperature: Wanted(temperature=...)"
        )
    divergence: Divergence
    if settings.kind == "alm":
        divergence = ChunkLikelihood(
            settings, outputs, targets=targets, boundary=boundary, vocab_size=vocab_size
        )
        if settings.debias and settings.merge_below and outputs.boundary_log_probs is not None:
            pairing = merge_chunks(pairing, outputs.boundary_log_probs, settings.merge_below)
    elif settings.kind == "kl":
        divergence = SameVocabulary(settings, outputs, pairing, vocab_size)
    elif settings.kind == "p_kl":
        divergence = Projected(settings, outputs, projector, vocab_size, hidden.device)
    elif settings.kind == "h_kl":
        divergence = CommonVocabulary(settings, outputs, pairs, vocab_size)
    else:
        divergence = SortedProbabilities(settings, outputs, vocab_size)
    head = Head.of(logits_of)
    parts = head.parts(hidden)
    if parts.vocab_size < vocab_size:
        raise ConfigError(
            f"the student has logits for {parts.vocab_size} ids, its tokenizer has "
            f"{vocab_size}; give the tokenizer that it is trained with"
        )
    if block is None:
        elements = ELEMENTS_CPU if hidden.device.type == "cpu" else ELEMENTS_GPU
        block = max(LEAST_SLOTS, elements // vocab_size)
    first = settings.chunk == "first" and settings.kind in ("p_kl", "h_kl", "uld")
    ends = settings.kind == "alm" and settings.debias
    blocks = chunk_blocks(pairing, block, hidden.device, first=first, ends=ends)
    # Keeps gradients at the same scale at any temperature.
    factor = settings.binary_temperature if settings.kind == "alm" else settings.temperature**2

    def block_sum(states: Tensor, number: int) -> Tensor:
        each = blocks[number]
        found = divergence(head.wide(states)[:, :vocab_size], each)
        total: Tensor = (found * each.weights.to(found.dtype)).sum() * factor
        return total

    projected = [] if projector is None else list(projector.parameters())
    return sum_over_blocks(
        block_sum,
        hidden,
        [each.slots for each in blocks],
        [*parts.weights, *projected],
        scale,
        [*parts.used, *projected],
    )


@final
class ChunkLikelihood:
    """alm: binary KL of each chunk's probability.

    Args:
        settings: Those of the loss.
        outputs: The teacher's.
        targets: int64 [T], the student's token after each slot.
        boundary: bool [vocab_size], needed with debias.
        vocab_size: Number of ids of the student's tokenizer.
    """

    def __init__(
        self,
        settings: LossSettings,
        outputs: TeacherOutputs,
        *,
        targets: Tensor | None,
        boundary: Tensor | None,
        vocab_size: int,
    ) -> None:
        if targets is None:
            raise ConfigError(
                "loss alm needs the student's tokens: pass targets, the token after each slot"
            )
        if settings.debias and (boundary is None or len(boundary) != vocab_size):
            raise ConfigError(
                f"loss alm with debias expects a bool for each of the student's {vocab_size} "
                f"ids, got {'none' if boundary is None else len(boundary)}; pass "
                "boundary=starts_boundary(tokenizer), or set debias to false"
            )
        if settings.debias and outputs.boundary_log_probs is None:
            raise ConfigError(
                "loss alm with debias needs the teacher's boundary probabilities, but its "
                "outputs have none; ask with Wanted(boundary=True), or set debias to false"
            )
        self._settings, self._outputs, self._targets = settings, outputs, targets
        # Their number is counted on the host, where the mask is.
        self._boundary = (
            torch.from_numpy(np.flatnonzero(on_host(boundary)))
            if settings.debias and boundary is not None
            else None
        )

    def __call__(self, logits: Tensor, block: ChunkBlock) -> Tensor:
        """The divergence of each chunk [C]; logits [n, V] of `block.slots`."""
        student = self._student(logits.to(accumulator(logits.dtype)), block)
        teacher = self._teacher(block, student)
        log_p, log_q = (x / self._settings.binary_temperature for x in (teacher, student))
        return mixed(
            self._settings.forward,
            lambda: binary_kl(log_p, log_q),
            lambda: binary_kl(log_q, log_p),
        )

    def _student(self, logits: Tensor, block: ChunkBlock) -> Tensor:
        side, log_z = block.student, logits.logsumexp(-1)
        places = torch.searchsorted(block.slots, side.slots)
        realised = side.sum(logits[places, self._targets[side.slots]] - log_z[places])
        if self._boundary is None:
            return realised
        ends = torch.searchsorted(block.slots, block.student_ends)
        ids = on_device(self._boundary, logits.device)
        boundary = logits.index_select(0, ends).index_select(1, ids).logsumexp(-1)
        return realised + boundary - log_z[ends]

    def _teacher(self, block: ChunkBlock, like: Tensor) -> Tensor:
        # A token's probability is stored at its own slot, one after its predictor.
        tokens = on_device(self._outputs.token_log_probs, like.device).to(like.dtype)
        found = block.teacher.sum(tokens[block.teacher.slots + 1])
        if self._boundary is not None and self._outputs.boundary_log_probs is not None:
            ends = on_device(self._outputs.boundary_log_probs, like.device).to(like.dtype)
            found = found + ends[block.teacher_ends]
        return found


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL between two Bernoulli distributions, ≥ 0, from their log-probabilities, ≤ 0."""
    log_p, log_q = (x.clamp_max(0.0) - MARGIN for x in (log_p, log_q))
    heads = log_p.exp() * (log_p - log_q)
    return not_negative(heads - log_p.expm1() * (_log1mexp(log_p) - _log1mexp(log_q)))


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 − e^x) for x < 0 (Mächler 2012, "Accurately computing log(1 − exp(−|a|))")."""
    small = x > -0.6931471805599453
    # Each branch gets harmless values in the other's range, where its gradient would be infinite.
    return torch.where(
        small,
        (-x.where(small, torch.full_like(x, -1.0)).expm1()).log(),
        (-x.where(~small, torch.full_like(x, -1.0)).exp()).log1p(),
    )


def merge_chunks(pairing: Pairing, boundary_log_probs: Tensor, threshold: float) -> Pairing:
    """Join each chunk with the next where the teacher's probability of a boundary between them is
    at most `threshold`.

    Only adjacent chunks, with no token between them on either side, are joined, up to `MOST_TOKENS`
    of the student. Weights are added, so their sum does not change.

    Args:
        pairing: The chunks.
        boundary_log_probs: [Tt], the teacher's.
        threshold: A probability.
    """
    if not len(pairing):
        return pairing
    student, teacher = pairing.host_bounds()
    likely = on_host(boundary_log_probs.float())[teacher[:-1, 1] - 1] > np.log(threshold)
    apart = (student[1:, 0] != student[:-1, 1]) | (teacher[1:, 0] != teacher[:-1, 1])
    begins = np.concatenate(([True], likely | apart))
    of = np.cumsum(begins) - 1
    # A run that is too long is cut where it passes a multiple of the limit.
    pieces = (student[:, 0] - student[begins, 0][of]) // MOST_TOKENS
    begins[1:] |= pieces[1:] != pieces[:-1]
    firsts = np.flatnonzero(begins)
    lasts = np.append(firsts[1:], len(begins)) - 1
    bounds = [
        torch.from_numpy(np.stack((side[firsts, 0], side[lasts, 1]), 1))
        for side in (student, teacher)
    ]
    weights = pairing.weights
    sums = weights.new_zeros(len(firsts)).index_add(
        0, on_device(np.cumsum(begins) - 1, weights.device), weights
    )
    return Pairing(student_bounds=bounds[0], teacher_bounds=bounds[1], weights=sums)
