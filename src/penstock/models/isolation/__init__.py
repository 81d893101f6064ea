"""The check that a model keeps the documents of a row apart: see `check`."""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
