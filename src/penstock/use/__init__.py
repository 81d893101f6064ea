"""What users call: runs from Python, run files, the command line, inspection and serving."""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
