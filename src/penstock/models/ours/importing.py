"""Reads a Hugging Face folder of a plain Llama or Mistral model as our own transformer, without
transformers.

What our transformer lacks (biases, scaled rotary positions, other activations, layers of different
kinds) is refused by name; such models run as `hf:path`. For all models, weights that are quantised,
missing, left over or NaN are refused: each would load without an error and give a model that
computes something else.
"""

import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from penstock.core.errors import CorruptionError, FormatError
from penstock.core.json_files import read_object
from penstock.models.facts import ModelFacts, with_facts
from penstock.models.four_bits import is_four_bits
from penstock.models.isolation.comparison import not_finite
from penstock.models.isolation.report import names
from penstock.models.ours.initial_weights import empty_transformer
from penstock.models.ours.transformer import Transformer
from penstock.models.settings import ModelSettings
from penstock.models.tensor_files import StoredTensors
from penstock.models.theirs.attention import one_line

_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
}
_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "unembedding.weight": "lm_head.weight",
}


_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
_SMALL = ("F8", "F6", "F4", "I8", "U8", "I4", "U4")
"""Prefixes of type names in safetensors that mean nothing without scales."""
_MOST_PARTS = 1000
"""Layers, or experts, that a model may have whatever its files hold: some have weights that many
layers share.
"""
_COUNTS = re.compile(r"(^|_)(layers?|blocks|depth|experts|heads|stages)$")
"""Ends of the names of settings that count parts of a model."""
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
"""Quantisation method → the settings of transformers that undo it."""
_HARMLESS = re.compile(
    r"(^|\.)(rotary_emb|rotary_embed|rotary_pos_emb)\.|inv_freq$|masked_bias$|(^|\.)(attn|attention)\.bias$|position_ids$"
)
"""Buffers in older checkpoints that models create themselves."""
_OTHER_PARTS = re.compile(
    r"^(model\.)?(mtp|nextn|vision\w*|visual|image\w*|video\w*|audio\w*|multi_modal\w*|mm_\w*|score|v_head|value_head|classifier)\b"
)
"""Parts next to the language model: further prediction heads, media encoders, heads of reward
models.
"""


def llama_name(name: str, layers: int) -> str | None:
    """One of our weight names in the Llama layout of Hugging Face, or that of Qwen 3 with experts.

    None for what the layout lacks: further prediction heads, and all but the main mixer of
    stochastic blocks.
    """
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if block is None:
        return _OUTSIDE[name]
    if int(block[1]) >= layers or block[2].startswith("others."):
        return None
    expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(.+)", block[2])
    inside = (
        _BLOCK[block[2]]
        if expert is None
        else _BLOCK[f"mlp.{expert[2]}"].replace("mlp", f"mlp.experts.{expert[1]}")
    )
    return f"model.layers.{block[1]}.{inside}"


def refuse_quantised(folder: Path, config: Mapping[str, object]) -> None:
    """Refuse a folder with quantised weights; `config` is its `config.json`.

    Raises:
        FormatError: Weights are quantised, by the settings or by how they are stored; says how, and
            the cure.
    """
    nested = [one for one in config.values() if isinstance(one, Mapping)]
    found = [
        one[name]
        for one in (config, *nested)
        for name in ("quantization_config", "compression_config")
        if name in one
    ]
    methods = [
        one.get("quant_method", "an unknown method") for one in found if isinstance(one, Mapping)
    ]
    if methods:
        raise FormatError(
            f"{folder}: its weights are quantised ({methods[0]}); {_cure(folder, str(methods[0]))}"
        )
    stored = {
        name: kind
        for name, (kind, rank) in _stored(folder).items()
        if rank > 1 and kind.startswith(_SMALL)
    }
    if unread := sorted(name for name in stored if not _HARMLESS.search(name)):
        raise FormatError(
            f"{folder}: its weights are quantised: {names(unread)} stored as "
            f"{stored[unread[0]]}, expected F32, F16 or BF16; {_cure(folder, '')}"
        )


