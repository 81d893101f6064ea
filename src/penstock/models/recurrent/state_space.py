"""State-space scans over the documents of a row, in chunks: Mamba-2's, and one for each number
(Mamba-1, RG-LRU).

Mamba-2 (Dao and Gu, 2024, "Transformers are SSMs", arXiv 2405.21060): S_t = exp(Δ_t A) S_{t-1} +
Δ_t x_t B_tᵀ, and y_t = S_t C_t, with one decay a head. Within a chunk it is attention with decays.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.models.recurrent.borders import MATRIX_COST, Borders, wide

LINEAR_LENGTHS = (8, 16, 32, 64, 128, 256)
"""Lengths of chunks in `linear_scan`, whose work grows with the length, not with its square."""


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    borders: Borders,
    state: Tensor | None = None,
    *,
    keep: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Outputs of Mamba-2's scan for each document alone, and its state at the end.

    Args:
        x: [T, heads, p].
        dt: [T, heads], step sizes, at least 0.
        a: [heads], below 0.
        b: [T, groups, n]; each group serves heads / groups adjacent heads.
        c: [T, groups, n].
        borders: The documents of the row.
        state: [documents, heads, p, n], states before the documents; None: zeros.
        keep: Whether the states at the end are wanted.

    Returns:
        [T, heads, p], and [documents, heads, p, n], or None if they are not wanted.
    """
    heads, p = x.shape[1:]
    groups, n = b.shape[1:]
    each, kind = heads // groups, x.dtype
    later = 1.5 if state is None and not keep else 1.0
    chunks = borders.chunks(
        lambda length: heads * (length * (length * (p + 8) + 3 * p * n) + MATRIX_COST), later=later
    )
    length = chunks.length
    steps = chunks.cut(x * dt[..., None]).transpose(1, 2)
    b, c = (chunks.cut(value).transpose(1, 2) for value in (b, c))
    total = wide(chunks.cut(dt * a).transpose(1, 2)).cumsum(2)
    lower = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    decays = (
        (total[..., :, None] - total[..., None, :])
        .to(kind)
        .masked_fill(~lower, float("-inf"))
        .exp()
    )
    scores = (c @ b.transpose(-1, -2))[:, :, None] * decays.unflatten(1, (groups, each))
    known = scores.flatten(1, 2) @ steps
    fresh = chunks.fresh(state)
    if not keep and fresh == len(known):
        return chunks.join(known.transpose(1, 2)), None
    left = (total[..., -1:] - total).to(kind).exp()[..., None]
    # Heads of a group share keys, so their values stand side by side: one product for all.
    beside = (steps * left).unflatten(1, (groups, each)).transpose(2, 3).flatten(3)
    added = (beside.transpose(-1, -2) @ b).view(-1, heads, p, n)
    decay = total[..., -1].to(kind).exp()[..., None, None]
    before, after = chunks.scan(
        _step, (added,), (decay[fresh:],), state, x.new_zeros(heads, p, n), keep=keep
    )
    carried = c[fresh:] @ before.view(-1, groups, each * p, n).transpose(-1, -2)
    carried = (
        carried.unflatten(3, (each, p)).transpose(2, 3).flatten(1, 2)
        * total[fresh:].to(kind).exp()[..., None]
    )
    return chunks.join(torch.cat([known[:fresh], known[fresh:] + carried]).transpose(1, 2)), after


def _step(state: Tensor | None, added: Tensor, decay: Tensor | None) -> Tensor:
    return added if state is None or decay is None else torch.addcmul(added, state, decay)


def selective_scan(
    u: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    borders: Borders,
    state: Tensor | None = None,
    *,
    keep: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Outputs of Mamba-1's scan for each document alone, and its state at the end.

    Args:
        u: [T, channels].
        dt: [T, channels], step sizes, at least 0.
        a: [channels, n], below 0.
        b: [T, n].
        c: [T, n].
        borders: The documents of the row.
        state: [documents, channels, n], states before the documents; None: zeros.
        keep: Whether the states at the end are wanted.

    Returns:
        [T, channels], and [documents, channels, n], or None if they are not wanted.
    """
    h, after = linear_scan(
        (dt[..., None] * a).exp(), (dt * u)[..., None] * b[:, None], borders, state, keep=keep
    )
    return (h @ c[..., None])[..., 0], after


def linear_scan(
    a: Tensor, b: Tensor, borders: Borders, state: Tensor | None = None, *, keep: bool = True
) -> tuple[Tensor, Tensor | None]:
    """h_t = a_t h_{t-1} + b_t for each number, within each document.

    Args:
        a: [T, …], decays.
        b: [T, …], what is added.
        borders: The documents of the row.
        state: [documents, …], h before the documents; None: zeros.
        keep: Whether the last ones are wanted.

    Returns:
        [T, …] all h, and [documents, …] the last ones, or None if they are not wanted.
    """
    numbers = max(a.shape[1:].numel(), 1)
    # Without states, chunks that begin documents need half the work: no decays, nothing carried
    # into them.
    later = 2.0 if state is None and not keep else 1.0
    chunks = borders.chunks(lambda length: 40 * length * numbers, LINEAR_LENGTHS, later=later)
    # Padding keeps the state.
    a, b = chunks.cut(a, padding=1.0), chunks.cut(b)
    # Unbound once: the gradient of each single slice would be as large as all of them.
    fresh = chunks.fresh(state)
    known: Tensor = _Scan.apply(a, b, None)
    if not keep and fresh == len(a):
        return chunks.join(known), None
    # What is left of a state after each slot: the same scan, from 1 and with nothing added.
    nothing, one = (b.new_full((), value) for value in (0.0, 1.0))
    decays = _Scan.apply(a[fresh:], nothing.expand_as(a[fresh:]), one.expand_as(a[fresh:, 0]))
    zero = b.new_zeros(b.shape[2:])
    before, after = chunks.scan(_step, (known[:, -1],), (decays[:, -1],), state, zero, keep=keep)
    if fresh < len(a):
        carried = torch.addcmul(known[fresh:], decays, before[:, None])
        known = torch.cat([known[:fresh], carried]) if fresh else carried
    return chunks.join(known), after


class _Scan(torch.autograd.Function):
    """h_t = a_t h_{t-1} + b_t along dimension 1, from a state [N, …] or from zeros; in place,
    without copies.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, start: Tensor | None) -> Tensor:
        h = torch.empty_like(a)
        if start is None:
            h[:, 0] = b[:, 0]
        else:
            torch.addcmul(b[:, 0], a[:, 0], start, out=h[:, 0])
        for place in range(1, a.shape[1]):
            torch.addcmul(b[:, place], a[:, place], h[:, place - 1], out=h[:, place])
        ctx.save_for_backward(a, h, *([] if start is None else [start]))
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        a, h, *start = ctx.saved_tensors
        added = gradients[0].clone()
        for place in range(a.shape[1] - 1, 0, -1):
            added[:, place - 1].addcmul_(a[:, place], added[:, place])
        decays = torch.empty_like(a)
        torch.mul(added[:, 1:], h[:, :-1], out=decays[:, 1:])
        decays[:, 0] = added[:, 0] * start[0] if start else 0.0
        of_start = added[:, 0] * a[:, 0] if start and ctx.needs_input_grad[2] else None
        return decays, added if ctx.needs_input_grad[1] else None, of_start
