"""Divergences between two sides' distributions over tokens: the same vocabulary, projected, common, or only sorted."""

from typing import final

import torch
from torch import Tensor

from penstock.distillation.chunk_blocks import ChunkBlock, Side
from penstock.distillation.divergences import (
    LOWEST,
    kl,
    kl_of_logits,
    kl_of_probabilities,
    kl_to_logs,
    listed_log_probs,
    noise_of,
    rest_of,
    sorted_distance,
)
from penstock.distillation.outputs import TeacherOutputs
from penstock.distillation.pairing import Pairing
from penstock.distillation.projecting import Projector
from penstock.distillation.settings import LossSettings
from penstock.errors import ConfigError
from penstock.models.gradients import accumulator


@final
class SameVocabulary:
    """kl: one token of the student against one of the teacher, with the same ids."""

    def __init__(self, settings: LossSettings, outputs: TeacherOutputs, pairing: Pairing, vocab_size: int) -> None:
        lengths = torch.cat((pairing.student_bounds, pairing.teacher_bounds)).diff()
        if len(lengths) and int(lengths.max()) != 1:
            raise ConfigError(
                f"loss kl compares token by token, and there is a chunk of {int(lengths.max())} tokens; it is for a "
                "teacher with the student's tokenizer: use p_kl, h_kl or alm"
            )
        self._settings, self._outputs = settings, outputs
        self._top_k = None if settings.top_k is None or settings.top_k >= vocab_size else settings.top_k
        if outputs.log_probs is not None and outputs.log_probs.shape[-1] != vocab_size:
            raise ConfigError(
                f"loss kl: the teacher has {outputs.log_probs.shape[-1]} tokens and the student {vocab_size}; it is "
                "for a teacher with the student's tokenizer: use p_kl, h_kl or alm"
            )

    def __call__(self, logits: Tensor, block: ChunkBlock) -> Tensor:
        """The divergence of each chunk [C]."""
        logits = logits.to(accumulator(logits.dtype)) / self._settings.temperature
        if self._outputs.log_probs is not None and self._top_k is None:
            log_p = self._outputs.log_probs[block.teacher.slots.to(self._outputs.log_probs.device)].to(logits)
            return kl_of_logits(logits, log_p, reverse=self._settings.reverse)
        ids, listed = top_of(self._outputs, block.teacher, self._top_k, logits)
        if ids.shape[-1] == logits.shape[-1]:
            return kl_of_logits(logits, listed.scatter(-1, ids, listed), reverse=self._settings.reverse)
        # A rest that rounding made 0 would be infinitely far from the student's.
        rest = rest_of(listed.exp()).clamp_min(torch.finfo(listed.dtype).eps)
        log_p, log_q = torch.cat((listed, rest.log()), -1), listed_log_probs(logits, ids)
        return kl(log_q, log_p) if self._settings.reverse else kl(log_p, log_q)


@final
class Projected:
    """p_kl: the student's distribution in the teacher's vocabulary, over the teacher's likeliest tokens and a rest.

    What of the teacher's probability lies on tokens that no student token stands for teaches nothing: the student's
    distribution is held against the teacher's over the others, times how much that is. Over the teacher's whole
    vocabulary it has no rest, and the student's rest, of tokens that the projection has no word for, counts by what is
    missing elsewhere: in reverse it would be infinitely far.
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
            raise ConfigError("loss p_kl needs a projection of the student's vocabulary: pass projector")
        if projector.student_size != vocab_size:
            raise ConfigError(
                f"loss p_kl: the projection is of {projector.student_size} tokens, the student has {vocab_size}"
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
                if self._settings.reverse:
                    return self._reverse_of_all(
                        self._projector(student), teacher_log_mean(self._outputs, block.teacher, student)
                    )
                # Nothing of the teacher's is left over, not even by rounding.
                return self._compare(teacher, self._projector(student), self._reached, torch.zeros_like(teacher[:, :1]))
            teacher, ids = teacher.topk(self._settings.top_k)
            student = self._projector.columns(student, ids)
        else:
            teacher, ids, known = known_mean(self._outputs, block.teacher, self._settings.top_k, student)
            student = self._projector.columns(student, ids) * known
        return self._compare(teacher, student, self._reached[ids], rest_of(teacher))

    def _reverse_of_all(self, q: Tensor, log_p: Tensor) -> Tensor:
        """KL(student ‖ teacher) of the student's projected probabilities and the teacher's logarithms, [C, V] both."""
        lost = log_p.exp().masked_fill(self._reached, 0.0).sum(-1, keepdim=True)
        return kl_to_logs(q * (1 - lost), log_p.masked_fill(~self._reached, LOWEST))

    def _compare(self, p: Tensor, q: Tensor, reached: Tensor, rest: Tensor) -> Tensor:
        """KL of listed probabilities [C, K], those of the teacher and the student's projected ones, and of the rest."""
        lost, noise = p.masked_fill(reached, 0.0).sum(-1, keepdim=True), noise_of(p.dtype)
        p = torch.cat((p.masked_fill(~reached, 0.0), rest + noise), -1)
        q = torch.cat((q, rest_of(q) + noise), -1) * (1 - lost)
        return kl_of_probabilities(q, p) if self._settings.reverse else kl_of_probabilities(p, q)


