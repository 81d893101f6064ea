"""Corpora of other programs, read where they lie: Megatron and bare tokens."""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
