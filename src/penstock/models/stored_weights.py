"""Weights of a folder that must not be loaded as they are: quantised ones, ones that are missing or left over, NaN.

Each of them would load without an error and give a model that computes something else.
"""

import json
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.errors import CorruptionError, FormatError
from penstock.integrations.isolation import names, not_finite

_SMALL = ("F8", "F6", "F4", "I8", "U8", "I4", "U4")
"""What the names of types in safetensors begin with that are no numbers without their scales."""
_COPY = (
    "give a copy that transformers made: AutoModelForCausalLM.from_pretrained({folder!r}{how}, "
    "dtype='bfloat16').save_pretrained(COPY)"
)
_DEQUANTIZE = {
    "fp8": "FineGrainedFP8Config(dequantize=True)",
    "mxfp4": "Mxfp4Config(dequantize=True)",
    "compressed-tensors": "CompressedTensorsConfig(dequantize=True)",
    "metal": "MetalConfig(dequantize=True)",
}
"""Method of quantisation → the settings of transformers that undo it."""
_HARMLESS = re.compile(
    r"(^|\.)(rotary_emb|rotary_embed|rotary_pos_emb)\.|inv_freq$|masked_bias$|(^|\.)(attn|attention)\.bias$|position_ids$"
)
"""Buffers that older checkpoints have, and that models make themselves."""
_OTHER_PARTS = re.compile(
    r"^(model\.)?(mtp|nextn|vision\w*|visual|image\w*|video\w*|audio\w*|multi_modal\w*|mm_\w*|score|v_head|value_head"
    r"|classifier)\b"
)
"""Parts next to the language model: further prediction heads, encoders of media, heads of reward models."""


def refuse_quantised(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a folder whose weights are quantised; `config` is its `config.json`.

    Raises:
        FormatError: They are, by its settings or by how they are stored; says how, and the cure.
    """
    nested = [one for one in config.values() if isinstance(one, Mapping)]
    found = [
        one[name] for one in (config, *nested) for name in ("quantization_config", "compression_config") if name in one
    ]
    methods = [one.get("quant_method", "an unknown method") for one in found if isinstance(one, Mapping)]
    if methods:
        raise FormatError(f"{folder}: its weights are quantised ({methods[0]}); {_cure(folder, str(methods[0]))}")
    stored = {name: kind for name, (kind, rank) in _stored(folder).items() if rank > 1 and kind.startswith(_SMALL)}
    if unread := sorted(name for name in stored if not _HARMLESS.search(name)):
        raise FormatError(
            f"{folder}: its weights are quantised: {names(unread)} stored as {stored[unread[0]]}, expected F32, F16 or "
            f"BF16; {_cure(folder, '')}"
        )


def refuse_incomplete(folder: Path, missing: Iterable[str], left_over: Iterable[str]) -> None:
    """Refuse weights that are not those of the model that `config.json` describes.

    Args:
        folder: Where they are.
        missing: Names that the model has and the files have not; tied ones are none of them.
        left_over: Names that the files have and the model has not.

    Raises:
        CorruptionError: There are some that change what the model computes; lists them.
    """
    if gone := sorted(missing):
        raise CorruptionError(
            f"{folder}: the files lack {len(gone)} weights of the model that config.json describes, which would be "
            f"random: {names(gone)}; copy the model again, with all its files"
        )
    unused = sorted(name for name in left_over if not (_HARMLESS.search(name) or _OTHER_PARTS.search(name)))
    if unused:
        raise CorruptionError(
            f"{folder}: the files have {len(unused)} weights that the model of config.json does not use: "
            f"{names(unused)}; take the config.json that belongs to them, or, if they are not wanted, "
            f"{_COPY.format(folder=str(folder), how='')}"
        )


def refuse_not_finite(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse weights that are NaN or infinite.

    Raises:
        CorruptionError: Some are; lists them.
    """
    if broken := not_finite(weights):
        raise CorruptionError(
            f"{folder}: NaN or infinity in the weights {names(broken)}; copy the model again, or take an earlier "
            "checkpoint"
        )


def _cure(folder: Path, method: str) -> str:
    if method in _DEQUANTIZE:
        return _COPY.format(folder=str(folder), how=f", quantization_config={_DEQUANTIZE[method]}")
    return "take the folder in float32 or bfloat16 that it was made from, or save a dequantised copy with transformers"


def _stored(folder: Path) -> dict[str, tuple[str, int]]:
    """Name → (type, number of dimensions) of what the safetensors of a folder hold, from their headers alone.

    Raises:
        CorruptionError: A header cannot be read.
    """
    found: dict[str, tuple[str, int]] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(size, path.stat().st_size)))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            found |= {name: (str(entry["dtype"]), len(entry["shape"])) for name, entry in entries.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise CorruptionError(f"{path}: no safetensors: {error!r}; copy the model again") from None
    return found
