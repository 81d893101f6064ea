"""Our own transformer over packed rows: its layers, and its import from and export to transformers'
layouts.
"""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
