"""What a backend of attention is: a name, what it cannot do, and how it is made ready for a row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.inputs import AttentionRule

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [T, heads, dim], k [T, kv_heads, dim], v [T, kv_heads, dim]) → [T, heads, dim]."""

HALF = (torch.float16, torch.bfloat16)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One way to compute attention over a row."""

    name: str
    """What it is asked for by."""
    refusal: Callable[[AttentionRule, torch.device, torch.dtype], str | None]
    """What it cannot do for such a row, as the end of a sentence that begins with its name; None if it can."""
    prepare: Callable[[AttentionRule, torch.device, torch.dtype], Attend]
    """Do once what all layers need: masks, lengths."""


def attend_heads(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Scaled dot-product attention of [tokens, heads, dim], with as many key heads as there are or fewer.

    `mask` [queries, keys] is added to the scores, or says who sees whom; torch turns the latter into the former and
    keeps that for the backward pass, in each layer anew.
    `causal` is aligned top-left by torch, so it is right for as many keys as queries only.
    """
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)
