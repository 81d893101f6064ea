"""Exports a model in the Hugging Face layout (weights, tokenizer, template, stop ids), for transformers and vLLM.

The folder also works with llama.cpp. A `Transformer` becomes a LlamaForCausalLM, a MistralForCausalLM if it has a
sliding window, or a Qwen3ForCausalLM if it normalises queries and keys; with experts a MixtralForCausalLM, or a
Qwen3MoeForCausalLM. Only its first prediction head and the main mixers of stochastic blocks are exported. Logits are
equal up to rounding.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from penstock.chat import Template
from penstock.core.errors import ConfigError, OutputError
from penstock.core.folders import local_path
from penstock.media.processor import Processor
from penstock.models.importing import llama_name
from penstock.models.language_model import LanguageModel
from penstock.models.settings import ModelSettings
from penstock.models.transformer import Transformer
from penstock.shards.files import new_folder, usual_mode
from penstock.tokenizers import Tokenizer

EXPORT = "export.json"
"""In an exported folder: the names of the files that `export` wrote, so that `overwrite` removes only those."""

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
"""Template variables that transformers fills in from its tokenizer."""


def export(
    model: LanguageModel,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    template: Template | None = None,
    processor: Processor | None = None,
    stop_ids: Sequence[int] = (),
    context_length: int = 2048,
    overwrite: bool = False,
) -> tuple[str, ...]:
    """Write a folder that transformers' `from_pretrained` loads.

    Args:
        model: The model; its LoRA must be merged first.
        folder: Target folder, new or empty; emptied again if writing fails.
        overwrite: Replace an earlier export in the folder, which stays complete if writing fails.
        tokenizer: Its files are exported too.
        processor: Of the model's images; its files are exported too.
        template: Chat template; exported with the variables of its training as defaults.
        stop_ids: Tokens that end a generation; empty: EOS.
        context_length: Tokens of a training sequence; a limit in transformers and vLLM.

    Returns:
        Messages about what was left out or may not be readable elsewhere.

    Raises:
        ConfigError: The model has LoRA that is not merged.
        OutputError: The folder holds an earlier export and `overwrite` is false, or other files, or cannot be made.
        OSError: It cannot be written.
    """
    if model.lora is not None:
        raise ConfigError("export: the model has LoRA that is not merged; call merge_lora(model) first")
    if isinstance(model, Transformer) and model.vision is not None:
        raise ConfigError("export: our vision tower has no layout that transformers knows; train hf:path instead")
    if isinstance(model, Transformer):
        refuse_blocks(model.settings)
    with output_folder(Path(folder), overwrite) as folder:
        # The model comes last, so that an incomplete folder has none; the processor first, as it has a tokenizer, too.
        if processor is not None:
            processor.save(folder)
        if tokenizer is not None:
            export_tokenizer(tokenizer, folder, context_length)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template_text(template), encoding="utf-8")
        if isinstance(model, Transformer):
            _write_json(folder / "generation_config.json", _generation(tokenizer, list(stop_ids)))
            _export_transformer(model, folder, tokenizer, list(stop_ids), context_length)
        else:
            from penstock.models.huggingface_model import HuggingFaceModel

            if not isinstance(model, HuggingFaceModel):
                raise ConfigError(
                    "export: a model of your own has no layout that transformers knows; read its weights from "
                    "RUN/checkpoints/step-…/model/model.safetensors"
                )
            model.inner.save_pretrained(folder)
            _write_json(folder / "generation_config.json", _generation(tokenizer, list(stop_ids)))
        usual_mode(*folder.glob("*.safetensors"))
    return tuple(_notices(model, tokenizer))


def refuse_blocks(settings: ModelSettings) -> None:
    """Refuse blocks that no architecture of transformers has.

    Raises:
        ConfigError: There are recurrences, blocks of different kinds, or logits with a soft cap.
    """
    kinds = [settings.block(layer) for layer in range(settings.layers)]
    mixers = {settings.mixers(kind)[0] for kind in kinds}
    recurrent = sorted({mixer.mixer for mixer in mixers if mixer.is_recurrent})
    if recurrent:
        raise ConfigError(
            f"export: our blocks with {', '.join(recurrent)} have no layout that transformers knows; train hf:path "
            "with a model of that kind instead"
        )
    attention = {(mixer.sliding_window, mixer.qk_norm) for mixer in mixers}
    if len(attention) > 1:
        raise ConfigError("export: attention that differs from block to block has no layout that we write")
    [(window, qk_norm)] = attention
    if qk_norm and window is not None:
        raise ConfigError("export: qk_norm with a sliding window has no layout that we write")
    for name in ("attention_softcap", "logit_softcap"):
        if getattr(settings, name) is not None:
            raise ConfigError(f"export: {name} has no layout that we write")
    experts = {(kind.experts, kind.experts_per_token, kind.expert_width) for kind in kinds}
    sparse = [kind for kind in experts if kind[0] is not None]
    if len(sparse) > 1 or (len(experts) > len(sparse) > 0 and not qk_norm):
        raise ConfigError(
            "export: experts that differ from block to block have no layout that we write; blocks without experts "
            "among them have one with qk_norm only"
        )


def check_output(folder: Path, overwrite: bool) -> tuple[str, ...]:
    """Names of the files of an earlier export that may be replaced; empty if the folder is new or empty.

    Raises:
        OutputError: The folder holds an earlier export and `overwrite` is false, or other files.
        ConfigError: It is a URL.
    """
    folder = local_path(folder, "an output folder")
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: is a file; name a folder")
    names = sorted(os.listdir(folder)) if folder.exists() else []
    if not names:
        return ()
    if EXPORT not in names:
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        raise OutputError(f"{folder}: holds other files ({shown}); name an empty or a new folder")
    if not overwrite:
        raise OutputError(f"{folder}: holds an earlier export; choose another folder, or set overwrite to replace it")
    try:
        files = tuple(json.loads((folder / EXPORT).read_bytes())["files"])
        if all((folder / name).resolve().is_relative_to(folder.resolve()) for name in files):
            return files
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise OutputError(f"{folder / EXPORT}: is damaged, so the earlier export cannot be replaced; choose another folder")


@contextmanager
def output_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """The folder to write to; in place of an earlier export, one that replaces it once it is complete."""
    earlier = check_output(folder, overwrite)
    if not earlier:
        with new_folder(folder) as place:
            yield place
            _write_names(place, _files(place))
        return
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        place = Path(temporary)
        yield place
        _replace(folder, place, earlier)


def _replace(folder: Path, place: Path, earlier: Sequence[str]) -> None:
    """Replace the files of an earlier export by those of `place`; can be repeated if it was killed meanwhile."""
    files = _files(place)
    foreign = [name for name in files if name not in earlier and (folder / name).exists()]
    if foreign:
        raise OutputError(f"{folder / foreign[0]}: was not written by the earlier export; choose another folder")
    _write_names(folder, sorted({*earlier, *files}))
    for name in earlier:
        (folder / name).unlink(missing_ok=True)
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(place / name, folder / name)
    _write_names(folder, files)


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _write_names(folder: Path, names: Sequence[str]) -> None:
    _write_json(folder / EXPORT, {"files": list(names)})


def _notices(model: LanguageModel, tokenizer: Tokenizer | None) -> Iterator[str]:
    if (further := len(model.prediction_weights) - 1) > 0:
        yield f"{further} further prediction heads are left out: the layout does not support them"
    if isinstance(model, Transformer) and model.settings.is_stochastic:
        yield "stochastic blocks are exported with their main mixer; the other choices are left out"
    if tokenizer is not None and "tokenizer.json" not in tokenizer.source_bytes:
        files = ", ".join(tokenizer.source_bytes)
        yield f"the vocabulary is {tokenizer.kind} ({files}), which penstock reads and transformers may not"


def template_text(template: Template) -> str:
    """A template's text, with defaults for its own variables."""
    own = {name: value for name, value in template.variables.items() if name not in _TOKENS}
    return "".join(f"{{% set {n} = {n} if {n} is defined else {v!r} %}}" for n, v in own.items()) + template.source


