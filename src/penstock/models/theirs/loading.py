"""Loading a causal model of transformers from a folder, and what is refused there."""

from pathlib import Path

import torch

from penstock.core.errors import ConfigError, CorruptionError
from penstock.models.facts import ModelFacts, with_facts
from penstock.models.four_bits import is_four_bits, require_bitsandbytes, scales, take_four_bits
from penstock.models.ours.importing import (
    listed_files,
    read_config,
    refuse_incomplete,
    refuse_not_finite,
    refuse_oversized,
    refuse_quantised,
)
from penstock.models.theirs.attention import one_line
from penstock.models.theirs.model import HuggingFaceModel


def load_huggingface(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> HuggingFaceModel:
    """Load a causal model of transformers from a folder.

    Args:
        folder: A folder in the Hugging Face layout.
        device: Target device.
        dtype: Dtype of the weights, but for those in 4 bits; None: as stored.

    Raises:
        ConfigError: There is no causal model, or transformers cannot run it.
        FormatError: The weights are quantised, other than in 4 bits of bitsandbytes.
        MissingExtraError: They are in these, and it is not installed.
        CorruptionError: Weights are damaged, missing, left over, or not finite.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    path, kind, four_bits = Path(folder), AutoModelForCausalLM, False
    if (path / "config.json").is_file():
        config = read_config(path)
        listed_files(path)
        if four_bits := is_four_bits(config):
            require_bitsandbytes()
        else:
            refuse_quantised(path, config)
        refuse_oversized(path, config)
        kind = AutoModelForMultimodalLM if {"vision_config", "audio_config"} & set(config) else kind
    try:
        inner, found = kind.from_pretrained(
            str(folder),
            dtype=dtype or "auto",
            trust_remote_code=False,
            output_loading_info=True,
            # Else transformers takes the first GPU for weights in 4 bits.
            **({"device_map": {"": "cpu"}} if four_bits else {}),
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(
            f"{folder}: no causal model of transformers there: {one_line(error)}"
        ) from None
    except (
        Exception
    ) as error:  # transformers, torch and safetensors may raise anything for a damaged folder
        raise CorruptionError(
            f"{folder}: the model cannot be read: {one_line(error)}; copy it again"
        ) from None
    if four_bits:
        take_four_bits(inner)
    else:
        refuse_quantised(path, inner.config.to_dict())
    refuse_incomplete(path, found["missing_keys"], found["unexpected_keys"])
    refuse_not_finite(path, (*inner.named_parameters(), *scales(inner)))
    made = HuggingFaceModel(inner.to(device).train())
    return (
        with_facts(made, ModelFacts.of_folder(path)) if (path / "config.json").is_file() else made
    )
