"""Models in torch: a readable transformer over packed rows, any model of transformers behind the same door, attention
that keeps documents apart and honours prefixes. Needs the extra `train`.

Settings can be read without torch; everything else is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

from penstock.late import import_late
from penstock.models.lora import LoraSettings
from penstock.models.settings import ModelSettings

if TYPE_CHECKING:
    from penstock.models.attention import REQUIREMENTS, RowAttention, attend, flex_mask_mod
    from penstock.models.building import build_model
    from penstock.models.cache import Cache
    from penstock.models.exporting import export
    from penstock.models.language_model import LanguageModel
    from penstock.models.lora import add_lora, merge_lora
    from penstock.models.micro_sequences import backward_in_parts
    from penstock.models.packing import PackedRows, PackingVerdict, most_packed, require_packed_rows
    from penstock.models.row_tensors import RowTensors
    from penstock.models.saving import load_model, save_model
    from penstock.models.transformer import Transformer

_LATE = {
    "REQUIREMENTS": "attention",
    "RowAttention": "attention",
    "attend": "attention",
    "flex_mask_mod": "attention",
    "add_lora": "lora",
    "backward_in_parts": "micro_sequences",
    "build_model": "building",
    "export": "exporting",
    "merge_lora": "lora",
    "most_packed": "packing",
    "PackedRows": "packing",
    "PackingVerdict": "packing",
    "require_packed_rows": "packing",
    "Cache": "cache",
    "LanguageModel": "language_model",
    "RowTensors": "row_tensors",
    "load_model": "saving",
    "save_model": "saving",
    "Transformer": "transformer",
}
"""Name → the module that is loaded when it is first used."""

__all__ = [
    "REQUIREMENTS",
    "Cache",
    "LanguageModel",
    "LoraSettings",
    "ModelSettings",
    "PackedRows",
    "PackingVerdict",
    "RowAttention",
    "RowTensors",
    "Transformer",
    "add_lora",
    "attend",
    "backward_in_parts",
    "build_model",
    "export",
    "flex_mask_mod",
    "load_model",
    "merge_lora",
    "most_packed",
    "require_packed_rows",
    "save_model",
]


def __getattr__(name: str) -> Any:
    return import_late(__name__, _LATE, name)
