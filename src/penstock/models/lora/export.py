"""Exports LoRA as an adapter in peft's format, for `PeftModel.from_pretrained`, vLLM and others.

    FOLDER/adapter_model.safetensors, adapter_config.json
    FOLDER/base/                          the model that it belongs to, where no name of one is given

The adapter on its base gives the logits of the trained model, up to rounding. Embeddings and
modules that were trained next to LoRA are in it: new rows as peft's `trainable_token_indices`, the
rest as `modules_to_save`.
"""  # noqa: E501

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.chat import Template
from penstock.core.errors import ConfigError, MissingExtraError
from penstock.core.folders import may_be_of_hub
from penstock.core.json_values import JsonObject
from penstock.data.stores.files import usual_mode
from penstock.models.exporting import (
    export,
    export_tokenizer,
    output_folder,
    remove_places,
    template_text,
)
from penstock.models.facts import ModelFacts
from penstock.models.lora.lora import is_matrix, lora_weights, remove_lora
from penstock.models.lora.trained_parts import TrainedPart, is_trained_part, trained_parts
from penstock.models.ours.importing import llama_name
from penstock.models.ours.layouts import layout_of
from penstock.models.ours.transformer import Transformer
from penstock.models.stored_dtype import StoredDtype, cast_weights, stored_dtype
from penstock.tokenizers import Tokenizer

if TYPE_CHECKING:
    from penstock.models.language_model import LanguageModel

WEIGHTS = "adapter_model.safetensors"
BASE = "base"
"""Folder for a base without a name."""


def export_adapter(
    model: "LanguageModel",
    output: str | Path,
    *,
    base: str | None = None,
    tokenizer: Tokenizer | None = None,
    template: Template | None = None,
    context_length: int = 2048,
    facts: ModelFacts | None = None,
    dtype: StoredDtype | None = None,
    overwrite: bool = False,
) -> int:
    """Write a model's LoRA in peft's format. The model loses it if its base is written too.

    Args:
        model: The model; its LoRA is not merged.
        output: Target folder, new or empty; emptied again if writing fails.
        base: Hub name of the model that LoRA was added to, or its folder, of which only the name is
            written; None: it is written to `output`/base. A model whose vocabulary grew is not the
            one by that name.
        tokenizer: Its files are exported too.
        template: Chat template; exported with the variables of its training as defaults.
        context_length: As for `export`.
        facts: As for `export`.
        dtype: As for `export`, of the adapter and of a base that is written with it.
        overwrite: Replace an earlier export in the folder.

    Returns:
        Parameters of the adapter.

    Raises:
        ConfigError: The model has no LoRA, or LoRA at matrices that transformers has in another
            form, or trained parts that peft has no format for.
        OutputError: As for `export`.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise MissingExtraError("peft", "lora") from error
    if model.lora is None:
        raise ConfigError(
            "export: the model has no LoRA, so there is no adapter; export the model itself"
        )
    facts = model.facts if facts is None else facts
    weights, targets, parts = _adapter_weights(model), _short_targets(model), _exported_parts(model)
    weights = cast_weights(weights | parts.weights, stored_dtype(dtype))
    layers = [layer for _, layer in _matrices(model, with_lora=True)]
    with output_folder(Path(output), overwrite) as place:
        if tokenizer is not None:
            export_tokenizer(tokenizer, place, context_length, facts)
        if template is not None:
            (place / "chat_template.jinja").write_text(template_text(template), encoding="utf-8")
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=model.lora.rank,
            lora_alpha=model.lora.alpha,  # type: ignore[arg-type]
            target_modules=targets,
            lora_dropout=model.lora.dropout,
            use_rslora=model.lora.rslora,
            fan_in_fan_out=all(layer.fan_in_fan_out for layer in layers),
            **_patterns(model),
            **parts.settings,
            inference_mode=True,
            base_model_name_or_path=base_name(base),
        )
        config.save_pretrained(str(place))
        save_file(weights, place / WEIGHTS, metadata={"format": "pt"})
        usual_mode(place / WEIGHTS)
        if base is None:
            remove_lora(model)
            export(
                model,
                place / BASE,
                tokenizer=tokenizer,
                template=template,
                context_length=context_length,
                facts=facts,
                dtype=dtype,
            )
        remove_places(place)
    return sum(weight.numel() for weight in weights.values())


def base_name(base: str | None) -> str:
    """What an adapter calls its base: a name on the hub, or that of a folder without its place,
    which may change.
    """
    if base is None:
        return BASE
    return Path(base).name if Path(base).is_dir() or not may_be_of_hub(base) else base


def _adapter_weights(model: "LanguageModel") -> dict[str, Tensor]:
    """The LoRA weights by peft's names."""
    found: dict[str, Tensor] = {}
    for name, weight in lora_weights(model.state_dict()).items():
        if is_trained_part(name):
            continue
        module, _, rest = name.partition(".lora_")
        # peft's name of the only adapter, "default", is not in its files.
        found[
            f"base_model.model.{_exported(model, module)}.lora_{rest.replace('.default', '')}"
        ] = weight.cpu()
    return found


