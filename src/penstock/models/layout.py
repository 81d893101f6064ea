"""Names of weights: ours, and those of the Llama layout of Hugging Face, which many tools read."""

import re

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
}
_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "unembedding.weight": "lm_head.weight",
}


def llama_name(name: str, layers: int) -> str | None:
    """The name in the Llama layout of one of our weights; None for those of further prediction heads."""
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if block is None:
        return _OUTSIDE[name]
    return f"model.layers.{block[1]}.{_BLOCK[block[2]]}" if int(block[1]) < layers else None
