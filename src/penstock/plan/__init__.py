"""From datasets to model inputs: which document comes next, how it is rewritten and packed, and the
loader.
"""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
