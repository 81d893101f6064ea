"""The gated delta rule over the documents of a row, in chunks: Gated DeltaNet (a decay a head), KDA
(one a channel).

S_t = exp(g_t) S_{t-1} + β_t k_t (v_t − k_tᵀ exp(g_t) S_{t-1})ᵀ, and o_t = S_tᵀ q_t / √d. Within a
chunk, the corrections of all slots solve a triangular system (the WY form: Yang et al., 2024,
"Parallelizing Linear Transformers with the Delta Rule", arXiv 2406.06484; gates: Yang et al., 2025,
"Gated Delta Networks", arXiv 2412.06464; a decay per channel: Kimi Team, 2025, "Kimi Linear", arXiv
2510.26692).
"""

import torch
from torch import Tensor

from penstock.models.recurrent.borders import MATRIX_COST, Borders, wide

SUB_CHUNK = 8
"""Slots whose decays per channel are compared directly; further ones go through a reference between
them.
"""


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    borders: Borders,
    state: Tensor | None = None,
    *,
    keep: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Outputs of each document alone, and its state at the end.

    Args:
        q: [T, heads, d_k], not scaled yet.
        k: [T, heads, d_k]; its length should be at most 1.
        v: [T, heads, d_v].
        log_decay: [T, heads], or [T, heads, d_k] for a decay per channel; at most 0.
        beta: [T, heads], how much of a value is written, 0 to 1 (up to 2 with negative
            eigenvalues).
        borders: The documents of the row.
        state: [documents, heads, d_k, d_v], states before the documents; None: zeros.
        keep: Whether the states at the end are wanted.

    Returns:
        [T, heads, d_v], and [documents, heads, d_k, d_v], or None if they are not wanted.
    """
    heads, width = q.shape[1:]
    kind, widest = q.dtype, max(width, v.shape[2])
    # Without states, chunks that begin documents read none, and need none made for them.
    later = 1.5 if state is None and not keep else 1.0
    chunks = borders.chunks(
        lambda length: heads * (4 * widest * length * (length + widest) + MATRIX_COST), later=later
    )
    q, k, v, log_decay = (chunks.cut(x).transpose(1, 2) for x in (q * width**-0.5, k, v, log_decay))
    share = chunks.cut(beta).transpose(1, 2)[..., None]
    total = wide(log_decay).cumsum(2)
    scores = (
        _head_scores(torch.cat([k * share, q], 2), k, total)
        if log_decay.ndim == 3
        else _channel_scores((k * share, q), k, total)
    )
    system, weights = scores
    fresh = chunks.fresh(state)
    # (I + A)⁻¹ of values, and of decayed keys where a state is read: a unit triangle, whose
    # diagonal is not read.
    written = _solved(system, v * share)
    if not keep and fresh == len(q):
        return chunks.join((weights @ written).transpose(1, 2)), None
    total = total[..., None] if log_decay.ndim == 3 else total
    reached, left = total.to(kind).exp(), (total[:, :, -1:] - total).to(kind).exp()
    decay = total[:, :, -1].to(kind).exp()[..., None]
    read = _solved(system[fresh:], (k * share * reached)[fresh:])
    kept = (k * left).transpose(-1, -2)

    def step(
        state: Tensor | None, written: Tensor, kept: Tensor, decay: Tensor, read: Tensor | None
    ) -> Tensor:
        return (
            kept @ written
            if state is None or read is None
            else state * decay + kept @ (written - read @ state)
        )

    zero = q.new_zeros(heads, width, v.shape[-1])
    before, after = chunks.scan(step, (written, kept, decay), (read,), state, zero, keep=keep)
    known = weights[:fresh] @ written[:fresh]
    carried = (q * reached)[fresh:] @ before + weights[fresh:] @ (written[fresh:] - read @ before)
    return chunks.join(torch.cat([known, carried]).transpose(1, 2)), after


def _solved(system: Tensor, values: Tensor) -> Tensor:
    found: Tensor = torch.linalg.solve_triangular(system, values, upper=False, unitriangular=True)
    return found


def _head_scores(a: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """a_i·k_j × decay from j to i for j ≤ i, else 0: for the two halves of `a`."""
    length = k.shape[2]
    between = (total[..., :, None] - total[..., None, :]).to(k.dtype)
    decays = between.masked_fill(~_lower(length, k.device), float("-inf")).exp()
    first, second = (a @ k.transpose(-1, -2)).split(length, 2)
    return first * decays, second * decays


def _channel_scores(two: tuple[Tensor, Tensor], k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """As `_head_scores`, with a decay per channel: Σ_d a_i[d] k_j[d] exp(total_i[d] − total_j[d]).

    exp(−total_j) alone would overflow, so far slots go through a reference between them: no
    exponent is above 0.
    """
    length, found = k.shape[2], ([], [])  # type: tuple[int, tuple[list[Tensor], list[Tensor]]]
    for begin in range(0, length, SUB_CHUNK):
        here = slice(begin, min(begin + SUB_CHUNK, length))
        places, size = total[:, :, here], min(SUB_CHUNK, length - begin)
        near = (places.unsqueeze(3) - places.unsqueeze(2)).to(k.dtype)
        near = near.masked_fill(~_lower(size, k.device)[..., None], float("-inf")).exp() * k[
            :, :, here
        ].unsqueeze(2)
        if begin:
            middle = total[:, :, begin - 1 : begin]
            to_here = (places - middle).to(k.dtype).exp()
            from_far = (
                k[:, :, :begin] * (middle - total[:, :, :begin]).to(k.dtype).exp()
            ).transpose(-1, -2)
        for a, rows in zip(two, found, strict=True):
            own = (near @ a[:, :, here].unsqueeze(-1))[..., 0]
            parts = [(a[:, :, here] * to_here) @ from_far, own] if begin else [own]
            rest = length - here.stop
            rows.append(
                torch.cat([*parts, own.new_zeros(*own.shape[:3], rest)] if rest else parts, -1)
            )
    return torch.cat(found[0], -2), torch.cat(found[1], -2)


def _lower(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()
