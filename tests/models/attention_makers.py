"""Random rules and tensors for the tests of attention."""

import numpy as np
import torch
from hypothesis import strategies as st

from penstock.inputs import AttentionRule

DOCUMENTS = st.lists(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=5
)
"""(tokens, tokens of the prefix) of each document; padding is one without a prefix."""

THREE = [(7, 3), (1, 1), (6, 6), (5, 0), (4, 0)]
"""Part of a document, a single token, a whole document, a causal one, and padding."""


def make_rule(documents: list[tuple[int, int]]) -> AttentionRule:
    lengths, prefixes = np.array(documents).T
    ends = lengths.cumsum()
    return AttentionRule(np.stack([ends - lengths, ends - lengths + prefixes, ends], axis=1))


def random_heads(
    slots: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    *,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    gradients: bool = False,
) -> list[torch.Tensor]:
    """q, k, v [slots, heads, dim]."""
    generator = torch.Generator().manual_seed(slots)
    made = [
        torch.randn(slots, count, dim, generator=generator, dtype=torch.float64)
        for count in (heads, kv_heads, kv_heads)
    ]
    return [x.to(device, dtype).requires_grad_(gradients) for x in made]
