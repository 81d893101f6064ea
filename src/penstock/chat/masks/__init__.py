"""Which tokens are trained and how much, and the checks that hold it."""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
