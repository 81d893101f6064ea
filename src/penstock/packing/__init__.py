"""Packing: which documents share a row."""

from penstock.core.lazy_imports import public_names
from penstock.packing._kernels import (
    clear_open_rows,
    place_best_fit,
    place_best_fit_decreasing,
    place_next_fit,
)
from penstock.packing.pack import PACKINGS, Packing, pack, scratch

__all__ = [
    "PACKINGS",
    "Packing",
    "clear_open_rows",
    "pack",
    "place_best_fit",
    "place_best_fit_decreasing",
    "place_next_fit",
    "scratch",
]

__dir__ = public_names(__name__)
