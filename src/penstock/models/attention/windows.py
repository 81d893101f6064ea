"""Sliding windows: a token sees at most `window` tokens of its document, including itself.

`per_document` takes blocks of queries as long as the window, each over at most two windows of keys:
O(T × window). `varlen` and `flex` skip what the window hides. In prefix trees distances are those
of positions, not of slots, which only `flex` and `dense` support.

Source: Mistral 7B, arXiv:2310.06825; the count is that of transformers (`key > query - window`).
"""

import torch

from penstock.models.attention.row_attention import RowAttention
from penstock.plan.inputs import AttentionRule


def attention_of(
    rule: AttentionRule,
    window: int | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backend: str = "auto",
    softcap: float | None = None,
) -> RowAttention:
    """`RowAttention.of` with its window in second place.

    Raises:
        ConfigError: As there.
    """
    return RowAttention.of(
        rule, device=device, dtype=dtype, backend=backend, window=window, softcap=softcap
    )
