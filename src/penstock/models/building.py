"""Make a model: from settings with fresh weights, or from a folder of transformers.

Fresh weights are a function of the seed and of each weight's name, drawn on the CPU: the same on every device, on every
rank, and for every weight that two models of different depth share.
"""

import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.models.language_model import LanguageModel
from penstock.models.settings import ModelSettings
from penstock.models.transformer import Transformer
from penstock.randomness import key_for

HUGGING_FACE = "hf:"
"""What the name of a folder of transformers begins with, in a run file."""


def build_model(
    settings: ModelSettings | str,
    *,
    vocab_size: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> LanguageModel:
    """A model, ready to train.

    Args:
        settings: Of a transformer, or "hf:path".
        vocab_size: Ids of the tokenizer; the model has as many or more.
        device: Where to.
        dtype: Of the weights; None: float32, or float64 where the settings compute in it.
        seed: Of fresh weights.

    Raises:
        ConfigError: The vocabulary does not fit, or there is no such model.
        FormatError: The weights of the folder are quantised.
        CorruptionError: They are damaged, missing, left over, or not finite.
    """
    if isinstance(settings, str):
        if not settings.startswith(HUGGING_FACE):
            raise ConfigError(f"model {settings!r} is unknown; give the settings of a transformer, hf:path or from:RUN")
        from penstock.models.huggingface_loading import load_huggingface

        path = settings.removeprefix(HUGGING_FACE)
        wrapped = load_huggingface(path, device=device, dtype=dtype or torch.float32)
        if vocab_size > wrapped.vocab_size:
            raise ConfigError(
                f"{path}: the model has embeddings for {wrapped.vocab_size} ids and the tokenizer has {vocab_size}; "
                "prepare the data with the model's tokenizer"
            )
        return wrapped
    settings = settings.with_vocabulary(vocab_size)
    dtype = dtype or (torch.float64 if settings.dtype == "float64" else torch.float32)
    model = empty_transformer(settings, device, dtype)
    initialise(model, seed)
    return model


def empty_transformer(settings: ModelSettings, device: torch.device | str, dtype: torch.dtype) -> Transformer:
    """A transformer whose weights hold nothing yet."""
    with torch.device("meta"):
        model = Transformer(settings)
    return model.to(dtype).to_empty(device=device)


def initialise(model: Transformer, seed: int) -> None:
    """Fresh weights: norms 1, all others normal.

    Those that write into the residual stream are smaller by √(2 × layers), so that its variance does not grow with
    depth.

    Source: GPT-2 (Radford et al. 2019), section 2.3.
    """
    settings = model.settings
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            nn.init.ones_(weight)
            continue
        writes = name.endswith(("attention.output.weight", "mlp.down.weight"))
        std = settings.init_std / (2 * settings.layers) ** 0.5 if writes else settings.init_std
        generator = torch.Generator("cpu").manual_seed(key_for(seed, "weights", name))
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
