"""LoRA through peft: only small matrices next to frozen ones are trained; for export they are
merged.

Source: LoRA, arXiv:2106.09685; rsLoRA, arXiv:2312.03732. Initial weights are a function of the seed
and of each matrix's name, drawn on the CPU, like those of models. Embeddings and whole modules can
be trained next to it (`trained_parts`).
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError, MissingExtraError
from penstock.core.randomness import key_for
from penstock.models.four_bits import dequantise, has_four_bits, quantise, shapes_alone
from penstock.models.lora.settings import LoraSettings

if TYPE_CHECKING:
    from peft.tuners import tuners_utils
    from torch import Tensor, nn

    from penstock.models.language_model import LanguageModel


def add_lora(model: "LanguageModel", settings: LoraSettings, *, seed: int = 0) -> None:
    """Freeze a model and add LoRA to its matrices, in place; its output does not change.

    That of a model without weights has none either; see `drawn_lora`.

    Raises:
        ConfigError: It already has LoRA, or no matrices of these names.
        MissingExtraError: peft, or what it is to be quantised with, is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtraError("peft", "lora") from error
    import torch

    from penstock.models.on_meta import parameters_on_meta

    if model.lora is not None:
        raise ConfigError("the model already has LoRA; call merge_lora(model) first")
    if (module := model.lora_module) is None:
        raise ConfigError(
            "lora: a model of your own has none here; train a transformer of ours or one of "
            "transformers"
        )
    saved = _modules(model, settings.modules_to_save)
    names = _targets(model, settings, saved)
    if settings.quantize is not None and not has_four_bits(model):
        quantise(model, {one for _, one in saved})
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        target_modules=names,
        lora_dropout=settings.dropout,
        use_rslora=settings.rslora,
        rank_pattern=dict(settings.rank_pattern),
        alpha_pattern=dict(settings.alpha_pattern),
    )
    weightless = next(module.parameters()).is_meta
    placed = parameters_on_meta() if weightless else nullcontext()
    with warnings.catch_warnings(), shapes_alone(), placed:
        # Of each matrix that is stored transposed (Conv1D), which peft then sets right.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        inject_adapter_in_model(config, module)
    for _, _, layer in _layers(model):
        # Its dropout begins in training mode.
        layer.train(model.training)  # type: ignore[attr-defined]
    if not weightless:
        weights = dict(model.named_parameters())
        with torch.no_grad():
            for name, drawn in drawn_lora(model, seed):
                weights[name].copy_(drawn)
    _train_embeddings(model, settings)
    _train_modules(model, [name for name, _ in saved])
    model.lora = settings


def drawn_lora(model: "LanguageModel", seed: int) -> "Iterator[tuple[str, Tensor]]":
    """Initial values of a model's LoRA that are not 0, by name, one after the other, on the CPU.
    The model's own may be anywhere, and are not read.
    """
    import torch

    for name, weight in model.named_parameters():
        if ".lora_A" in name:
            generator = torch.Generator("cpu").manual_seed(key_for(seed, "lora", name))
            drawn = torch.empty(weight.shape)
            torch.nn.init.kaiming_uniform_(drawn, a=5**0.5, generator=generator)
            yield name, drawn


def merge_lora(model: "LanguageModel") -> None:
    """Merge LoRA into the model's matrices, in place; all weights become trainable again.

    Matrices in 4 bits are dequantised first: what LoRA adds would be lost in their rounding.
    """
    dequantise(model)
    for _, _, layer in _layers(model):
        layer.merge()
    settle_parts(model)
    remove_lora(model)


def settle_parts(model: "LanguageModel") -> None:
    """Write embeddings and modules that were trained next to LoRA into the model, in place and
    exactly; LoRA stays.
    """
    from penstock.models.lora.trained_parts import remove_parts

    remove_parts(model, keep=True)  # type: ignore[arg-type]


def remove_lora(model: "LanguageModel") -> None:
    """Take LoRA out of a model, in place, so that it is what it was before; all weights become
    trainable again.
    """
    from penstock.models.lora.trained_parts import remove_parts

    remove_parts(model, keep=False)  # type: ignore[arg-type]
    for parent, name, layer in list(_layers(model)):
        setattr(parent, name, layer.get_base_layer())
    # By it peft knows that a model has adapters.
    if model.lora_module is not None:
        vars(model.lora_module).pop("peft_config", None)
    for weight in model.parameters():
        weight.requires_grad_(True)
    model.lora = None


@contextmanager
def lora_switched_off(model: "LanguageModel") -> Iterator[None]:
    """Inside, the model computes what it would without LoRA: with the weights that it had
    before.
    """
    from penstock.models.lora.trained_parts import trained_parts

    layers = [layer for _, _, layer in _layers(model)]
    parts = [part for _, _, part in trained_parts(model)]

    def switch(off: bool) -> None:
        for layer in layers:
            layer._disable_adapters = off
        for part in parts:
            part.off = off

    switch(True)
    try:
        yield
    finally:
        switch(False)


def is_adapter_weight(name: str) -> bool:
    """Whether a weight of this name is trained next to the model's own: of LoRA, or a part of
    another weight.
    """
    from penstock.models.lora.trained_parts import is_trained_part

    return ".lora_" in name or is_trained_part(name)


