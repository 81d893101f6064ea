"""Writes shards and finishes datasets; reuses shards that are finished."""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
