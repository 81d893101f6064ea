"""State-space scans over the documents of a row, in chunks: Mamba-2's, and one for each number (Mamba-1, RG-LRU).

Mamba-2 (Dao and Gu, 2024, "Transformers are SSMs", arXiv 2405.21060): S_t = exp(Δ_t A) S_{t-1} + Δ_t x_t B_tᵀ, and
y_t = S_t C_t, with one decay a head. Within a chunk it is attention with decays.
"""

import torch
from torch import Tensor

from penstock.models.recurrent.borders import MATRIX_COST, Borders, wide


def state_space_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, borders: Borders, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs of Mamba-2's scan for each document alone, and its state at the end.

    Args:
        x: [T, heads, p].
        dt: [T, heads], step sizes, at least 0.
        a: [heads], below 0.
        b: [T, groups, n]; each group serves heads / groups adjacent heads.
        c: [T, groups, n].
        borders: The documents of the row.
        state: [documents, heads, p, n], states before the documents; None: zeros.

    Returns:
        [T, heads, p], and [documents, heads, p, n].
    """
    heads, p = x.shape[1:]
    groups, n = b.shape[1:]
    each, kind = heads // groups, x.dtype
    chunks = borders.chunks(lambda length: heads * (length * (length * (p + 8) + 3 * p * n) + MATRIX_COST))
    length = chunks.length
    steps = chunks.cut(x * dt[..., None]).transpose(1, 2)
    b, c = (chunks.cut(value).transpose(1, 2) for value in (b, c))
    total = wide(chunks.cut(dt * a).transpose(1, 2)).cumsum(2)
    lower = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    decays = (total[..., :, None] - total[..., None, :]).to(kind).masked_fill(~lower, float("-inf")).exp()
    scores = (c @ b.transpose(-1, -2))[:, :, None] * decays.unflatten(1, (groups, each))
    left = (total[..., -1:] - total).to(kind).exp()[..., None]
    # Heads of a group share keys, so their values stand side by side: one product for all.
    beside = (steps * left).unflatten(1, (groups, each)).transpose(2, 3).flatten(3)
    added = (beside.transpose(-1, -2) @ b).view(-1, heads, p, n)
    decay = total[..., -1].to(kind).exp()[..., None, None]

    def step(state: Tensor, added: Tensor, decay: Tensor) -> Tensor:
        return torch.addcmul(added, state, decay)

    before, after = chunks.scan(step, (added, decay), state, x.new_zeros(heads, p, n))
    carried = c @ before.view(-1, groups, each * p, n).transpose(-1, -2)
    carried = carried.unflatten(3, (each, p)).transpose(2, 3).flatten(1, 2) * total.to(kind).exp()[..., None]
    return chunks.join((scores.flatten(1, 2) @ steps + carried).transpose(1, 2)), after


def selective_scan(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, borders: Borders, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs of Mamba-1's scan for each document alone, and its state at the end.

    Args:
        u: [T, channels].
        dt: [T, channels], step sizes, at least 0.
        a: [channels, n], below 0.
        b: [T, n].
        c: [T, n].
        borders: The documents of the row.
        state: [documents, channels, n], states before the documents; None: zeros.

    Returns:
        [T, channels], and [documents, channels, n].
    """
    h, after = linear_scan((dt[..., None] * a).exp(), (dt * u)[..., None] * b[:, None], borders, state)
    return (h @ c[..., None])[..., 0], after


def linear_scan(a: Tensor, b: Tensor, borders: Borders, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h_t = a_t h_{t-1} + b_t for each number, within each document.

    Args:
        a: [T, …], decays.
        b: [T, …], what is added.
        borders: The documents of the row.
        state: [documents, …], h before the documents; None: zeros.

    Returns:
        [T, …] all h, and [documents, …] the last ones.
    """
    numbers = max(a.shape[1:].numel(), 1)
    chunks = borders.chunks(lambda length: 40 * length * numbers)
    # Padding keeps the state.
    a, b = chunks.cut(a, padding=1.0), chunks.cut(b)
    # Unbound once: the gradient of each single slice would be as large as all of them.
    each_a, each_b = a.unbind(1), b.unbind(1)
    decays, values = [each_a[0]], [each_b[0]]
    for place in range(1, chunks.length):
        decays.append(each_a[place] * decays[-1])
        values.append(torch.addcmul(each_b[place], each_a[place], values[-1]))

    def step(state: Tensor, added: Tensor, decay: Tensor) -> Tensor:
        return torch.addcmul(added, state, decay)

    before, after = chunks.scan(step, (values[-1], decays[-1]), state, b.new_zeros(b.shape[2:]))
    return chunks.join(torch.addcmul(torch.stack(values, 1), torch.stack(decays, 1), before[:, None])), after