def _export_transformer(
    model: Transformer, folder: Path, tokenizer: Tokenizer | None, stop_ids: list[int], context_length: int
) -> None:
    from safetensors.torch import save_file

    config = _config(model, context_length)
    weights: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if (exported := llama_name(name, model.settings.layers)) is not None:
            if config["model_type"] == "mixtral":
                exported = _mixtral_name(exported)
            weights[exported] = weight.detach().contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", {**config, **_ids(tokenizer, stop_ids)})


def _mixtral_name(name: str) -> str:
    for ours, theirs in (("mlp.", "block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        name = name.replace(ours, theirs)
    return name


def _config(model: Transformer, context_length: int) -> dict[str, Any]:
    settings = model.settings
    kinds = [settings.block(layer) for layer in range(settings.layers)]
    attention = settings.mixers(kinds[0])[0]
    windowed, sparse = attention.sliding_window is not None, next((kind for kind in kinds if kind.experts), None)
    if sparse is not None:
        name, kind = ("Qwen3Moe", "qwen3_moe") if attention.qk_norm else ("Mixtral", "mixtral")
    else:
        name = "Mistral" if windowed else "Qwen3" if attention.qk_norm else "Llama"
        kind = name.lower()
    config: dict[str, Any] = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
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
        "dtype": str(model.compute_dtype).removeprefix("torch."),
    }
    if windowed or kind == "mixtral":
        config |= {"sliding_window": attention.sliding_window}
    else:
        config |= {"attention_bias": False, "mlp_bias": False}
    if sparse is not None:
        config |= {"num_experts_per_tok": sparse.experts_per_token, "router_aux_loss_coef": sparse.balance}
        width = sparse.expert_width or settings.inner_width
        if kind == "mixtral":
            return config | {"num_local_experts": sparse.experts, "intermediate_size": width}
        dense = [layer for layer, one in enumerate(kinds) if one.experts is None]
        config |= {"num_experts": sparse.experts, "moe_intermediate_size": width, "norm_topk_prob": True}
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    return config


def _ids(tokenizer: Tokenizer | None, stop_ids: list[int]) -> dict[str, Any]:
    eos = None if tokenizer is None else tokenizer.eos_id
    return {
        "bos_token_id": None if tokenizer is None else tokenizer.bos_id,
        "eos_token_id": stop_ids or eos,
        "pad_token_id": None if tokenizer is None else tokenizer.pad_id,
    }


def _generation(tokenizer: Tokenizer | None, stop_ids: list[int]) -> dict[str, Any]:
    return {name: value for name, value in _ids(tokenizer, stop_ids).items() if value is not None}


def export_tokenizer(tokenizer: Tokenizer, folder: Path, context_length: int) -> None:
    """Write a tokenizer's files, and the settings that transformers reads next to them."""
    tokenizer.save(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)  # the run's template is written instead
    if "tokenizer.json" not in tokenizer.source_bytes:
        return
    texts = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
    named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    own = json.loads(tokenizer.source_bytes.get("tokenizer_config.json", b"{}"))
    # The run's template goes into its own file; there must not be two.
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
