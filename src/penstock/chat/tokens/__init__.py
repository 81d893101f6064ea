"""Rendered text becomes token ids, and each token knows its characters."""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
