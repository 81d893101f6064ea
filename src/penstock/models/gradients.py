"""Helpers for losses that take the gradient of a block of logits immediately, while it is still in
the cache.
"""

from collections.abc import Sequence
from typing import final

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


@final
class FoundGradients:
    """Gradients that a forward pass found, until the backward pass scales them.

    Args:
        hidden: Of the hidden states; None: they need none.
        weights: Of weights, each in the dtype of sums.
        dtypes: Those of the weights.
    """

    def __init__(
        self, hidden: Tensor | None, weights: Sequence[Tensor], dtypes: Sequence[torch.dtype]
    ) -> None:
        self._found: tuple[Tensor | None, Sequence[Tensor]] | None = hidden, weights
        self._dtypes = dtypes

    def times(self, incoming: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """Both, multiplied by the incoming gradient, a scalar: in place unless the graph is kept
        for another backward pass. A second copy of the head's gradient would often be the largest
        tensor of a step.

        Raises:
            RuntimeError: They were already used.
        """
        if self._found is None:
            raise RuntimeError(
                "the backward pass of this loss ran before, and its gradients are used up; give "
                "the first backward retain_graph=True"
            )
        hidden, weights = self._found
        if not _graph_is_kept():
            # Without another owner, autograd takes them as they are.
            self._found = None
            weights = [one.mul_(incoming) for one in weights]
            hidden = None if hidden is None else hidden.mul_(incoming)
        else:
            weights = [one * incoming for one in weights]
            hidden = None if hidden is None else hidden * incoming
        return hidden, [one.to(dtype) for one, dtype in zip(weights, self._dtypes, strict=True)]


def _graph_is_kept() -> bool:
    """True if the backward pass that runs may run again, or torch does not say."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())
