"""A slow kernel for torch's variable-length FlashAttention, so that its callers run on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.models.attention import row_attention
from penstock.models.attention.backends import VARLEN, never


def _documents(bounds: tuple[Tensor, Tensor], window: list[int]) -> Iterator[Any]:
    """Queries and keys of each document, and bool [queries, keys]: what is seen."""
    for (a, b), (c, d) in zip(*(x.unfold(0, 2, 1).tolist() for x in bounds), strict=True):
        queries, keys = torch.arange(b - a)[:, None] + (d - c) - (b - a), torch.arange(d - c)
        seen = keys <= queries + window[1]
        if window[0] >= 0:
            seen &= keys >= queries - window[0]
        yield slice(a, b), slice(c, d), seen


def _scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """[heads, queries, keys] in float64; −∞: not seen."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * q.shape[-1] ** -0.5
    return scores.masked_fill(~seen, -torch.inf)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False, scale: float | None = None, window_size: Any = None,
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert enable_gqa == (q.shape[1] != k.shape[-2])
    if block_table is None:
        assert max_q == int(cu_q.diff().max())
    else:
        # Pages are put into a row, sequence by sequence.
        assert seqused_k is not None
        assert block_table.dtype == seqused_k.dtype == torch.int32
        assert max_q >= int(cu_q.diff().max())
        assert max_k >= int(seqused_k.max())
        assert cu_k.diff().equal(seqused_k)
        k, v = (
            torch.cat([
                x[table].flatten(0, 1)[:count]
                for table, count in zip(block_table, seqused_k.tolist(), strict=True)
            ])
            for x in (k, v)
        )  # fmt: skip
    out, sums = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for queries, keys, seen in _documents((cu_q, cu_k), window_size):
        scores = _scores(q[queries], k[keys], seen)
        sums[:, queries] = scores.logsumexp(-1).float()
        values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1).double()
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out, sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, cu_q: Tensor,
    cu_k: Tensor, max_q: int, max_k: int, is_causal: bool, state: Tensor,
    scale: float | None = None, window_size: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As FlashAttention: from the outputs and log-sum-exps that it is given."""
    groups = q.shape[1] // k.shape[1]
    found = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)]
    gradient = gradient.double()
    expected = (gradient * out.double()).sum(-1)
    for queries, keys, seen in _documents((cu_q, cu_k), window_size):
        scores = _scores(q[queries], k[keys], seen)
        shares = (scores - sums[:, queries, None]).exp()
        keys_, values = (x[keys].repeat_interleave(groups, 1).double() for x in (k, v))
        of_v = torch.einsum("hqk,qhd->khd", shares, gradient[queries])
        of_shares = torch.einsum("qhd,khd->hqk", gradient[queries], values)
        of_scores = shares * (of_shares - expected[queries].T[..., None]) * q.shape[-1] ** -0.5
        found[0][queries] = torch.einsum("hqk,khd->qhd", of_scores, keys_)
        of_k = torch.einsum("hqk,qhd->khd", of_scores, q[queries].double())
        for total, more in ((found[1], of_k), (found[2], of_v)):
            total[keys] += more.unflatten(1, (-1, groups)).sum(2)
    return tuple(x.to(like.dtype) for x, like in zip(found, (q, k, v), strict=True))


@contextmanager
def varlen_on_the_cpu(monkeypatch: Any) -> Iterator[None]:
    """Within the block, `varlen` runs on the CPU in any dtype."""
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)
    with monkeypatch.context() as patch:
        patch.setitem(row_attention.BACKENDS, "varlen", replace(VARLEN, refusal=never))
        yield
