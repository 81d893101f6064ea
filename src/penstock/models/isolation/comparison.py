"""Comparison of logits: how far they may differ by rounding, and weights that are not finite."""

from collections.abc import Iterable

import torch
from torch import Tensor

_TOLERANCES = {"float64": 1e-6, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}
"""Largest difference of logits that counts as rounding, in standard deviations of the logits."""


def tolerance(dtype: torch.dtype) -> float:
    """Largest difference that counts as rounding in a torch dtype, in standard deviations."""
    return _TOLERANCES.get(str(dtype).removeprefix("torch."), 1e-3)


def largest_difference(left: Tensor, right: Tensor) -> float:
    """Largest absolute difference of two tensors.

    Infinities of the same sign are equal; the result is NaN or infinite if only one of the two is.
    """
    return float((left - right).float().where(left != right, 0.0).abs().max())


def spread(logits: Tensor) -> float:
    """Standard deviation of the finite logits, above 0: a head may exclude ids with −inf."""
    return max(float(logits[logits.isfinite()].float().std()), 1e-30)


def not_finite(weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the weights that hold NaN or infinity; one pass over them, without a copy."""
    found = []
    for name, weight in weights:
        if weight.is_floating_point() and weight.numel():
            ends = torch.stack(torch.aminmax(weight.detach()))
            if not bool(ends.isfinite().all()):
                found.append(name)
    return found
