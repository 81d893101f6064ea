"""Models of transformers behind the interface of our own, on the same packed rows."""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
