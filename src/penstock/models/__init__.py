"""Models in torch: a readable transformer over packed rows, and any model of transformers with the same interface.

Their attention keeps documents apart and supports prefixes. This room needs the extra `train`. Settings can be read
without torch; everything else is imported on first use.
"""

from typing import TYPE_CHECKING

from penstock.core.lazy_imports import lazy
from penstock.models.lora import LoraSettings
from penstock.models.settings import ModelSettings

if TYPE_CHECKING:
    from penstock.models.attention import REQUIREMENTS, RowAttention, attend, flex_mask_mod
    from penstock.models.cache import Cache
    from penstock.models.exporting import export
    from penstock.models.language_model import (
        LanguageModel,
        PackedRows,
        PackingVerdict,
        RowTensors,
        most_packed,
        require_packed_rows,
    )
    from penstock.models.lora import add_lora, merge_lora
    from penstock.models.micro_sequences import backward_in_parts
    from penstock.models.saving import load_model, save_model
    from penstock.models.transformer import Transformer, build_model
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "Cache": "cache",
            "LanguageModel": "language_model",
            "PackedRows": "language_model",
            "PackingVerdict": "language_model",
            "REQUIREMENTS": "attention",
            "RowAttention": "attention",
            "RowTensors": "language_model",
            "Transformer": "transformer",
            "add_lora": "lora",
            "attend": "attention",
            "backward_in_parts": "micro_sequences",
            "build_model": "transformer",
            "export": "exporting",
            "flex_mask_mod": "attention",
            "load_model": "saving",
            "merge_lora": "lora",
            "most_packed": "language_model",
            "require_packed_rows": "language_model",
            "save_model": "saving",
        },
    )

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
