"""One reader per raw format: files on disk become blocks of checked texts, each with its place in its file.

`open_sources` cuts any input into parts; a part yields `RecordBlock`s. A bad record never disappears: it is in the
block's `rejects`, with file, line and reason. A file that cannot be read to its end stops the work with a
`DamagedFileError`, unless the caller counts what is lost and continues.
"""

from penstock.core.lazy_imports import public_names
from penstock.sources.compression import COMPRESSIONS
from penstock.sources.json_files import number_lines
from penstock.sources.objects import ObjectBlock, texts_of
from penstock.sources.opening import FORMATS, Part, open_records, open_sources, read_texts, stop_at_reject
from penstock.sources.records import Damage, Fields, OnDamage, RecordBlock, Reject, Weights, stop_at_damage

__all__ = [
    "COMPRESSIONS",
    "FORMATS",
    "Damage",
    "Fields",
    "ObjectBlock",
    "OnDamage",
    "Part",
    "RecordBlock",
    "Reject",
    "Weights",
    "number_lines",
    "open_records",
    "open_sources",
    "read_texts",
    "stop_at_damage",
    "stop_at_reject",
    "texts_of",
]

__dir__ = public_names(__name__)
