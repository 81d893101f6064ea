"""Tiny models of random weights, large enough that everything depends on everything."""

from pathlib import Path
from typing import Any

import torch

from makers.texts import make_texts
from makers.tokenizers import CHAT_CONTROLS, tiny_tokenizer
from penstock.models import ModelSettings
from penstock.models.building import build_model

# Tests do not depend on the number of cores.
torch.set_num_threads(1)


def tiny_model(
    vocab_size: int, /, *, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any
) -> Any:
    """Our transformer with two layers of width 32."""
    given = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "init_std": 0.2, **settings}
    return build_model(ModelSettings(**given), vocab_size=vocab_size, dtype=dtype, seed=seed)


def tiny_huggingface(
    kind: str = "llama",
    *,
    std: float = 0.2,
    seed: int = 0,
    attention: str | None = None,
    **settings: Any,
) -> Any:
    """A causal language model of transformers with two layers of width 32, in evaluation mode.

    `kind` is its model type; `std` that of its matrices; `attention` its implementation, by default
    its own choice.
    """
    import transformers

    given = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **settings,
    }
    torch.manual_seed(seed)
    chosen = {} if attention is None else {"attn_implementation": attention}
    config = transformers.AutoConfig.for_model(kind, **given)
    model = transformers.AutoModelForCausalLM.from_config(config, **chosen)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=std)
    return model.eval()


def save_tiny_llama(folder: Path) -> None:
    """A Llama of one layer with a tokenizer of chats, as a folder of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer(folder, make_texts(300), 400, CHAT_CONTROLS)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
