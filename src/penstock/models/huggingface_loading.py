"""A folder in the Hugging Face layout as a model behind our door. What would compute something else is refused."""

from pathlib import Path

import torch

from penstock.errors import ConfigError, CorruptionError, MissingExtraError
from penstock.models.huggingface_model import HuggingFaceModel
from penstock.models.importing import read_config
from penstock.models.stored_weights import refuse_incomplete, refuse_not_finite, refuse_quantised
from penstock.models.trials import one_line

try:
    from transformers import AutoModelForCausalLM
except ImportError as error:
    raise MissingExtraError("transformers", "huggingface") from error


def load_huggingface(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> HuggingFaceModel:
    """Load a causal model of transformers from a folder.

    Args:
        folder: In the Hugging Face layout.
        device: Where to.
        dtype: Of the weights; None: as they are stored.

    Raises:
        ConfigError: There is no causal model, or transformers cannot run it.
        FormatError: Its weights are quantised.
        CorruptionError: Weights are damaged, missing, left over, or not finite.
    """
    path = Path(folder)
    if (path / "config.json").is_file():
        refuse_quantised(path, read_config(path))
    try:
        inner, found = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype or "auto", trust_remote_code=False, output_loading_info=True
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(f"{folder}: no causal model of transformers there: {one_line(error)}") from None
    except Exception as error:  # of a damaged folder transformers, torch and safetensors raise all sorts
        raise CorruptionError(f"{folder}: the model cannot be read: {one_line(error)}; copy it again") from None
    refuse_quantised(path, inner.config.to_dict())
    refuse_incomplete(path, found["missing_keys"], found["unexpected_keys"])
    refuse_not_finite(path, inner.named_parameters())
    return HuggingFaceModel(inner.to(device).train())
