"""The layouts of transformers in which a `Transformer` is exported: which one fits, its
`config.json`, its weights.

| our blocks | layout |
|---|---|
| attention | Llama; Mistral with a sliding window; Qwen 3 with `qk_norm` |
| attention and experts | Mixtral; Qwen 3 MoE with `qk_norm` |
| `gated_delta`, also with attention that has `qk_norm` | Qwen3-Next |
| `mamba`, also with attention | Bamba |

What a layout has and our blocks lack is written so that it does nothing: the gate of Qwen3-Next's
attention gets weights of 0, which halve its output, and the matrix behind it counts twice.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject
from penstock.models.ours.importing import llama_name
from penstock.models.settings import BlockSettings, ModelSettings

Layout = Literal["Llama", "Mistral", "Qwen3", "Mixtral", "Qwen3Moe", "Qwen3Next", "Bamba"]

_TYPES: dict[Layout, str] = {
    "Llama": "llama",
    "Mistral": "mistral",
    "Qwen3": "qwen3",
    "Mixtral": "mixtral",
    "Qwen3Moe": "qwen3_moe",
    "Qwen3Next": "qwen3_next",
    "Bamba": "bamba",
}
_Change = Callable[[ModelSettings, str, Tensor], tuple[str, Tensor]]


def layout_of(settings: ModelSettings) -> Layout:
    """The layout that fits.

    Raises:
        ConfigError: None does; says why.
    """
    kinds = [settings.block(layer) for layer in range(settings.layers)]
    mixers = {settings.mixers(kind)[0] for kind in kinds}
    attention = {
        (mixer.sliding_window, mixer.qk_norm) for mixer in mixers if not mixer.is_recurrent
    }
    for name in ("attention_softcap", "logit_softcap"):
        if getattr(settings, name) is not None:
            raise ConfigError(f"export: {name} has no layout that we write")
    if len(attention) > 1:
        raise ConfigError(
            "export: attention that differs from block to block has no layout that we write"
        )
    window, qk_norm = next(iter(attention), (None, None))
    recurrent = {_shape(settings, mixer) for mixer in mixers if mixer.is_recurrent}
    if recurrent:
        return _recurrent_layout(
            settings, recurrent, window, qk_norm, any(kind.experts for kind in kinds)
        )
    if qk_norm and window is not None:
        raise ConfigError("export: qk_norm with a sliding window has no layout that we write")
    experts = {(kind.experts, kind.experts_per_token, kind.expert_width) for kind in kinds}
    sparse = [kind for kind in experts if kind[0] is not None]
    if len(sparse) > 1 or (len(experts) > len(sparse) > 0 and not qk_norm):
        raise ConfigError(
            "export: experts that differ from block to block have no layout that we write; "
            "blocks without experts among them have one with qk_norm only"
        )
    if sparse:
        return "Qwen3Moe" if qk_norm else "Mixtral"
    return "Mistral" if window is not None else "Qwen3" if qk_norm else "Llama"


def _shape(settings: ModelSettings, mixer: BlockSettings) -> tuple[str, int, int, int, int]:
    heads, width = mixer.heads or settings.heads, mixer.head_width or settings.each_head
    return mixer.mixer, heads, width, mixer.state_width, mixer.convolution


def _recurrent_layout(
    settings: ModelSettings,
    recurrent: set[tuple[str, int, int, int, int]],
    window: int | None,
    qk_norm: bool | None,
    experts: bool,
) -> Layout:
    """The layout for blocks with recurrences of these shapes, next to attention with this window
    and these norms.
    """
    kinds = sorted({shape[0] for shape in recurrent})
    if "kimi_delta" in kinds:
        raise ConfigError(
            "export: our blocks with kimi_delta have no layout that transformers knows; train "
            "hf:path with a model of that kind instead"
        )
    if len(recurrent) > 1:
        raise ConfigError(
            f"export: recurrent blocks that differ ({', '.join(kinds)}) have no layout that "
            "we write"
        )
    [(kind, heads, width, *_)] = recurrent
    if experts or window is not None:
        lacks = "experts" if experts else "a sliding window"
        raise ConfigError(f"export: {lacks} next to {kind} blocks has no layout that we write")
    if kind == "gated_delta":
        if qk_norm is False:
            raise ConfigError(
                "export: attention next to gated_delta blocks has a layout with qk_norm only"
            )
        return "Qwen3Next"
    if qk_norm:
        raise ConfigError("export: qk_norm next to mamba blocks has no layout that we write")
    if heads * width % settings.width:
        raise ConfigError(
            f"export: mamba blocks have a layout only if heads × head_width ({heads} × "
            f"{width}) is a multiple of the model's width ({settings.width})"
        )
    return "Bamba"


def config_of(settings: ModelSettings, context_length: int, dtype: torch.dtype) -> JsonObject:
    """The `config.json` of a model, without the ids of its tokenizer.

    Raises:
        ConfigError: No layout fits.
    """
    layout = layout_of(settings)
    kinds = [settings.block(layer) for layer in range(settings.layers)]
    mixers = [settings.mixers(kind)[0] for kind in kinds]
    config: JsonObject = {
        "architectures": [f"{layout}ForCausalLM"],
        "model_type": _TYPES[layout],
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.width,
        "intermediate_size": settings.inner_width,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.key_heads,
        "head_dim": settings.each_head,
        "max_position_embeddings": context_length,
        "hidden_act": "silu",
        "rms_norm_eps": settings.norm_eps,
        # Two places, because older and newer tools look in different ones.
        "rope_theta": settings.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rope_theta},
        "tie_word_embeddings": settings.tied,
        "initializer_range": settings.init_std,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if layout in ("Mistral", "Mixtral"):
        config |= {"sliding_window": mixers[0].sliding_window}
    else:
        config |= {"attention_bias": False, "mlp_bias": False}
    if layout in ("Qwen3Next", "Bamba"):
        # Both rotate a part of each head unless told otherwise.
        config["rope_parameters"] |= {"partial_rotary_factor": 1.0}
        return config | _recurrent_config(settings, layout, mixers)
    return config | _expert_config(settings, layout, kinds)


def _expert_config(
    settings: ModelSettings, layout: Layout, kinds: list[BlockSettings]
) -> JsonObject:
    sparse = next((kind for kind in kinds if kind.experts is not None), None)
    if sparse is None:
        return {}
    width = sparse.expert_width or settings.inner_width
    config: JsonObject = {
        "num_experts_per_tok": sparse.experts_per_token,
        "router_aux_loss_coef": sparse.balance,
    }
    if layout == "Mixtral":
        return {**config, "num_local_experts": sparse.experts, "intermediate_size": width}
    dense = [layer for layer, one in enumerate(kinds) if one.experts is None]
    config |= {
        "num_experts": sparse.experts,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
    }
    return {**config, "decoder_sparse_step": 1, "mlp_only_layers": dense}


def _recurrent_config(
    settings: ModelSettings, layout: Layout, mixers: list[BlockSettings]
) -> JsonObject:
    first = next(mixer for mixer in mixers if mixer.is_recurrent)
    _, heads, width, state, convolution = _shape(settings, first)
    if layout == "Bamba":
        return {
            "attn_layer_indices": [
                layer for layer, mixer in enumerate(mixers) if not mixer.is_recurrent
            ],
            "mamba_n_heads": heads,
            "mamba_d_head": width,
            "mamba_n_groups": 1,
            "mamba_d_state": state,
            "mamba_d_conv": convolution,
            "mamba_expand": heads * width // settings.width,
            "mamba_conv_bias": False,
            "mamba_proj_bias": False,
        }
    return {
        "layer_types": [
            "linear_attention" if mixer.is_recurrent else "full_attention" for mixer in mixers
        ],
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "linear_conv_kernel_dim": convolution,
        "num_experts": 0,
        "mlp_only_layers": list(range(len(mixers))),
    }


def weights_of(settings: ModelSettings, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model under the names of its layout, and in its shapes.

    Args:
        settings: Of the model.
        weights: Its `state_dict()`.

    Raises:
        ConfigError: No layout fits.
    """
    layout = layout_of(settings)
    change = {"Mixtral": _mixtral, "Qwen3Next": _qwen_next, "Bamba": _bamba}.get(layout)
    found: dict[str, Tensor] = {}
    mixers: dict[str, dict[str, Tensor]] = {}
    for name, weight in weights.items():
        prefix, inside, rest = name.partition(".mixer.")
        if inside:
            mixers.setdefault(prefix.replace("blocks", "model.layers"), {})[rest] = weight
        elif (theirs := llama_name(name, settings.layers)) is not None:
            found[theirs] = weight
    if change is not None:
        found = dict(change(settings, name, weight) for name, weight in found.items())
    for layer, mixer in mixers.items():
        if int(layer.rpartition(".")[2]) < settings.layers:
            join = _delta_weights if layout == "Qwen3Next" else _mamba_weights
            found |= {f"{layer}.{name}": weight for name, weight in join(mixer).items()}
    return {name: weight.detach().contiguous() for name, weight in found.items()}


