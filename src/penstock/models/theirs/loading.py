"""Loading a causal model of transformers from a folder, and what is refused there."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    inner = read_huggingface(folder, dtype)
    path = Path(folder)
    made = HuggingFaceModel(inner.to(device).train())
    return (
        with_facts(made, ModelFacts.of_folder(path)) if (path / "config.json").is_file() else made
    )


def read_huggingface(folder: str | Path, dtype: torch.dtype | None) -> "PreTrainedModel":
    """The model of transformers in a folder, on the CPU; arguments and errors as of
    `load_huggingface`, but for what its trials find.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    path, kind, four_bits = Path(folder), AutoModelForCausalLM, False
    if (path / "config.json").is_file():
        config = refuse_folder(path)
        four_bits = is_four_bits(config)
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
    made: PreTrainedModel = inner
    return made


def refuse_folder(folder: Path) -> Mapping[str, Any]:
    """The `config.json` of a folder, whose weights are not read.

    Raises:
        FormatError: It is none, or the weights are quantised, other than in 4 bits of bitsandbytes,
            or too few for it.
        MissingExtraError: They are in these, and it is not installed.
        CorruptionError: Files of weights, or their index, cannot be read.
    """
    config = read_config(folder)
    listed_files(folder)
    if is_four_bits(config):
        require_bitsandbytes()
    else:
        refuse_quantised(folder, config)
    refuse_oversized(folder, config)
    return config


def inner_of_settings(folder: Path, dtype: torch.dtype | None) -> "PreTrainedModel":
    """The model of transformers that a folder describes, with new weights in a dtype; None: that of
    the stored ones, as transformers finds it.

    Raises:
        ConfigError: There is no causal model.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForMultimodalLM,
        GenerationConfig,
    )

    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        pictured = any(hasattr(config, name) for name in ("vision_config", "audio_config"))
        kind: Any = AutoModelForMultimodalLM if pictured else AutoModelForCausalLM
        inner: PreTrainedModel = kind.from_config(
            config, **({} if dtype is None else {"dtype": dtype}), trust_remote_code=False
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(
            f"{folder}: no causal model of transformers there: {one_line(error)}"
        ) from None
    if (folder / "generation_config.json").is_file():
        inner.generation_config = GenerationConfig.from_pretrained(str(folder))
    return inner
