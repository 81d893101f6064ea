"""What leads to documents: the table of where their bytes are, lengths, mappings, and the protocols
of datasets.
"""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
