"""The format of a shard on disk: its layout, manifest, kernels, trees, columns and records of
images.
"""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
