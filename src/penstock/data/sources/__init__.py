"""One reader per raw format: files on disk become blocks of checked texts, each with its place in
its file.

`open_sources` cuts any input into parts; a part yields `RecordBlock`s. A bad record never
disappears: it is in the block's `rejects`, with file, line and reason. A file that cannot be read
to its end stops the work with a `DamagedFileError`, unless the caller counts what is lost and
continues.
"""

from penstock.core.lazy_imports import public_names
from penstock.data.sources.objects import ObjectBlock
from penstock.data.sources.opening import Part, open_records, open_sources, read_texts
from penstock.data.sources.records import Damage, Fields, OnDamage, RecordBlock, Reject, Weights

__all__ = [
    "Damage",
    "Fields",
    "ObjectBlock",
    "OnDamage",
    "Part",
    "RecordBlock",
    "Reject",
    "Weights",
    "open_records",
    "open_sources",
    "read_texts",
]

__dir__ = public_names(__name__)
