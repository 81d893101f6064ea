"""Divergences between distributions, line by line: never negative, and exactly 0 with gradient 0 if
both are equal.

The two directions of KL can be mixed: `forward` is the share α of KL(p ‖ q), p being the teacher's,
and KL(q ‖ p) has the share 1 − α. 1 is the one alone, 0 the other (as `kl_type: mixed` with
`mixed_kl_weight` of NeMo-RL's distillation loss).

KL is computed as Σ q − p + p × (log p − log q), which equals KL if both sum to 1. Every term is at
least 0, and its gradient vanishes term by term where p = q, not only in the sum.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from penstock.models.gradients import accumulator

FLOOR = 1e-30
"""Added to probabilities before the logarithm."""
LOWEST = -1e4
"""Stands for log 0, because 0 × −∞ is not a number."""


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) of each line, ≥ 0, from log-probabilities [n, V]; either may have a gradient."""
    p, q = log_p.exp(), log_q.exp()
    return not_negative((q - p + p * (log_p.clamp_min(LOWEST) - log_q.clamp_min(LOWEST))).sum(-1))


class _KLOfLogits(torch.autograd.Function):
    """KL between fixed log-probabilities and the softmax of logits; the gradient is computed in the
    forward pass.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, log_p: Tensor, forward: float) -> Tensor:
        log_q = torch.log_softmax(logits, -1)
        p, q = log_p.exp(), log_q.exp()
        gap = log_q.clamp_min_(LOWEST).sub_(log_p.clamp_min(LOWEST))
        if 0 < forward < 1:
            apart, more = torch.linalg.vecdot(q, gap), q - p
            one = more.sum(-1) - torch.linalg.vecdot(p, gap)
            value: Tensor = one.mul_(forward).add_(apart - more.sum(-1), alpha=1 - forward)
            gradient = gap.sub_(apart[:, None]).mul_(q).mul_(1 - forward).add_(more, alpha=forward)
        elif not forward:
            apart = torch.linalg.vecdot(q, gap)
            value = (p - q).sum(-1) + apart
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


def kl_of_logits(logits: Tensor, log_p: Tensor, *, forward: float) -> Tensor:
    """KL between p and q = softmax(logits) of each line, ≥ 0; `forward`: share of KL(p ‖ q);
    both [n, V] float32 or float64, log_p constant.
    """
    value: Tensor = _KLOfLogits.apply(logits, log_p, forward)
    return not_negative(value)


def mixed(forward: float, ahead: Callable[[], Tensor], back: Callable[[], Tensor]) -> Tensor:
    """Two divergences with the shares `forward` and 1 − `forward`; one of share 0 is not
    computed.
    """
    if forward == 1:
        return ahead()
    if forward == 0:
        return back()
    return forward * ahead() + (1 - forward) * back()


def kl_of_probabilities(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) of each line, ≥ 0, from probabilities [n, K], which may be 0."""
    p, q = p + FLOOR, q + FLOOR
    return not_negative((q - p + p * (p.log() - q.log())).sum(-1))


def kl_to_logs(q: Tensor, log_p: Tensor) -> Tensor:
    """KL(q ‖ p) of each line, ≥ 0, from probabilities q [n, K], which may be 0, and constant
    logarithms of p.

    Nothing is added to p, so very unlikely tokens count by their logarithm (down to `LOWEST`), not
    by what a rounded probability can express. Lines need not sum to 1.
    """
    p, smallest = log_p.exp(), torch.finfo(q.dtype).tiny
    # Where exp(log_p) keeps full precision, its log is rounded as q's is, so that equal sides are
    # exactly equal.
    log_p = torch.where(p > smallest / torch.finfo(q.dtype).eps, p.log(), log_p.clamp_min(LOWEST))
    return not_negative((p - q + q * (q.clamp_min(smallest).log() - log_p)).sum(-1))


def rest_of(listed: Tensor) -> Tensor:
    """Probability of everything not listed: [n, K] probabilities to [n, 1], exact only up to
    rounding.
    """
    return not_negative(1 - listed.sum(-1, keepdim=True))


def noise_of(dtype: torch.dtype) -> float:
    """Added to the rests of both sides before the logarithm, so that its gradient is not all
    rounding error.
    """
    return 64 * torch.finfo(dtype).eps


class _Listed(torch.autograd.Function):
    """Log-probabilities of listed tokens, and of all others together, summed from their own terms,
    so it is exact.
    """

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
        # First as if no token were listed; then corrected at the listed ones.
        to_logits = probabilities * (of_rest / rest - total)
        to_logits.scatter_(-1, ids, gradient[:, :-1] - probabilities.gather(-1, ids) * total)
        return to_logits.to(ctx.dtype), None


def listed_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities [n, K + 1] of the listed ids and of all others together.

    Args:
        logits: [n, V].
        ids: int64 [n, K], K < V, without repeats.
    """
    result: Tensor = _Listed.apply(logits, ids)
    return result


def not_negative(x: Tensor) -> Tensor:
    """max(x, 0), with the gradient of x: negative values are only rounding."""
    return x + (-x).clamp_min(0).detach()


def sorted_distance(p: Tensor, q: Tensor, most: int | None) -> Tensor:
    """L1 distance of the sorted probabilities of each line: [n, V] and [n, W] to [n].

    The shorter side is padded with zeros. With `most`, only that number of the largest is compared
    one by one; the others are compared by their sum.
    """
    longest = max(p.shape[-1], q.shape[-1])
    if most is not None and most >= longest:
        most = None
    p, q = _sorted(p, longest, most), _sorted(q, longest, most)
    difference = p - q
    # The gradient of |x| is ±1 however small x is; so differences that may come from rounded logits
    # count as 0.
    rounding = 4096 * torch.finfo(p.dtype).eps * torch.maximum(p, q).detach()
    return difference.masked_fill(difference.detach().abs() <= rounding, 0.0).abs().sum(-1)


def _sorted(p: Tensor, length: int, most: int | None) -> Tensor:
    """Sorted descending and padded with zeros to `length`; or the `most` largest and the sum of all
    others.
    """
    if most is None:
        return pad(p.sort(-1, descending=True).values, (0, length - p.shape[-1]))
    if most >= p.shape[-1]:
        return pad(p.sort(-1, descending=True).values, (0, most + 1 - p.shape[-1]))
    largest = p.topk(most).values
    return torch.cat(
        (largest, not_negative(p.sum(-1, keepdim=True) - largest.sum(-1, keepdim=True))), -1
    )
