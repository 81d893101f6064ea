"""Packing: which documents share a row."""

from penstock.core.lazy_imports import public_names
from penstock.plan.packing.pack import PACKINGS, Packing, pack

__all__ = [
    "PACKINGS",
    "Packing",
    "pack",
]

__dir__ = public_names(__name__)
