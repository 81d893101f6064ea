"""The report of the isolation check, and the words of its errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

CURE = (
    "Train it with one document per row, Loader(packing='none'), or take another attention "
    "implementation or model; docs/reference/isolation.md lists those that were measured"
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationReport:
    """What `check_isolation` found about a model that passed."""

    model: str
    """Class, model type and attention implementation."""
    difference: float
    """Largest difference between logits in the row and alone, in standard deviations of the
    logits.
    """
    tolerance: float
    """Largest difference that would have passed."""
    dependence_checked: bool
    """Whether gradients were tested too; False if a kernel has no backward pass on this device."""


def names(found: Sequence[str], most: int = 4) -> str:
    """The first `most` names, and how many there are in all."""
    shown = ", ".join(found[:most])
    return shown if len(found) <= most else f"{shown}, … ({len(found)} in all)"


def describe(model: object) -> str:
    """Class, model type and attention implementation."""
    model = getattr(model, "inner", model)
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    attention = getattr(config, "_attn_implementation", None)
    return type(model).__name__ + (f" ({kind}, attention {attention!r})" if kind else "")
