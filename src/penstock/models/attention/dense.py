"""One call with a mask of all pairs: T² bytes and T² products, so for tests and small rows."""

import torch

from penstock.inputs import AttentionRule
from penstock.models.attention.backend import Attend, Backend, attend_heads


def _prepare(rule: AttentionRule, device: torch.device, dtype: torch.dtype) -> Attend:
    mask = torch.from_numpy(rule.dense_mask()).to(device)
    return lambda q, k, v: attend_heads(q, k, v, mask=mask)


DENSE = Backend(name="dense", refusal=lambda rule, device, dtype: None, prepare=_prepare)
