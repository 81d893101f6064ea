"""From raw files to datasets: readers of raw formats, shards of documents, and the preparation that
makes them.
"""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
