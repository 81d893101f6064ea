"""Sampling: in which order documents come, and from which source the next one is."""

from penstock.core.lazy_imports import public_names
from penstock.plan.sampling.order import Permutation, Shuffle
from penstock.plan.sampling.shares import integer_shares

__all__ = [
    "Permutation",
    "Shuffle",
    "integer_shares",
]

__dir__ = public_names(__name__)
