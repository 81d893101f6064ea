"""Any model behind one door: built from settings, from a folder of transformers, from code; or
given as a module.
"""

import sys
from typing import Any

import torch
from torch import nn

from penstock.core.errors import ConfigError
from penstock.models.language_model import LanguageModel
from penstock.models.ours.initial_weights import empty_transformer, initialise
from penstock.models.own_code import is_own_code
from penstock.models.own_model import OwnModel, build_own
from penstock.models.settings import ModelSettings
from penstock.models.theirs.loading import load_huggingface
from penstock.models.theirs.model import HuggingFaceModel

HUGGING_FACE = "hf:"
"""Prefix of a folder of transformers in a run file."""
_DOOR = ("requirements", "packing", "tensors", "logits", "prediction_weights", "state_dict")
"""What a module has that is a `LanguageModel` already."""
_WRAPPED = "_penstock_model"


def build_model(
    settings: ModelSettings | str,
    *,
    vocab_size: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> LanguageModel:
    """Make a model that is ready to train, with initial weights or from a folder of transformers.

    Args:
        settings: Settings of a transformer, or "hf:path", or "module:function" of your own code
            (see `own_model`).
        vocab_size: Number of ids of the tokenizer; the model has at least as many.
        device: Target device.
        dtype: Dtype of the weights; None: float32, or float64 if the settings compute in it.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: The vocabulary does not fit, or there is no such model.
        FormatError: The weights of the folder are quantised.
        CorruptionError: The weights of the folder are damaged, missing, left over, or not finite.
    """
    if isinstance(settings, str):
        if not settings.startswith(HUGGING_FACE):
            return _own(settings, vocab_size, seed, device, dtype)

        path = settings.removeprefix(HUGGING_FACE)
        wrapped = load_huggingface(path, device=device, dtype=dtype or torch.float32)
        if vocab_size > wrapped.vocab_size:
            raise ConfigError(
                f"{path}: the model has embeddings for {wrapped.vocab_size} ids and the "
                f"tokenizer has {vocab_size}; prepare the data with the model's tokenizer"
            )
        return wrapped
    settings = settings.with_vocabulary(vocab_size)
    dtype = dtype or (torch.float64 if settings.dtype == "float64" else torch.float32)
    model = empty_transformer(settings, device, dtype)
    initialise(model, seed)
    return model


def _own(
    code: str, vocab_size: int, seed: int, device: torch.device | str, dtype: torch.dtype | None
) -> LanguageModel:
    if not is_own_code(code):
        raise ConfigError(
            f"model {code!r} is unknown; give the settings of a transformer, hf:path, "
            "from:RUN, or module:function of your own code"
        )
    return build_own(code, vocab_size, seed).to(device=device, dtype=dtype or torch.float32)


def as_language_model(model: object) -> LanguageModel:
    """Any model behind our door: ours, one of transformers, or a module that meets `OwnModule`.

    What is made for a module is kept with it, so that it is tried once.

    Raises:
        ConfigError: It is no such model; says what it lacks.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model: found {model!r}, expected a model of ps.load_model or ps.build_model, "
            "one of transformers, or a torch.nn.Module with vocab_size, forward(row) and "
            "logits(hidden)"
        )
    if all(hasattr(model, name) for name in _DOOR):
        ready: Any = model
        return ready  # type: ignore[no-any-return]
    if _WRAPPED not in model.__dict__:
        transformers = sys.modules.get("transformers")
        if transformers is not None and isinstance(model, transformers.PreTrainedModel):
            made: Any = HuggingFaceModel(model)
        else:
            made = OwnModel(model)
        # Past the module's own bookkeeping, which would make it a part of itself.
        model.__dict__[_WRAPPED] = made
    found: LanguageModel = model.__dict__[_WRAPPED]
    return found
