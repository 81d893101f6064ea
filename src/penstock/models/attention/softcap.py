"""Attention written out: with scores kept within ± a number, by softcap × tanh(score / softcap), as
in Gemma 2; or with sinks where no kernel gives the sums that these need.

On the CPU, documents take `capped_kernel`, which has the place of torch's kernel in
`attend_documents`: blocks of queries, of which nothing but outputs and log-sum-exps is kept, so
memory is O(row). On CUDA FlexAttention does it. `capped_attention` makes all scores, and keeps
them for the backward pass: for small rows, slices of rows and caches.

Sources: Gemma 2, arXiv:2408.00118, section 2; blocks as in FlashAttention, arXiv:2205.14135.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

QUERIES = 128
"""Of a block of `capped_kernel`."""


def capped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of heads.

    Args:
        q: [..., heads, queries, dim].
        k: [..., kv_heads, keys, dim], kv_heads a divisor of heads.
        v: As `k`.
        mask: bool, broadcast to [..., heads, queries, keys]: which keys are seen, at least one;
            None: all.
        softcap: The largest score; None: there is none.
        sinks: [heads]; None: there are none.

    Returns:
        [..., heads, queries, dim].
    """
    # Half precision would round away what is left of scores near the limit.
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _products(q, k.transpose(-1, -2)).to(wide) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        shares = scores.softmax(-1)
    else:
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return _products(shares.to(q.dtype), v)


def _products(x: Tensor, by_key_head: Tensor) -> Tensor:
    """[..., heads, n, a] × [..., kv_heads, a, b] → [..., heads, n, b], without a copy of the second
    for each head of a group.
    """
    heads, n, kv_heads = x.shape[-3], x.shape[-2], by_key_head.shape[-3]
    grouped = x.unflatten(-3, (kv_heads, heads // kv_heads)).flatten(-3, -2)
    out: Tensor = (grouped @ by_key_head).unflatten(-2, (heads // kv_heads, n)).flatten(-4, -3)
    return out


def capped_kernel(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, softcap: float
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps, without gradients, in blocks of queries.

    Args:
        q: [1, heads, queries, dim].
        k: [1, kv_heads, keys, dim].
        v: As `k`.
        causal: Whether a query sees keys up to its own place.
        mask: [queries, keys], added to the scores; None: nothing is.
        softcap: The largest score.

    Returns:
        [1, heads, queries, dim], and [1, heads, queries] in float32 or wider.
    """
    outputs, sums = [], []
    for _, last, scores, _ in _blocks(q, k, causal, mask, softcap):
        sum_ = scores.logsumexp(-1)
        shares = (scores - sum_[..., None]).exp()
        outputs.append(_by_group(shares.to(v.dtype), v[0, :, :last]))
        sums.append(sum_.flatten(0, 1))
    return torch.cat(outputs, 1)[None], torch.cat(sums, 1)[None]


def capped_kernel_backward(
    given: Sequence[Tensor], causal: bool, mask: Tensor | None, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v.

    Args:
        given: The gradient of the outputs, q, k and v, and both that `capped_kernel` returned.
        causal: As there.
        mask: As there.
        softcap: As there.
    """
    gradient, q, k, v, out, sums = given
    wide, kv_heads = sums.dtype, k.shape[1]
    grouped = (kv_heads, -1)
    scale = q.shape[-1] ** -0.5
    of_q = torch.empty(q.shape, dtype=wide, device=q.device)
    of_k, of_v = (torch.zeros(x.shape, dtype=wide, device=q.device) for x in (k, v))
    keys, values = k[0].to(wide), v[0].to(wide)
    expected = (gradient.to(wide) * out.to(wide)).sum(-1)[0]
    for begin, last, scores, slopes in _blocks(q, k, causal, mask, softcap):
        block = slice(begin, begin + scores.shape[2])
        shares = (scores - sums[0, :, block].unflatten(0, grouped)[..., None]).exp()
        wanted = gradient[0, :, block].to(wide).unflatten(0, grouped)
        of_v[0, :, :last] += (shares.transpose(-1, -2) @ wanted).sum(1)
        of_shares = wanted @ values[:, None, :last].transpose(-1, -2)
        less = expected[:, block].unflatten(0, grouped)[..., None]
        of_scores = shares * (of_shares - less) * slopes * scale
        of_q[0, :, block] = (of_scores @ keys[:, None, :last]).flatten(0, 1)
        queries = q[0, :, block].to(wide).unflatten(0, grouped)
        of_k[0, :, :last] += (of_scores.transpose(-1, -2) @ queries).sum(1)
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


def _blocks(
    q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, softcap: float
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """First query, end of keys, scores [kv_heads, group, queries, keys], and their derivatives by
    uncapped scores, of each block of queries.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q[0].unflatten(0, (k.shape[1], -1))
    for begin in range(0, q.shape[2], QUERIES):
        queries = grouped[:, :, begin : begin + QUERIES]
        last = begin + queries.shape[2] if causal else k.shape[2]
        raw = (queries @ k[0, :, None, :last].transpose(-1, -2)).to(wide) * q.shape[-1] ** -0.5
        capped = (raw / softcap).tanh()
        scores = softcap * capped
        if mask is not None:
            scores = scores + mask[begin : begin + QUERIES, :last].to(wide)
        elif causal:
            later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(begin + 1)
            scores = scores.masked_fill(later, -torch.inf)
        yield begin, last, scores, 1 - capped.square()


def _by_group(shares: Tensor, values: Tensor) -> Tensor:
    """[kv_heads, group, queries, keys] of values [kv_heads, keys, dim] → [heads, queries, dim]."""
    return (shares @ values[:, None]).flatten(0, 1)