@final
class CommonVocabulary:
    """h_kl: KL over the tokens both have, with one bucket for the others; and the sorted distance of the others.

    KL is from where it is taken to a side that can have nothing in that bucket infinite: without other tokens on that
    side the bucket is left out, and what is in it counts by what is missing elsewhere.
    """

    def __init__(self, settings: LossSettings, outputs: TeacherOutputs, pairs: Tensor | None, vocab_size: int) -> None:
        full = full_log_probs(outputs, "h_kl")
        if pairs is None or not len(pairs):
            raise ConfigError("loss h_kl needs the common vocabulary: pass pairs, as Projection.pairs gives them")
        self._settings, self._outputs = settings, outputs
        self._pairs = pairs.to(torch.int64)
        self._uncommon = [
            torch.ones(size, dtype=torch.bool).index_fill(0, self._pairs[:, side].cpu(), False).nonzero()[:, 0]
            for side, size in ((0, vocab_size), (1, full.shape[-1]))
        ]
        self._buckets = len(self._pairs) + bool(len(self._uncommon[1 if settings.reverse else 0]))

    def __call__(self, logits: Tensor, block: ChunkBlock) -> Tensor:
        """The divergence of each chunk [C]."""
        student = student_mean(logits, block.student, self._settings.temperature)
        teacher = teacher_mean(self._outputs, block.teacher, student)
        sides, others = [], []
        for number, found in enumerate((student, teacher)):
            common, other = self._parts(found, number)
            sides.append(torch.cat((common, other.sum(-1, keepdim=True)), -1)[:, : self._buckets])
            others.append(other)
        q, p = sides
        if self._settings.reverse:
            common, other = self._parts(teacher_log_mean(self._outputs, block.teacher, student), 1)
            apart = kl_to_logs(q, torch.cat((common, other.logsumexp(-1, keepdim=True)), -1)[:, : self._buckets])
        else:
            apart = kl_of_probabilities(p, q)
        return apart + sorted_distance(others[1], others[0], self._settings.top_k)

    def _parts(self, found: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """What is of the common tokens, and what of the others; side 0 is the student, 1 the teacher."""
        return (
            found.index_select(1, self._pairs[:, side].to(found.device)),
            found.index_select(1, self._uncommon[side].to(found.device)),
        )


@final
class SortedProbabilities:
    """uld: the distance of both distributions sorted by size, whatever their tokens are."""

    def __init__(self, settings: LossSettings, outputs: TeacherOutputs, vocab_size: int) -> None:
        full_log_probs(outputs, "uld")
        self._settings, self._outputs = settings, outputs

    def __call__(self, logits: Tensor, block: ChunkBlock) -> Tensor:
        """The divergence of each chunk [C]."""
        student = student_mean(logits, block.student, self._settings.temperature)
        teacher = teacher_mean(self._outputs, block.teacher, student)
        return sorted_distance(teacher, student, self._settings.top_k)


def student_mean(logits: Tensor, side: Side, temperature: float) -> Tensor:
    """Mean probabilities of each chunk [C, V] of logits [P, V]."""
    # As the teacher's are made, rounding for rounding.
    logs = torch.log_softmax(logits.to(accumulator(logits.dtype)) / temperature, -1)
    return side.mean(logs.exp())


def teacher_mean(outputs: TeacherOutputs, side: Side, like: Tensor) -> Tensor:
    """Mean probabilities of each chunk [C, V] of the full distributions."""
    assert outputs.log_probs is not None
    logs = outputs.log_probs[side.slots.to(outputs.log_probs.device)].to(like)
    return side.mean(logs.exp())


def teacher_log_mean(outputs: TeacherOutputs, side: Side, like: Tensor) -> Tensor:
    """Logarithms of the mean probabilities of each chunk [C, V] of the full distributions."""
    assert outputs.log_probs is not None
    return side.log_mean(outputs.log_probs[side.slots.to(outputs.log_probs.device)].to(like))


def full_log_probs(outputs: TeacherOutputs, kind: str) -> Tensor:
    """The teacher's full distributions, which sorting needs.

    Raises:
        ConfigError: Only the likeliest tokens are there.
    """
    if outputs.log_probs is None:
        raise ConfigError(
            f"loss {kind} needs the teacher's full distribution, and it gave its likeliest tokens only (a cache has no "
            "others); ask with Wanted(top_k=None), or use kl, p_kl or alm"
        )
    return outputs.log_probs


def top_of(outputs: TeacherOutputs, side: Side, top_k: int | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """The teacher's likeliest tokens at each slot: ids [P, k] and log-probabilities [P, k]."""
    if outputs.log_probs is not None:
        assert top_k is not None
        logs, ids = outputs.log_probs[side.slots.to(outputs.log_probs.device)].topk(top_k)
    else:
        assert outputs.top_ids is not None
        assert outputs.top_log_probs is not None
        places = side.slots.to(outputs.top_ids.device)
        logs, ids = outputs.top_log_probs[places, :top_k], outputs.top_ids[places, :top_k]
    return ids.to(like.device), logs.to(like)


def known_mean(outputs: TeacherOutputs, side: Side, top_k: int | None, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean probabilities of each chunk where only each slot's likeliest tokens are known.

    Listed are the tokens that are known at *all* of a chunk's slots: anything else would take a token that one slot
    does not list for impossible there. All others are in the rest.

    Returns:
        Probabilities [C, k], 0 where not known; ids [C, k]; and which are known, [C, k] 1 or 0.
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
