"""Turns sources into shards: in several processes, resumable at any moment, with every record
accounted for.
"""

from penstock.core.lazy_imports import public_names
from penstock.data.prepare.chat_settings import ChatSettings
from penstock.data.prepare.prepared import PreparedDataset
from penstock.data.prepare.settings import PrepareSettings

__all__ = [
    "ChatSettings",
    "PrepareSettings",
    "PreparedDataset",
]

__dir__ = public_names(__name__)
