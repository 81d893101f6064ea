"""A model in the Hugging Face layout, for transformers, vLLM and llama.cpp: weights, tokenizer, template, stop ids.

A `Transformer` becomes a LlamaForCausalLM, or a MistralForCausalLM where it has a sliding window; its first prediction
head is the model, further ones are left out. Logits are the same within rounding.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.chat import Template
from penstock.errors import ConfigError
from penstock.models.language_model import LanguageModel
from penstock.models.layout import llama_name
from penstock.models.transformer import Transformer
from penstock.shards import new_folder, usual_mode
from penstock.tokenizers import Tokenizer

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
"""Variables of a template that transformers fills in from its tokenizer."""


def export(
    model: LanguageModel,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    template: Template | None = None,
    stop_ids: Sequence[int] = (),
    context_length: int = 2048,
) -> tuple[str, ...]:
    """Write a folder that transformers' `from_pretrained` loads.

    Args:
        model: To export; LoRA is merged into it beforehand.
        folder: Where to, new or empty; emptied again if writing fails.
        tokenizer: Its files go along.
        template: Of chats; goes along with the variables it was trained with as defaults.
        stop_ids: Tokens that end a generation; EOS where there are none.
        context_length: Tokens it was trained on at once; a limit in transformers and vLLM.

    Returns:
        What was left out or cannot be read there, for people; nothing if all is well.

    Raises:
        ConfigError: The model has LoRA that is not merged.
        OutputError: The folder holds something, or cannot be made.
        OSError: It cannot be written.
    """
    if model.lora is not None:
        raise ConfigError("export: the model has LoRA beside its weights; merge_lora(model) first")
    with new_folder(folder) as folder:
        # The model last, so that a folder in which something is missing has none.
        if tokenizer is not None:
            _export_tokenizer(tokenizer, folder, context_length)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template_text(template), encoding="utf-8")
        if isinstance(model, Transformer):
            _write_json(folder / "generation_config.json", _generation(tokenizer, list(stop_ids)))
            _export_transformer(model, folder, tokenizer, list(stop_ids), context_length)
        else:
            from penstock.models.huggingface_model import HuggingFaceModel

            assert isinstance(model, HuggingFaceModel)
            model.inner.save_pretrained(folder)
            _write_json(folder / "generation_config.json", _generation(tokenizer, list(stop_ids)))
        usual_mode(*folder.glob("*.safetensors"))
    return tuple(_notices(model, tokenizer))


def _notices(model: LanguageModel, tokenizer: Tokenizer | None) -> Iterator[str]:
    if (further := len(model.prediction_weights) - 1) > 0:
        yield f"{further} further prediction heads are left out: the layout has no place for them"
    if tokenizer is not None and "tokenizer.json" not in tokenizer.source_bytes:
        files = ", ".join(tokenizer.source_bytes)
        yield f"the vocabulary is {tokenizer.kind} ({files}), which penstock reads and transformers may not"


def template_text(template: Template) -> str:
    """A template's text, with its own variables set where whoever renders it does not."""
    own = {name: value for name, value in template.variables.items() if name not in _TOKENS}
    return "".join(f"{{% set {n} = {n} if {n} is defined else {v!r} %}}" for n, v in own.items()) + template.source


def _export_transformer(
    model: Transformer, folder: Path, tokenizer: Tokenizer | None, stop_ids: list[int], context_length: int
) -> None:
    from safetensors.torch import save_file

    weights: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if (exported := llama_name(name, model.settings.layers)) is not None:
            weights[exported] = weight.detach().contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", {**_config(model, context_length), **_ids(tokenizer, stop_ids)})


def _config(model: Transformer, context_length: int) -> dict[str, Any]:
    settings = model.settings
    windowed = settings.sliding_window is not None
    return {
        "architectures": ["MistralForCausalLM" if windowed else "LlamaForCausalLM"],
        "model_type": "mistral" if windowed else "llama",
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
        # Two places, as tools of different ages look in one or the other.
        "rope_theta": settings.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rope_theta},
        "tie_word_embeddings": settings.tied,
        "initializer_range": settings.init_std,
        "dtype": str(model.compute_dtype).removeprefix("torch."),
        **({"sliding_window": settings.sliding_window} if windowed else {"attention_bias": False, "mlp_bias": False}),
    }


def _ids(tokenizer: Tokenizer | None, stop_ids: list[int]) -> dict[str, Any]:
    eos = None if tokenizer is None else tokenizer.eos_id
    return {
        "bos_token_id": None if tokenizer is None else tokenizer.bos_id,
        "eos_token_id": stop_ids or eos,
        "pad_token_id": None if tokenizer is None else tokenizer.pad_id,
    }


def _generation(tokenizer: Tokenizer | None, stop_ids: list[int]) -> dict[str, Any]:
    return {name: value for name, value in _ids(tokenizer, stop_ids).items() if value is not None}


def _export_tokenizer(tokenizer: Tokenizer, folder: Path, context_length: int) -> None:
    tokenizer.save(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)  # it is the run's that counts
    if "tokenizer.json" not in tokenizer.source_bytes:
        return
    texts = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
    named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    own = json.loads(tokenizer.source_bytes.get("tokenizer_config.json", b"{}"))
    # The template of the run goes into its own file, so that there are not two.
    own.pop("chat_template", None)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: texts[token_id] for name, token_id in named.items() if token_id in texts},
        **own,
        "model_max_length": context_length,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
