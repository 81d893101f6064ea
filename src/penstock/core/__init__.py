"""Tools for every room: errors, paths and locks, arrays, compilation of kernels, random keys,
terminals.
"""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
