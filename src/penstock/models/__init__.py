"""Models in torch: a readable transformer over packed rows, and any model of transformers with the
same interface.

Their attention keeps documents apart and supports prefixes. This room needs the extra `train`.
Settings can be read without torch; everything else is imported on first use.
"""

from penstock.core.lazy_imports import lazy
from penstock.models.lora.settings import LoraSettings
from penstock.models.settings import BlockSettings, ModelSettings, VisionSettings

with lazy(__name__):
    from penstock.models import attention
    from penstock.models.cache import Cache
    from penstock.models.exporting import export
    from penstock.models.language_model import LanguageModel, PackedRows, PackingVerdict
    from penstock.models.lora.export import export_adapter
    from penstock.models.lora.lora import add_lora, merge_lora
    from penstock.models.ours.transformer import Transformer
    from penstock.models.recurrent.choice import use_recurrent
    from penstock.models.row_tensors import RowTensors
    from penstock.models.saving import save_model

__all__ = [
    "BlockSettings",
    "Cache",
    "LanguageModel",
    "LoraSettings",
    "ModelSettings",
    "PackedRows",
    "PackingVerdict",
    "RowTensors",
    "Transformer",
    "VisionSettings",
    "add_lora",
    "attention",
    "export",
    "export_adapter",
    "merge_lora",
    "save_model",
    "use_recurrent",
]
