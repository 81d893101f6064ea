"""One reader per raw format: what the user has on disk becomes blocks of checked texts with their places.

`open_sources` cuts any input into parts; a part yields `RecordBlock`s. A bad record never disappears: it is in the
block's `rejects`, with file, line and reason. A file that cannot be read to its end is no bad record: it stops the work
with a `DamagedFileError`, unless the caller counts what is lost and goes on.
"""

from penstock.sources.compression import COMPRESSIONS
from penstock.sources.damage import Damage, OnDamage, stop_at_damage
from penstock.sources.jsonl import number_lines
from penstock.sources.objects import ObjectBlock, texts_of
from penstock.sources.opening import FORMATS, Part, open_records, open_sources, read_texts, stop_at_reject
from penstock.sources.records import Fields, RecordBlock, Reject, Weights

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
