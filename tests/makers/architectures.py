"""Small random models of every causal architecture of the installed transformers that a few
settings can make small.
"""

from itertools import cycle, islice
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

torch.set_num_threads(1)
VOCABULARY = 258
"""That of `byte_tokenizer("<bos>", "<end>")`."""
LENGTH = 64
"""Tokens of a document at most, where a model has a table of positions."""

_WIDTH = (
    "hidden_size",
    "d_model",
    "n_embd",
    "dim",
    "embedding_size",
    "emb_dim",
    "word_embed_proj_dim",
    "lru_width",
    "attention_hidden_size",
)
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
)
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
    "mamba_expand_heads",
    "linear_num_value_heads",
    "linear_num_heads",
)
_FEED_FORWARD = (
    "intermediate_size",
    "ffn_dim",
    "decoder_ffn_dim",
    "encoder_ffn_dim",
    "ffn_hidden_size",
    "intermediate_size_mlp",
)
_EIGHTS = (
    "head_dim",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "index_head_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_head_dim",
    "mamba_n_heads",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_num_heads",
    "mamba_head_dim",
    "ssm_state_size",
    "state_size",
    "chunk_size",
    "mamba_chunk_size",
    "attention_chunk_size",
    "global_head_dim",
    "hidden_size_per_layer_input",
    "index_topk",
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_EXPERT_WIDTH = (
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "q_lora_rank",
    "kv_lora_rank",
)
_WINDOWS = ("sliding_window", "window_size", "local_attention", "attention_window_size")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
_LAYER_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
_ONES = ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "mamba_n_groups")

_GIVEN: dict[str, Any] = {
    **dict.fromkeys(_WIDTH, 32),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_FEED_FORWARD, 48),
    **dict.fromkeys(_EIGHTS, 8),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_ROUTED, 2),
    **dict.fromkeys(_EXPERT_WIDTH, 16),
    **dict.fromkeys(_WINDOWS, 6),
    **dict.fromkeys(_LENGTHS, LENGTH),
    **dict.fromkeys(_ONES, 1),
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "n_inner": None,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "num_global_key_value_heads": 2,
    "linear_num_key_heads": 2,
    # Keys that no head of an indexer likes all score 0, and which of them a model reads is then up
    # to `topk`.
    "index_n_heads": 16,
    "n_mamba_heads": 2,
    "mamba_expand": 2,
    "mamba_d_ssm": 64,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    "rotary_dim": 4,
    "use_mamba_kernels": False,
    "pad_token_id": 0,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
_SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "minicpm3",
            "youtu",
        ),
        _LATENT,
    ),
    "longcat_flash": _LATENT | {"expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    "bailing_hybrid": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "num_expert_group": 1,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 10000.0}
            for name in ("full_attention", "sliding_attention")
        },
    },
    "diffllama": {"num_key_value_heads": 2},
    "gemma3n_text": {
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": None,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {},
    "mamba2": {"num_heads": 8, "expand": 2, "n_groups": 1},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "mistral": {"head_dim": 8},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "linear_num_value_heads": 4,
        "ple_embed_dim": 32,
        "hc_lowrank": 8,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "roc_bert": {
        "is_decoder": True,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
        "shape_vocab_size": 64,
    },
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "n_mamba_heads": 8,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Model type → settings that the others leave wrong."""
ENCODERS = (
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "prophetnet",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
)
"""They are not causal unless their settings say so."""
VARIANTS = {
    **{f"{kind}-decoder": (kind, {"is_decoder": True}) for kind in ENCODERS},
    "llama-dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
            "max_position_embeddings": 24,
        },
    ),
    "llama-longrope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "factor": 2.0,
                "short_factor": [1.0] * 4,
                "long_factor": [3.0] * 4,
                "original_max_position_embeddings": 24,
                "rope_theta": 10000.0,
            },
            "max_position_embeddings": LENGTH,
        },
    ),
    "gemma3-dynamic": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "max_position_embeddings": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "falcon-alibi": ("falcon", {"alibi": True}),
}
"""Name → (model type, settings) of kinds that are a setting of another's."""

KINDS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) + sorted(VARIANTS)
LARGEST = 2_000_000
"""Parameters of a model that is small."""


def make_small(kind: str, **settings: Any) -> Any:
    """A model of two layers, with weights large enough that everything depends on everything;
    `settings` go first.

    Raises:
        Exception: transformers makes no such model of these settings, or a large one.
    """
    kind, extra = VARIANTS.get(kind, (kind, {}))
    plain = transformers.AutoConfig.for_model(kind)
    fits = {
        name: value for name, value in _GIVEN.items() if name in vars(plain) or name == "vocab_size"
    }
    kinds = {name: [*dict.fromkeys(getattr(plain, name, None) or ())] for name in _LAYER_KINDS}
    most = max(map(len, kinds.values()))
    if most > 1 and kind not in _SPECIAL and "layer_types" not in extra:
        # One layer at least of each kind that the default settings have.
        fits |= {name: [*islice(cycle(each), most)] for name, each in kinds.items() if each}
        fits |= {name: most for name in _LAYERS if name in fits}
    config = transformers.AutoConfig.for_model(
        kind, **(fits | _SPECIAL.get(kind, {}) | extra | settings)
    )
    with torch.device("meta"):
        count = sum(
            weight.numel()
            for weight in transformers.AutoModelForCausalLM.from_config(config).parameters()
        )
    if count > LARGEST:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.ndim > 1 and float(weight.detach().std()) < 0.2:
            torch.nn.init.normal_(weight, std=0.2)
    return model.eval()
