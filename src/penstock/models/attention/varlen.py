"""FlashAttention over documents of different lengths in one call: half precision on CUDA, causal attention only.

`varlen_attn` came with torch 2.10 and says causal in different words since: `is_causal` first, a window of nothing to
the right (−1, 0) later. Which one this torch has is looked up.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.inputs import AttentionRule
from penstock.models.attention.backend import HALF, Attend, Backend


def causal_settings(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword arguments by which this version of `varlen_attn` attends causally.

    Raises:
        ConfigError: It knows neither word for it.
    """
    known = inspect.signature(function).parameters
    if "window_size" in known:
        return {"window_size": (-1, 0)}
    if "is_causal" in known:
        return {"is_causal": True}
    raise ConfigError(
        f"varlen_attn of torch {torch.__version__} has neither window_size nor is_causal ({', '.join(known)}), so the "
        "attention backend 'varlen' cannot ask it for causal attention; take 'flex' or 'per_document'"
    )


def _find() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def _prepare(rule: AttentionRule, device: torch.device, dtype: torch.dtype) -> Attend:
    function = _find()
    assert function is not None, "refused before"
    settings = causal_settings(function)
    grouped_heads = "enable_gqa" in inspect.signature(function).parameters
    bounds = torch.from_numpy(rule.cu_seqlens).to(device)
    longest = int((rule.pieces[:, 2] - rule.pieces[:, 0]).max())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and not grouped_heads:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        grouping = {"enable_gqa": True} if groups > 1 and grouped_heads else {}
        out: Tensor = function(q, k, v, bounds, bounds, longest, longest, **settings, **grouping)
        return out

    return attend


def _refusal(rule: AttentionRule, device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda" or dtype not in HALF:
        return f"runs in float16 and bfloat16 on cuda only, not in {str(dtype).removeprefix('torch.')} on {device.type}"
    if rule.bidirectional:
        return "knows causal attention only, and this row has bidirectional prefixes"
    if _find() is None:
        return f"needs torch.nn.attention.varlen, which torch {torch.__version__} does not have (2.10 and later do)"
    return None


VARLEN = Backend(name="varlen", refusal=_refusal, prepare=_prepare)
