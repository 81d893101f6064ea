"""Random rules and tensors for the tests of attention."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from penstock.models.attention import RowAttention
from penstock.plan.inputs import AttentionRule

DOCUMENTS = st.lists(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    min_size=1,
    max_size=5,
)
"""(tokens, tokens of the prefix) of each document; padding is one without a prefix."""

THREE = [(7, 3), (1, 1), (6, 6), (5, 0), (4, 0)]
"""Part of a document, a single token, a whole document, a causal one, and padding."""


def make_rule(documents: list[tuple[int, int]]) -> AttentionRule:
    lengths, prefixes = np.array(documents).T
    ends = lengths.cumsum()
    return AttentionRule(np.stack([ends - lengths, ends - lengths + prefixes, ends], axis=1))


def attention_of(rule: AttentionRule, window: int | None, **given: Any) -> RowAttention:
    """`RowAttention.of` with its window in second place."""
    return RowAttention.of(rule, window=window, **given)


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


@st.composite
def forests(draw: st.DrawFn, prefixes: bool = False) -> AttentionRule:
    """A row of documents, each of which may be a prefix tree, up to four nodes deep; `prefixes`: of
    nodes whose first slots may see each other.
    """
    pieces: list[list[int]] = []
    reach: list[int] = []

    def node(begin: int, depth: int) -> int:
        end = begin + draw(st.integers(1, 6))
        number = len(pieces)
        prefix = draw(st.integers(0, end - begin)) if prefixes else 0
        pieces.append([begin, begin + prefix, end])
        reach.append(end)
        for _ in range(draw(st.sampled_from([0, 0, 2, 3])) if depth < 4 else 0):
            end = node(end, depth + 1)
        reach[number] = end
        return end

    end = 0
    for _ in range(draw(st.integers(1, 3))):
        end = node(end, 1)
    return AttentionRule(np.array(pieces), np.array(reach))


def paths_of(rule: AttentionRule) -> list[list[int]]:
    """The slots of each path from a root to a node, by definition: each node's own and those of its
    ancestors.
    """
    found = []
    for begin, _, end in rule.pieces.tolist():
        above = [
            slot
            for (first, _, last), ends in zip(rule.pieces.tolist(), rule.ends.tolist(), strict=True)
            if first < begin < ends
            for slot in range(first, last)
        ]
        found.append([*above, *range(begin, end)])
    return found
