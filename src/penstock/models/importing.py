"""A folder of a plain Llama or Mistral model as our own transformer, without transformers.

What our transformer does not have (biases, scaled rotary positions, other activations, layers of different kinds) is
refused by name; such models run as `hf:path`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CorruptionError, FormatError
from penstock.models.building import empty_transformer
from penstock.models.layout import llama_name
from penstock.models.settings import ModelSettings
from penstock.models.stored_weights import refuse_incomplete, refuse_not_finite, refuse_quantised
from penstock.models.transformer import Transformer
from penstock.models.trials import one_line

_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"


def import_llama(
    folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Transformer:
    """Read a model in the Hugging Face layout.

    Args:
        folder: With `config.json` and safetensors.
        device: Where to.
        dtype: What weights are kept and computed with in; None: both as they are stored.

    Raises:
        FormatError: It is another kind of model, or quantised; says what of it.
        CorruptionError: Weights are missing, left over or not finite, or do not fit.
    """
    folder = Path(folder)
    if (reason := refusal(folder)) is not None:
        raise FormatError(f"{folder}: {reason}, which our transformer does not have; use it as model: hf:{folder}")
    config = read_config(folder)
    refuse_quantised(folder, config)
    try:
        settings = _settings(config)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{folder / 'config.json'}: {error!r}; copy the model again") from None
    if dtype == torch.float32:
        settings = replace(settings, dtype="float32")
    stored = _weights(folder)
    with torch.device("meta"):
        names = {name: str(llama_name(name, settings.layers)) for name in Transformer(settings).state_dict()}
    left_over = stored.keys() - names.values() - {"lm_head.weight"}
    refuse_incomplete(folder, names.values() - stored.keys(), left_over)
    try:
        model = empty_transformer(settings, device, dtype or stored["model.embed_tokens.weight"].dtype)
        model.load_state_dict({name: stored[theirs] for name, theirs in names.items()})
    except RuntimeError as error:
        raise CorruptionError(
            f"{folder}: weights do not fit config.json: {one_line(error)}; copy the model again"
        ) from None
    refuse_not_finite(folder, model.named_parameters())
    return model


def refusal(folder: Path) -> str | None:
    """What our transformer lacks for the model in a folder; None if it can be imported."""
    config = read_config(folder)
    if config.get("model_type") not in ("llama", "mistral"):
        return f"a model of type {config.get('model_type')!r}"
    if config.get("attention_bias") or config.get("mlp_bias"):
        return "biases"
    if config.get("hidden_act", "silu") != "silu":
        return f"activation {config['hidden_act']!r}"
    kind = _rope(config).get("rope_type", _rope(config).get("type", "default"))
    if kind != "default":
        return f"rotary positions scaled by {kind!r}"
    if len(set(config.get("layer_types") or ["same"])) > 1:
        return "layers of different kinds"
    return None


def _settings(config: dict[str, Any]) -> ModelSettings:
    window = config.get("sliding_window") if config["model_type"] == "mistral" else None
    dtype = config.get("dtype", config.get("torch_dtype", "float32"))
    return ModelSettings(
        vocab_size=config["vocab_size"],
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads"),
        head_width=config.get("head_dim"),
        mlp_width=config["intermediate_size"],
        rope_theta=float(_rope(config).get("rope_theta", config.get("rope_theta", 10000.0))),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied=config.get("tie_word_embeddings", False),
        sliding_window=window,
        init_std=config.get("initializer_range", 0.02),
        dtype=dtype if dtype in ("bfloat16", "float64") else "float32",
    )


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a folder.

    Raises:
        FormatError: There is none, or it is no JSON object.
    """
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{folder / 'config.json'}: {error}; give the folder of a model") from None
    if not isinstance(config, dict):
        raise FormatError(f"{folder / 'config.json'}: found {type(config).__name__}, expected a mapping of settings")
    return config


def _weights(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        index = folder / _INDEX
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [_WHOLE]
        return {name: weight for file in names for name, weight in load_file(folder / file).items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CorruptionError(f"{folder}: {error}; copy the model again (expected safetensors)") from None
