"""FlexAttention: any mask, in blocks, those that nobody sees left out. For prefixes on CUDA.

On the CPU torch gives it no backward pass, and runs it unfused: good for looking at what a mask does, so it is served
there without gradients and refused with them.
"""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from penstock.errors import ConfigError
from penstock.inputs import AttentionRule
from penstock.models.attention.backend import Attend, Backend
from penstock.models.attention.flex_blocks import block_mask
from penstock.models.attention.flex_mask import flex_mask_mod


def _prepare(rule: AttentionRule, device: torch.device, dtype: torch.dtype) -> Attend:
    ids = torch.from_numpy(rule.document_ids).to(device)
    prefix = torch.from_numpy(rule.prefix).to(device) if rule.bidirectional else None
    blocks = block_mask(rule, flex_mask_mod(ids, prefix), device)
    call = _compiled() if device.type == "cuda" else _unfused

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if device.type == "cpu":
            if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
                raise ConfigError(
                    "attention backend 'flex' has no backward pass on the CPU, and gradients are asked for; "
                    "'per_document' and 'dense' have one; or call it under torch.no_grad()"
                )
            # FlexAttention looks at the tensors only, not at whether gradients are being recorded.
            q, k, v = q.detach(), k.detach(), v.detach()
        grouped = q.shape[1] != k.shape[1]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out: Tensor = call(q, k, v, block_mask=blocks, enable_gqa=grouped)
        return out.squeeze(0).transpose(0, 1)

    return attend


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


def _unfused(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Any:
    with warnings.catch_warnings():
        # That it runs unfused here is what this module says itself.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(q, k, v, **settings)


def _refusal(rule: AttentionRule, device: torch.device, dtype: torch.dtype) -> str | None:
    return (
        None if device.type in ("cuda", "cpu") else f"runs on cuda (and cpu, without gradients), not on {device.type}"
    )


FLEX = Backend(name="flex", refusal=_refusal, prepare=_prepare)
