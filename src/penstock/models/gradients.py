"""Helpers for losses that take the gradient of a block of logits immediately, while it is still in
the cache.
"""

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums over blocks."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def leaves(result: Tensor) -> list[Tensor]:
    """The parameters that `result` was computed from, in the fixed order in which the graph names
    them.
    """
    found: dict[int, Tensor] = {}
    seen, waiting = set(), [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        waiting.extend(earlier for earlier, _ in node.next_functions)
    return list(found.values())
