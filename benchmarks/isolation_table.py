"""Which model types of the installed transformers keep the documents of a row apart: the table of docs/isolation.md.

python benchmarks/isolation_table.py [model type …]    prints Markdown; about 10 s on one core, no downloads.

Models are made from small configurations with random weights; a type that cannot be made is left out, and said so on
stderr.
"""

import sys
from typing import Any

import torch
import transformers

from penstock import PenstockError, check_isolation

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {"head_dim": 8}
WINDOW = {"sliding_window": 6}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED_EXPERT = {"shared_expert_intermediate_size": 16}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": WINDOW, "qwen2": {}, "qwen3": HEADS, "gemma": HEADS, "gemma2": HEADS | WINDOW,
    "gemma3_text": HEADS | WINDOW, "llama4_text": HEADS | {"num_local_experts": 2, "intermediate_size_mlp": 48,
    "attention_chunk_size": 8}, "gpt_neox": {}, "gpt2": GPT2, "gptj": GPT2 | {"rotary_dim": 4}, "gpt_neo": {
    "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 6}, "olmo2": {},
    "olmo3": WINDOW, "phi": {}, "phi3": {}, "smollm3": {}, "granite": {}, "starcoder2": {}, "stablelm": {},
    "nemotron": {}, "cohere": {}, "cohere2": WINDOW, "glm4": HEADS, "exaone4": WINDOW, "helium": HEADS,
    "modernbert-decoder": {"local_attention": 12}, "mixtral": LOCAL_EXPERTS, "qwen2_moe": EXPERTS | SHARED_EXPERT,
    "qwen3_moe": EXPERTS | HEADS, "deepseek_v3": LATENT, "gpt_oss": LOCAL_EXPERTS | HEADS | WINDOW,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "bloom": {"n_layer": 2, "n_head": 4}, "falcon": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "mamba": {}, "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2},
    "falcon_mamba": {}, "rwkv": {"attention_hidden_size": 32}, "xlstm": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1,
    "use_mamba_kernels": False, "mamba_d_state": 8, "mamba_dt_rank": 4}, "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA2 | HEADS | {"mamba_d_ssm": 64}, "granitemoehybrid": MAMBA2 | {"layer_types": [
    "mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 48}, "nemotron_h": {},
    "recurrent_gemma": HEADS | {"lru_width": 32, "attention_window_size": 6, "block_types": ["recurrent", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]}, "minimax": LOCAL_EXPERTS | HEADS | {"block_size": 16,
    "layer_types": ["linear_attention", "full_attention"]}, "qwen3_next": EXPERTS | SHARED_EXPERT | HEADS | DELTA,
    "qwen3_5_text": HEADS | DELTA, "olmo_hybrid": {}, "kimi_linear": {},
}  # fmt: skip
"""Model type → settings besides the common ones."""


def main() -> None:
    transformers.logging.set_verbosity_error()
    print("| model type | attention | documents apart? | what was found |\n|---|---|---|---|")
    for kind in sys.argv[1:] or MODELS:
        for attention in ("sdpa", "eager"):
            try:
                model = build(kind, attention)
            except Exception as error:
                print(f"{kind}, {attention}: not made: {str(error).splitlines()[0][:100]}", file=sys.stderr)
                continue
            print(f"| {kind} | {attention} | {' | '.join(verdict(model))} |")


def build(kind: str, attention: str) -> Any:
    """A small model; weights are large, so that everything depends on something."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(COMMON | MODELS[kind]))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.ndim > 1 and float(parameter.detach().std()) < 0.2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def verdict(model: Any) -> tuple[str, str]:
    try:
        report = check_isolation(model)
        return "yes", f"difference {report.difference:.0e}, gradients exactly 0"
    except PenstockError as error:
        text = str(error)
    if "cannot be run" in text:
        return "refuses by itself", text.split("(", 2)[2].split("). ")[0][:90]
    return "**no**", text.split("each other: ")[-1].split(" (rounding")[0].split(". Train")[0]


if __name__ == "__main__":
    main()