def _patterns(model: "LanguageModel") -> JsonObject:
    """Ranks and alphas of their own: as they were given, or for our transformer by the names of the
    exported base.
    """
    assert model.lora is not None
    if not isinstance(model, Transformer):
        return {
            "rank_pattern": dict(model.lora.rank_pattern),
            "alpha_pattern": dict(model.lora.alpha_pattern),
        }
    layers = [(_exported(model, name), layer) for name, layer in _matrices(model, with_lora=True)]
    ranks = {name: layer.r["default"] for name, layer in layers}
    alphas = {name: layer.lora_alpha["default"] for name, layer in layers}
    return {
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != model.lora.rank},
        "alpha_pattern": {
            name: alpha for name, alpha in alphas.items() if alpha != model.lora.alpha
        },
    }


@final
@dataclass(slots=True, kw_only=True)
class _Parts:
    """What was trained next to LoRA, as peft has it."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    settings: JsonObject = field(default_factory=dict)


def _exported_parts(model: Any) -> _Parts:
    """Embeddings and modules that were trained next to LoRA, by peft's names."""
    names = {id(module): name for name, module in model.named_modules()}
    modules: dict[str, list[tuple[str, TrainedPart]]] = {}
    for module, weight, part in trained_parts(model):
        modules.setdefault(names[id(module)], []).append((weight, part))
    found, seen, whole = _Parts(), set[int](), list[str]()
    rows: dict[str, list[int]] = {}
    for name, parts in modules.items():
        exported, module = _exported(model, name, what="is trained"), model.get_submodule(name)
        tied = any(id(part) in seen for _, part in parts)
        seen |= {id(part) for _, part in parts}
        if tied and len(parts) > 1:
            raise ConfigError(
                f"export: {name} shares its matrix with the embedding and has a bias, and "
                "peft has no format for both trained; export with LoRA merged"
            )
        prefix = f"base_model.model.{exported}"
        (weight, part), *others = parts
        if part.rows is not None and not others:
            if not tied:
                rows[exported] = list(range(*part.rows))
                found.weights[f"{prefix}.token_adapter.trainable_tokens_delta"] = (
                    part.trained.detach().cpu()
                )
            continue
        # A bias has no rows in peft, so a head with one is written whole.
        for weight, _ in parts:
            found.weights[f"{prefix}.{weight}"] = getattr(module, weight).detach().cpu().clone()
        # Both names of a shared matrix: peft knows by its name that the output is tied to the
        # embedding.
        whole.append(exported)
        if tied:
            found.settings["ensure_weight_tying"] = True
    if (
        isinstance(model, Transformer)
        and model.unembedding is None
        and _exported(model, "embedding") in whole
    ):
        # It is one module here, and two in transformers.
        found.settings["ensure_weight_tying"] = True
        found.weights["base_model.model.lm_head.weight"] = (
            model.embedding.weight.detach().cpu().clone()
        )
    found.settings |= {"modules_to_save": whole} if whole else {}
    found.settings |= {"trainable_token_indices": rows} if rows else {}
    return found


def _short_targets(model: "LanguageModel") -> list[str]:
    """Last parts of the names of the matrices with LoRA; whole names if other matrices have the
    same last part.
    """
    chosen = {_exported(model, name) for name, _ in _matrices(model, with_lora=True)}
    others = [name for name, _ in _matrices(model, with_lora=False)]
    ends = {name.rsplit(".", 1)[-1] for name in chosen}
    known = {_exported(model, name, strict=False).rsplit(".", 1)[-1] for name in others}
    return sorted(chosen if ends & known else ends)


def _matrices(model: "LanguageModel", *, with_lora: bool) -> Iterator[tuple[str, Any]]:
    """Matrices of the model, those with LoRA or the others."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    assert isinstance(model, nn.Module)
    layers = {name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{layer}.") for layer in layers)
        if name in layers if with_lora else is_matrix(module) and not inside:
            yield name, module


def _exported(
    model: "LanguageModel", name: str, *, strict: bool = True, what: str = "has LoRA"
) -> str:
    """A module's name in the exported base."""
    if not isinstance(model, Transformer):
        return name.removeprefix("inner.")
    if layout_of(model.settings) in ("Qwen3Next", "Bamba"):
        raise ConfigError(
            "export: the layout of models with recurrent blocks joins and scales matrices, so "
            "an adapter cannot hold their LoRA; export with LoRA merged"
        )
    try:
        exported = (
            None if ".experts." in name else llama_name(f"{name}.weight", model.settings.layers)
        )
    except KeyError:
        exported = None
    if exported is None:
        if strict:
            raise ConfigError(
                f"export: {name} {what}, but the exported model has no matrix of its own for "
                "it, so an adapter cannot hold it; export with LoRA merged, or train with "
                "lora.targets query, key, value, output"
            )
        return name
    return exported.removesuffix(".weight")
