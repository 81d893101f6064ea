"""Sampling: in which order documents come, and from which source the next one is."""

from penstock.core.lazy_imports import public_names
from penstock.sampling._kernels import (
    ENTRY,
    SKIPPED,
    SMALL,
    TOO_LONG_DROP,
    TOO_LONG_ERROR,
    TOO_LONG_SPLIT,
    TOO_LONG_TRUNCATE,
    add_skipped,
    charge,
    clear_skipped,
    draw,
    pick,
)
from penstock.sampling.order import SHUFFLE_CODES, UNIT, Permutation, Shuffle, integer_shares

__all__ = [
    "ENTRY",
    "SHUFFLE_CODES",
    "SKIPPED",
    "SMALL",
    "TOO_LONG_DROP",
    "TOO_LONG_ERROR",
    "TOO_LONG_SPLIT",
    "TOO_LONG_TRUNCATE",
    "UNIT",
    "Permutation",
    "Shuffle",
    "add_skipped",
    "charge",
    "clear_skipped",
    "draw",
    "integer_shares",
    "pick",
]

__dir__ = public_names(__name__)
