"""Attention sinks, as in gpt-oss: a learned number for each head, in the softmax without a value.

With a sink s and the log-sum-exp l of a query's scores, the sum of the softmax is exp(l) + exp(s).
So attention with sinks is attention without, made smaller: l' = logaddexp(l, s), and out' = out ×
exp(l − l'). Backward passes of FlashAttention take the softmax from the log-sum-exp, and the sum
over keys that each score's gradient needs from gradient · out. Given (out', l') they return the
exact gradients of q, k and v; that of the sink is −Σ (gradient · out') exp(s − l') over queries.

Source: gpt-oss, arXiv:2508.10925; the derivation is from FlashAttention-2, arXiv:2307.08691,
section 3.
"""

import torch
from torch import Tensor


def add_sinks(out: Tensor, sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with sinks, from attention without.

    Args:
        out: [..., tokens, heads, dim].
        sums: [..., heads, tokens], the log-sum-exps of the scores.
        sinks: [heads].

    Returns:
        Outputs in the dtype of `out`, and the new log-sum-exps.
    """
    joined = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
    share = (sums - joined).exp().transpose(-1, -2)[..., None]
    return (out * share).to(out.dtype), joined


def sink_gradients(gradient: Tensor, out: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """[heads], from the gradient of the outputs with sinks.

    Args:
        gradient: [tokens, heads, dim], of the outputs.
        out: [tokens, heads, dim], with sinks.
        sums: [heads, tokens], with sinks.
        sinks: [heads].
    """
    each = (gradient.to(sums.dtype) * out.to(sums.dtype)).sum(-1).T
    found: Tensor = -(each * (sinks.to(sums.dtype)[:, None] - sums).exp()).sum(1)
    return found.to(sinks.dtype)
