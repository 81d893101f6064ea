"""Attention of the end of a document to all of it: keys and values of what lies before come apart.

On the CPU the past is looked at in full and the own tokens causally, by two calls of torch's kernel, and the outputs
are joined by the logarithms of their sums of exponentials. Each half's backward pass is the kernel's own, given the
joined output and sums, so no mask is ever made: memory is O(tokens). Elsewhere it is one call, aligned bottom-right.

Source: the joining is that of Ring Attention, arXiv:2310.01889.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_past(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
    """Attend to the past and, causally, to oneself.

    Args:
        q: [n, heads, dim].
        k: [n, kv_heads, dim], kv_heads a divisor of heads; so is v.
        v: As k.
        past_k: [p, kv_heads, dim]: of the p tokens before, p ≥ 1.
        past_v: As past_k.

    Returns:
        [n, heads, dim].
    """
    parts = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v, past_k, past_v)]
    if q.device.type == "cpu":
        out: Tensor = _Joined.apply(*parts)
    else:
        out = attend_aligned(*parts)
    return out.squeeze(0).transpose(0, 1)


def attend_aligned(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
    """The same in one call; [1, heads, tokens, dim] each. On the CPU it makes a mask."""
    # It imports the whole of torch's compiler, seconds that every start would pay.
    from torch.nn.attention.bias import causal_lower_right

    keys, values = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
    aligned = causal_lower_right(q.shape[2], keys.shape[2])
    return scaled_dot_product_attention(q, keys, values, attn_mask=aligned, enable_gqa=q.shape[1] != k.shape[1])


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
        q, k, v, past_k, past_v = (x.contiguous() for x in (q, k, v, past_k, past_v))
        before, before_sums = _flash(q, past_k, past_v, 0.0, False)
        own, own_sums = _flash(q, k, v, 0.0, True)
        sums = torch.logaddexp(before_sums, own_sums)
        shares = ((part - sums).exp()[..., None] for part in (before_sums, own_sums))
        out = sum((part * share).to(q.dtype) for part, share in zip((before, own), shares, strict=True))
        assert isinstance(out, Tensor)
        ctx.save_for_backward(q, k, v, past_k, past_v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, past_k, past_v, out, sums = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_before, of_past_k, of_past_v = _flash_backward(gradient, q, past_k, past_v, out, sums, 0.0, False)
        of_own, of_k, of_v = _flash_backward(gradient, q, k, v, out, sums, 0.0, True)
        return of_before + of_own, of_k, of_v, of_past_k, of_past_v