def refuse_incomplete(folder: Path, missing: Iterable[str], left_over: Iterable[str]) -> None:
    """Refuse weights that are not those of the model that `config.json` describes.

    Args:
        folder: Where they are.
        missing: Names that the model has and the files lack, without tied weights.
        left_over: Names that the files have and the model lacks.

    Raises:
        CorruptionError: Some of these change what the model computes; lists them.
    """
    if gone := sorted(missing):
        raise CorruptionError(
            f"{folder}: the files lack {len(gone)} weights of the model that config.json "
            f"describes, which would be random: {names(gone)}; copy the model again, with all "
            "its files"
        )
    unused = sorted(
        name for name in left_over if not (_HARMLESS.search(name) or _OTHER_PARTS.search(name))
    )
    if unused:
        raise CorruptionError(
            f"{folder}: the files have {len(unused)} weights that the model of config.json "
            f"does not use: {names(unused)}; take the config.json that belongs to them, or, "
            f"if they are not needed, {_COPY.format(folder=str(folder), how='')}"
        )


def is_harmless(name: str) -> bool:
    """Whether a stored tensor of this name is a buffer that models create themselves."""
    return _HARMLESS.search(name) is not None


def refuse_not_finite(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse weights that are NaN or infinite.

    Raises:
        CorruptionError: Some are; lists them.
    """
    if broken := not_finite(weights):
        raise CorruptionError(
            f"{folder}: NaN or infinity in the weights {names(broken)}; copy the model again, "
            "or take an earlier checkpoint"
        )


def _cure(folder: Path, method: str) -> str:
    if method in _DEQUANTIZE:
        return _COPY.format(folder=str(folder), how=f", quantization_config={_DEQUANTIZE[method]}")
    return (
        "take the float32 or bfloat16 folder that it was made from, or save a dequantised copy "
        "with transformers"
    )


def _stored(folder: Path) -> dict[str, tuple[str, int]]:
    """Name → (type, number of dimensions) of the weights in a folder's safetensors, from their
    headers alone.

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
            found |= {
                name: (str(entry["dtype"]), len(entry["shape"])) for name, entry in entries.items()
            }
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            struct.error,
        ) as error:
            raise CorruptionError(
                f"{path}: not a safetensors file: {error!r}; copy the model again"
            ) from None
    return found


