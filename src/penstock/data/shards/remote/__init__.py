"""Datasets in object stores: their tables, lengths and documents come to this machine as they are
needed.
"""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