def lora_weights(weights: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """The weights that are trained next to the model's own; they share memory with the model if
    `weights` do.

    One that several modules share comes once, under its first name.
    """
    found = {
        name: weight.detach().contiguous()
        for name, weight in weights.items()
        if is_adapter_weight(name)
    }
    first = {weight.data_ptr(): name for name, weight in reversed(found.items())}
    return {name: weight for name, weight in found.items() if first[weight.data_ptr()] == name}


def without_lora(weights: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """The other weights, under their names without LoRA."""
    from penstock.models.lora.trained_parts import weight_of

    others = {name: weight for name, weight in weights.items() if not is_adapter_weight(name)}
    return {
        weight_of(name.replace(".base_layer.", ".")): weight.detach().contiguous()
        for name, weight in others.items()
    }


def _module(model: "LanguageModel") -> "nn.Module":
    """The module of a model that may have LoRA."""
    assert model.lora_module is not None
    return model.lora_module


def _targets(
    model: "LanguageModel", settings: LoraSettings, saved: Sequence[tuple[str, object]]
) -> list[str]:
    """Names of the matrices that get LoRA, as peft sees them."""
    head, wanted = model.get_output_embeddings(), settings.targets
    known = {
        name: module
        for name, module in _module(model).named_modules()
        if is_matrix(module) and module is not head
    }
    whole = [
        name for name in known if any(name == one or name.startswith(f"{one}.") for one, _ in saved)
    ]
    found = [name for name in known if name not in whole and (not wanted or name.endswith(wanted))]
    if clash := [name for name in whole if wanted and name.endswith(wanted)]:
        raise ConfigError(f"lora: {clash[0]} is in targets and in modules_to_save; choose one")
    if not found:
        ends = sorted({name.rsplit(".", 1)[-1] for name in known})
        there = (
            f"known: {', '.join(ends)}"
            if ends
            else "it has no linear layers, which alone can have LoRA here"
        )
        raise ConfigError(f"lora.targets {list(wanted)} match no matrix of the model; {there}")
    for which in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(settings, which):
            # As peft compares them.
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in found):
                raise ConfigError(
                    f"lora.{which}: {pattern!r} fits no matrix with LoRA; there are, among others, "
                    f"{', '.join(found[:: max(1, len(found) // 6)])}"
                )
    return found


def is_matrix(module: "nn.Module") -> bool:
    """Whether LoRA can be added: a linear layer, also of GPT-2's kind, whose weight is
    transposed.
    """
    from torch.nn import Linear

    if isinstance(module, Linear):
        return True
    is_transposed = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    return is_transposed and module.weight.ndim == 2  # type: ignore[return-value]


def _modules(model: "LanguageModel", wanted: tuple[str, ...]) -> list[tuple[str, "nn.Module"]]:
    """The modules with weights that are trained whole."""
    named = list(_module(model).named_modules())
    chosen = [name for name, _ in named if name and wanted and name.endswith(wanted)]
    for one in wanted:
        if not any(name.endswith(one) for name in chosen):
            ends = sorted(
                {
                    name.rsplit(".", 1)[-1]
                    for name, _ in named
                    if not name.rsplit(".", 1)[-1].isdigit()
                }
                - {""}
            )
            raise ConfigError(
                f"lora.modules_to_save: {one!r} is the end of no module's name; known: "
                f"{', '.join(ends)}"
            )
    return [
        (name, module)
        for name, module in named
        if any(name == one or name.startswith(f"{one}.") for one in chosen)
        and next(module.parameters(recurse=False), None) is not None
    ]


def _train_modules(model: "LanguageModel", names: Sequence[str]) -> None:
    from penstock.models.lora.trained_parts import train_part

    if names:
        # Those of an embedding that is trained already are parametrizations of it.
        modules = dict(_module(model).named_modules())
        weights = [weight for name in names for weight in modules[name].parameters(recurse=False)]
        train_part(_module(model), weights, None)


def _train_embeddings(model: "LanguageModel", settings: LoraSettings) -> None:
    from penstock.models.lora.trained_parts import train_part

    if settings.train_embeddings is None:
        return
    inner, head = _module(model), model.get_output_embeddings()
    tables = [model.get_input_embeddings(), *([] if head is None else [head])]
    weights = [weight for table in tables for weight in table.parameters(recurse=False)]
    if settings.train_embeddings == "all":
        train_part(inner, weights, None)
        return
    if model.new_rows is None:
        raise ConfigError(
            "lora.train_embeddings: new, but the tokenizer of the data has no entries that "
            "the model's had not; leave it out, or set all"
        )
    chosen = {id(module) for _, module in _modules(model, settings.modules_to_save)}
    if any(id(table) in chosen for table in tables):
        raise ConfigError(
            "lora: modules_to_save trains whole embeddings, and train_embeddings: new only "
            "their new rows; choose one"
        )
    train_part(inner, weights, (model.new_rows.first, model.new_rows.end))


def _layers(
    model: "LanguageModel",
) -> "Iterator[tuple[nn.Module, str, tuners_utils.BaseTunerLayer]]":
    from peft.tuners.tuners_utils import BaseTunerLayer

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BaseTunerLayer):
                yield parent, name, child