def _renamed(name: str, changes: Mapping[str, str]) -> str:
    for ours, theirs in changes.items():
        name = name.replace(ours, theirs)
    return name


def _mixtral(settings: ModelSettings, name: str, weight: Tensor) -> tuple[str, Tensor]:
    changes = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return _renamed(name, changes), weight


def _bamba(settings: ModelSettings, name: str, weight: Tensor) -> tuple[str, Tensor]:
    changes = {
        "mlp.": "feed_forward.",
        "post_attention_layernorm": "pre_ff_layernorm",
        "model.norm": "model.final_layernorm",
    }
    return _renamed(name, changes), weight


def _qwen_next(settings: ModelSettings, name: str, weight: Tensor) -> tuple[str, Tensor]:
    if "norm" in name:
        return name, weight - 1  # counted from 0
    if name.endswith("q_proj.weight"):
        queries = weight.unflatten(0, (settings.heads, settings.each_head))
        return name, torch.stack([queries, torch.zeros_like(queries)], 1).flatten(0, 2)
    return name, 2 * weight if name.endswith("o_proj.weight") else weight


def _delta_weights(mixer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of each head side by side: its queries, keys, values and gates; its two rates."""
    heads = len(mixer["write.weight"])
    wide, narrow = (
        [mixer[f"{name}.weight"].unflatten(0, (heads, -1)) for name in names]
        for names in (("query", "key", "value", "gate"), ("write", "step"))
    )
    joined = {
        "in_proj_qkvz.weight": torch.cat(wide, 1).flatten(0, 1),
        "in_proj_ba.weight": torch.cat(narrow, 1).flatten(0, 1),
    }
    return {
        f"linear_attn.{name}": weight for name, weight in (joined | _common_weights(mixer)).items()
    }


def _mamba_weights(mixer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    inputs = torch.cat(
        [mixer[f"{name}.weight"] for name in ("gate", "value", "key", "query", "step")]
    )
    joined = {"in_proj.weight": inputs, "D": mixer["skip"], **_common_weights(mixer)}
    return {f"mamba.{name}": weight for name, weight in joined.items()}


def _common_weights(mixer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        "conv1d.weight": mixer["convolution"][:, None],
        "dt_bias": mixer["step_bias"],
        "A_log": mixer["decay_log"],
        "norm.weight": mixer["norm.weight"],
        "out_proj.weight": mixer["output.weight"],
    }
