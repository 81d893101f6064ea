"""Cross entropy of hidden states against targets, without ever holding the logits of a whole row.

Logits are the largest tensor of a small model's step: 8,192 positions of a vocabulary of 128k are 4 GiB in float32,
several times over in a plain backward pass. Here the positions that have a target are taken in chunks; for each
chunk the logits are made, the loss is taken, and *the gradient is computed at once*, while the logits are still in the
cache. What is kept for the backward pass is the gradient of the hidden states and of the head's parameters, which the
incoming gradient (a scalar) then scales. So nothing is computed twice: the cost is that of the plain formula, less what
positions without a target would have cost. The idea is that of fused linear cross entropy (Liger Kernel, Hsu et al.
2024, arXiv:2410.10989); the head may be any function of its own parameters, because each chunk's gradient is taken
by autograd through it.

The result has no second derivative; asking for one raises.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.models.gradients import accumulator, leaves

LEAST_POSITIONS = 256
"""Positions in a chunk, at least: each chunk adds a gradient as large as the head to a sum."""
ELEMENTS_CPU, ELEMENTS_GPU = 1 << 19, 1 << 27
"""Logits in a chunk beyond that. CPU: 2 MiB in float32, near the second-level cache; GPU: 512 MiB, so that adding up
the head's gradient costs little beside the matrix products."""


def chunked_cross_entropy(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    scale: float = 1.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
    each: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`scale` times the sum over targets of weight × (cross entropy + z_loss × log² Z), Z being the sum of exp(logits).

    Args:
        logits_of: The head: hidden states [n, width] to logits [n, vocab]. Each position by itself.
        hidden: [n, width], of positions that have a target.
        targets: [n] int64, in 0 … vocab - 1.
        weights: [n] float32: how much each counts.
        scale: Factor of the whole, usually 1 / the step's denominator.
        z_loss: Coefficient of the term that keeps log Z near 0 (PaLM, Chowdhery et al. 2022, section 5: 1e-4).
        chunk: Positions whose logits exist at once; None: by vocabulary and device.
        each: [n] float64: takes weight × cross entropy of each target; None: nobody wants them.

    Returns:
        The scaled loss, a scalar; and the sum of weight × cross entropy alone, unscaled, float64, without gradient.
    """
    if not len(hidden):
        return hidden.sum() * 0.0, torch.zeros((), dtype=torch.float64, device=hidden.device)
    probe = logits_of(hidden[:1].detach())
    if chunk is None:
        elements = ELEMENTS_CPU if hidden.device.type == "cpu" else ELEMENTS_GPU
        chunk = max(LEAST_POSITIONS, elements // probe.shape[-1])
    if not torch.is_grad_enabled() or not (hidden.requires_grad or probe.requires_grad):
        return _sums(logits_of, hidden, targets, weights, scale, z_loss, chunk, each)
    result: tuple[Tensor, Tensor] = _ChunkedCrossEntropy.apply(
        logits_of, hidden, targets, weights, scale, z_loss, chunk, each, *leaves(probe)
    )
    return result


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_of: Callable[[Tensor], Tensor],
        hidden: Tensor,
        targets: Tensor,
        weights: Tensor,
        scale: float,
        z_loss: float,
        chunk: int,
        each: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        wanted = [hidden.requires_grad, *(True for _ in parameters)]
        of_hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        of_parameters: list[Tensor] = []
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        cross_entropy = torch.zeros_like(loss)
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            with torch.enable_grad():
                states = hidden[part].detach().requires_grad_(hidden.requires_grad)
                logits = logits_of(states)
            step_loss, step_entropy, gradient = _chunk(
                logits.detach(), targets[part], weights[part], scale, z_loss, None if each is None else each[part]
            )
            inputs = [x for x, want in zip((states, *parameters), wanted, strict=True) if want]
            found = list(torch.autograd.grad(logits, inputs, gradient.to(logits.dtype)))
            if of_hidden is not None:
                of_hidden[part] = found.pop(0)
            if not begin:
                of_parameters = [new.to(accumulator(new.dtype)) for new in found]
            else:
                for total, new in zip(of_parameters, found, strict=True):
                    total += new
            loss += step_loss
            cross_entropy += step_entropy
        ctx.gradients = of_hidden, of_parameters
        ctx.dtypes = [p.dtype for p in parameters]
        ctx.mark_non_differentiable(cross_entropy)
        return loss.to(accumulator(hidden.dtype)), cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_parameters = ctx.gradients
        hidden = None if of_hidden is None else of_hidden * incoming
        heads = [(g * incoming).to(dtype) for g, dtype in zip(of_parameters, ctx.dtypes, strict=True)]
        return None, hidden, None, None, None, None, None, None, *heads


def _chunk(
    logits: Tensor, targets: Tensor, weights: Tensor, scale: float, z_loss: float, each: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, weighted cross entropy, and the gradient of the loss with respect to the logits [n, vocab]."""
    logs, loss, cross_entropy, log_z = _entropy(logits, targets, weights, scale, z_loss, each)
    rows = weights.to(logs.dtype) * scale
    gradient = logs.exp_()
    gradient *= (rows if log_z is None else rows * (1 + 2 * z_loss * log_z))[:, None]
    gradient.scatter_add_(1, targets[:, None], -rows[:, None])
    return loss, cross_entropy, gradient


def _entropy(
    logits: Tensor, targets: Tensor, weights: Tensor, scale: float, z_loss: float, each: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Log probabilities [n, vocab], the loss, the weighted cross entropy, and log Z [n] where it counts."""
    logs = torch.log_softmax(logits, -1, dtype=accumulator(logits.dtype))
    of_targets = logs.gather(1, targets[:, None])[:, 0]
    cross_entropy = -(of_targets.double() @ weights.double())
    if each is not None:
        each.copy_(of_targets).mul_(weights).neg_()
    if not z_loss:
        return logs, cross_entropy * scale, cross_entropy, None
    log_z = logits.gather(1, targets[:, None])[:, 0].to(logs.dtype) - of_targets
    loss = scale * (cross_entropy + z_loss * (log_z.double().square() @ weights.double()))
    return logs, loss, cross_entropy, log_z


def _sums(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    weights: Tensor,
    scale: float,
    z_loss: float,
    chunk: int,
    each: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The two results without any gradient."""
    parts = [slice(begin, begin + chunk) for begin in range(0, len(hidden), chunk)]
    sums = [
        _entropy(logits_of(hidden[p]), targets[p], weights[p], scale, z_loss, None if each is None else each[p])[1:3]
        for p in parts
    ]
    loss, cross_entropy = torch.stack([torch.stack(pair) for pair in sums]).sum(0)
    return loss.to(accumulator(hidden.dtype)), cross_entropy
