"""Divergences between distributions, line by line: never negative, and exactly 0 with gradient 0 where both are equal.

KL is taken as Σ q − p + p × (log p − log q), which is KL wherever both sum to 1: every term is at least 0, and its
gradient vanishes term by term where p = q, not only in the sum.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from penstock.models.gradients import accumulator

FLOOR = 1e-30
"""Added to probabilities before their logarithm."""
LOWEST = -1e4
"""Instead of log 0: 0 × −∞ has no value."""


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) of each line, ≥ 0, of log-probabilities [n, V]; either may have a gradient."""
    p, q = log_p.exp(), log_q.exp()
    return not_negative((q - p + p * (log_p.clamp_min(LOWEST) - log_q.clamp_min(LOWEST))).sum(-1))


class _KLOfLogits(torch.autograd.Function):
    """KL between fixed log-probabilities and the softmax of logits; its gradient is made with it, in its memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, log_p: Tensor, reverse: bool) -> Tensor:
        log_q = torch.log_softmax(logits, -1)
        p, q = log_p.exp(), log_q.exp()
        gap = log_q.clamp_min_(LOWEST).sub_(log_p.clamp_min(LOWEST))
        if reverse:
            apart = torch.linalg.vecdot(q, gap)
            value: Tensor = (p - q).sum(-1) + apart
            gradient = gap.sub_(apart[:, None]).mul_(q)
        else:
            gradient = q.sub_(p)
            value = gradient.sum(-1) - torch.linalg.vecdot(p, gap)
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * incoming[:, None], None, None


def kl_of_logits(logits: Tensor, log_p: Tensor, *, reverse: bool) -> Tensor:
    """KL(p ‖ softmax(logits)) of each line, or the reverse, ≥ 0; both [n, V], float32 or float64, log_p fixed."""
    value: Tensor = _KLOfLogits.apply(logits, log_p, reverse)
    return not_negative(value)


def kl_of_probabilities(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) of each line, ≥ 0. Both [n, K] probabilities, some of which may be 0."""
    p, q = p + FLOOR, q + FLOOR
    return not_negative((q - p + p * (p.log() - q.log())).sum(-1))


def kl_to_logs(q: Tensor, log_p: Tensor) -> Tensor:
    """KL(q ‖ p) of each line, ≥ 0: q [n, K] probabilities, some of which may be 0, and logarithms of p, fixed.

    Nothing is added to p: what is unlikely to it counts as far as its logarithm says (to `LOWEST`), and not as far as
    a probability can be rounded. Lines need not sum to 1.
    """
    p, smallest = log_p.exp(), torch.finfo(q.dtype).tiny
    # Where p has its digits, rounded as q is, so that equal sides are exactly equal.
    log_p = torch.where(p > smallest / torch.finfo(q.dtype).eps, p.log(), log_p.clamp_min(LOWEST))
    return not_negative((p - q + q * (q.clamp_min(smallest).log() - log_p)).sum(-1))


def rest_of(listed: Tensor) -> Tensor:
    """The bucket for what is not listed: [n, K] probabilities to [n, 1]; known to some rounding only."""
    return not_negative(1 - listed.sum(-1, keepdim=True))


def noise_of(dtype: torch.dtype) -> float:
    """What is added to rests on both sides before their logarithm, lest its gradient be all rounding."""
    return 64 * torch.finfo(dtype).eps


class _Listed(torch.autograd.Function):
    """Log-probabilities of listed tokens and of all others together; the latter from its own terms, so it is exact."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> Tensor:
        logs = torch.log_softmax(logits, -1, dtype=accumulator(logits.dtype))
        listed = logs.gather(-1, ids)
        probabilities = logs.exp_()
        rest = probabilities.scatter(-1, ids, 0.0).sum(-1, keepdim=True)
        rest.clamp_min_(torch.finfo(rest.dtype).tiny)
        ctx.save_for_backward(probabilities, ids, rest)
        ctx.dtype = logits.dtype
        return torch.cat((listed, rest.log()), -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        probabilities, ids, rest = ctx.saved_tensors
        total, of_rest = gradient.sum(-1, keepdim=True), gradient[:, -1:]
        # Of all tokens as if none were listed, which then is put right where they are.
        to_logits = probabilities * (of_rest / rest - total)
        to_logits.scatter_(-1, ids, gradient[:, :-1] - probabilities.gather(-1, ids) * total)
        return to_logits.to(ctx.dtype), None


def listed_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Logits [n, V] and ids int64 [n, K], K < V, without repeats, to [n, K + 1]: of those, and of all others as one."""
    result: Tensor = _Listed.apply(logits, ids)
    return result


def not_negative(x: Tensor) -> Tensor:
    """max(x, 0), with the gradient of x: below 0 there is nothing but rounding."""
    return x + (-x).clamp_min(0).detach()


def sorted_distance(p: Tensor, q: Tensor, most: int | None) -> Tensor:
    """L1 distance of the probabilities of each line sorted by size: [n, V] and [n, W] to [n].

    The shorter side is filled up with zeros. With `most`, only so many of the largest are compared one by one, and the
    sums of the rest.
    """
    longest = max(p.shape[-1], q.shape[-1])
    if most is not None and most >= longest:
        most = None
    p, q = _sorted(p, longest, most), _sorted(q, longest, most)
    difference = p - q
    # The gradient of an absolute value is ±1 however small it is: what may be the rounding of logits counts as 0.
    rounding = 4096 * torch.finfo(p.dtype).eps * torch.maximum(p, q).detach()
    return difference.masked_fill(difference.detach().abs() <= rounding, 0.0).abs().sum(-1)


def _sorted(p: Tensor, length: int, most: int | None) -> Tensor:
    """Descending, filled up with zeros to `length`; or the largest, filled up to `most`, and the sum of all others."""
    if most is None:
        return pad(p.sort(-1, descending=True).values, (0, length - p.shape[-1]))
    if most >= p.shape[-1]:
        return pad(p.sort(-1, descending=True).values, (0, most + 1 - p.shape[-1]))
    largest = p.topk(most).values
    return torch.cat((largest, not_negative(p.sum(-1, keepdim=True) - largest.sum(-1, keepdim=True))), -1)