def import_llama(
    folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Transformer:
    """Read a model in the Hugging Face layout.

    Args:
        folder: A folder with `config.json` and safetensors.
        device: Target device.
        dtype: Dtype of weights and computation; None: as stored.

    Raises:
        FormatError: It is another kind of model, or quantised; says what is different.
        CorruptionError: Weights are missing, left over or not finite, or do not fit.
    """
    folder = Path(folder)
    settings = plain_settings(folder)
    if dtype == torch.float32:
        settings = replace(settings, dtype="float32")
    stored = _weights(folder)
    names = _llama_names(settings)
    _refuse_others(folder, names, stored.keys())
    try:
        model = empty_transformer(
            settings, device, dtype or stored["model.embed_tokens.weight"].dtype
        )
        model.load_state_dict({name: stored[theirs] for name, theirs in names.items()})
    except RuntimeError as error:
        raise CorruptionError(
            f"{folder}: weights do not fit config.json: {one_line(error)}; copy the model again"
        ) from None
    refuse_not_finite(folder, model.named_parameters())
    return with_facts(model, ModelFacts.of_folder(folder))


def stored_llama(folder: Path) -> tuple[ModelSettings, StoredTensors]:
    """What `import_llama` would make of a folder: its settings, and where its weights are, by our
    names.

    Raises:
        FormatError, CorruptionError: As `import_llama`; values are not read.
    """
    settings, stored = plain_settings(folder), StoredTensors(weight_files(folder))
    names = _llama_names(settings)
    _refuse_others(folder, names, stored.shapes)
    return settings, stored.chosen(names)


def plain_settings(folder: Path) -> ModelSettings:
    """The settings of the `Transformer` that `import_llama` makes of a folder.

    Raises:
        FormatError: It has another layout, or its weights are quantised.
    """
    if (reason := refusal(folder)) is not None:
        raise FormatError(
            f"{folder}: {reason}, which our transformer does not have; use it as model: hf:{folder}"
        )
    config = read_config(folder)
    refuse_quantised(folder, config)
    refuse_oversized(folder, config)
    try:
        return _settings(config)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FormatError(f"{folder / 'config.json'}: {error!r}; copy the model again") from None


def _llama_names(settings: ModelSettings) -> dict[str, str]:
    """Our name of each weight → its name in a folder."""
    with torch.device("meta"):
        return {
            name: str(llama_name(name, settings.layers))
            for name in Transformer(settings).state_dict()
        }


def _refuse_others(folder: Path, names: Mapping[str, str], stored: Iterable[str]) -> None:
    there, needed = set(stored), set(names.values())
    refuse_incomplete(folder, needed - there, there - needed - {"lm_head.weight"})


def refusal(folder: Path) -> str | None:
    """What our transformer lacks for the model in a folder; None if it can be imported."""
    config = read_config(folder)
    if config.get("model_type") not in ("llama", "mistral"):
        return f"a model of type {config.get('model_type')!r}"
    if is_four_bits(config):
        return "weights in 4 bits"
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
        FormatError: There is none, or it is not a JSON object.
    """
    return read_object(folder / "config.json")


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights in the Hugging Face layout, as safetensors; they may not exist.

    Raises:
        CorruptionError: As `listed_files`.
    """
    return [folder / file for file in listed_files(folder).get(_INDEX, [_WHOLE])]


def _weights(folder: Path) -> dict[str, Tensor]:
    files = weight_files(folder)
    try:
        return {name: weight for file in files for name, weight in load_file(file).items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CorruptionError(
            f"{folder}: {error}; copy the model again (expected safetensors)"
        ) from None


def listed_files(folder: Path) -> dict[str, list[str]]:
    """For each index of weights in a folder, the files that it names.

    Raises:
        CorruptionError: An index cannot be read, or names a file outside the folder.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.index.json")):
        places = read_object(path, CorruptionError).get("weight_map")
        if not isinstance(places, dict) or not all(
            isinstance(place, str) for place in places.values()
        ):
            raise CorruptionError(
                f"{path}: weight_map is not a mapping of names to files; copy the model again"
            )
        listed = sorted(set(places.values()))
        # By the names alone: files of the hub's cache are links that lead outside.
        outside = [
            name
            for name in listed
            if name.startswith(("/", "~")) or re.search(r"\\|:|\0|(^|/)\.\.(/|$)", name)
        ]
        if outside:
            raise CorruptionError(
                f"{path}: names the file {outside[0]!r}, which is not in the folder; it was "
                "made by someone who wants other files of yours read: get the model from its "
                "source"
            )
        found[path.name] = listed
    return found


def refuse_oversized(folder: Path, config: Mapping[str, object]) -> None:
    """Refuse a model with more layers or experts than its files can hold weights for: building it
    would take hours.

    Raises:
        FormatError: `config` says so.
    """
    most = max(_MOST_PARTS, len(_stored(folder)))
    nested = [(f"{name}.", one) for name, one in config.items() if isinstance(one, Mapping)]
    for prefix, settings in [("", config), *nested]:
        for name, value in settings.items():
            if _COUNTS.search(name) and isinstance(value, int | float) and not value <= most:
                raise FormatError(
                    f"{folder / 'config.json'}: {prefix}{name} is {value!r:.40}, more than "
                    "the weights in the folder can be for; copy the model again, or get it "
                    "from its source"
                )
