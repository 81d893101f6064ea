"""Attention whose scores are kept within ± a number, by softcap × tanh(score / softcap), as in
Gemma 2.

No kernel that we call does this, so it is written out: scores of each document by itself,
O(document²) numbers. Kernels that can (`flex`, FlashAttention 2.6) are not used yet.

Source: Gemma 2, arXiv:2408.00118, section 2.
"""

import torch
from torch import Tensor

from penstock.models.attention.backends import Attend
from penstock.plan.inputs import AttentionRule

CAPABLE = ("per_document", "dense")
"""Backends that keep scores within a number."""


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, softcap: float
) -> Tensor:
    """Attention of heads.

    Args:
        q: [..., heads, queries, dim].
        k: [..., kv_heads, keys, dim], kv_heads a divisor of heads.
        v: As `k`.
        mask: bool, broadcast to [..., heads, queries, keys]: which keys are seen, at least one;
            None: all.
        softcap: The largest score.

    Returns:
        [..., heads, queries, dim].
    """
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    # Half precision would round away what is left of scores near the limit.
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[
        -1
    ] ** -0.5
    scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    out: Tensor = scores.softmax(-1).to(q.dtype) @ v
    return out


def prepare_capped(
    rule: AttentionRule, softcap: float, window: int | None, device: torch.device
) -> Attend:
    """Attention over a row, document by document, with prefixes, trees and windows."""
    masks = []
    for first, behind in _documents(rule):
        begin, reach = rule.pieces[first, 0], rule.ends[first:behind]
        own = AttentionRule(rule.pieces[first:behind] - begin, reach - begin)
        mask = torch.from_numpy(own.dense_mask()).to(device)
        if window is not None:
            # By positions, which differ from slots in a tree.
            positions = torch.from_numpy(own.positions).to(device)
            mask &= positions[:, None] - positions < window
        masks.append(mask)
    lengths = [len(mask) for mask in masks]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys, values = (x.transpose(0, 1).split(lengths, 1) for x in (q, k, v))
        parts = zip(queries, keys, values, masks, strict=True)
        return torch.cat([capped_attention(*part, softcap) for part in parts], 1).transpose(0, 1)

    return attend


def _documents(rule: AttentionRule) -> list[tuple[int, int]]:
    """The pieces of each document: its first, and the one behind its last; several are a tree."""
    found: list[tuple[int, int]] = []
    begins, ends = rule.pieces[:, 0].tolist(), rule.ends.tolist()
    first = 0
    for number in range(1, len(begins) + 1):
        if number == len(begins) or begins[number] >= ends[first]:
            found.append((first, number))
            first = number
    return found
