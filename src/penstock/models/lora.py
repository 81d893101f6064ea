"""LoRA through peft: only small matrices next to frozen ones are trained; for export they are merged.

Source: LoRA, arXiv:2106.09685. Initial weights are a function of the seed and of each matrix's name, drawn on the CPU,
like those of models. `LoraSettings` can be read without torch and peft.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from penstock.core.errors import ConfigError, MissingExtraError
from penstock.core.randomness import key_for

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.models.language_model import LanguageModel

MOST_RANK = 1 << 16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Small matrices that are trained next to a frozen model."""

    rank: int = 8
    """Inner dimension of the two small matrices."""
    alpha: float = 16.0
    """Their product is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Matrices that get LoRA, by the last part of their name, such as query or q_proj; empty: all but the output."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MOST_RANK or not 0 < self.alpha < float("inf"):
            raise ConfigError(
                f"lora: rank must be 1 to {MOST_RANK:,} and alpha above 0; got {self.rank} and {self.alpha}"
            )


def add_lora(model: "LanguageModel", settings: LoraSettings, *, seed: int = 0) -> None:
    """Freeze a model and add LoRA to its matrices, in place; its output does not change.

    Raises:
        ConfigError: It already has LoRA, or no matrices of these names.
        MissingExtraError: peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtraError("peft", "lora") from error
    import torch

    if model.lora is not None:
        raise ConfigError("the model already has LoRA; call merge_lora(model) first")
    if not (hasattr(model, "inner") or hasattr(model, "unembedding")):
        raise ConfigError("lora: a model of your own has none here; train a transformer of ours or one of transformers")
    names = [name.removeprefix("inner.") for name in _targets(model, settings.targets)]
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=names)  # type: ignore[arg-type]
    # A model of transformers itself, not what wraps it: peft reads its attributes.
    inject_adapter_in_model(config, getattr(model, "inner", model))  # type: ignore[arg-type]
    for name, weight in lora_weights(model.state_dict()).items():
        if "lora_A" in name:
            generator = torch.Generator("cpu").manual_seed(key_for(seed, "lora", name))
            drawn = torch.empty(weight.shape)
            torch.nn.init.kaiming_uniform_(drawn, a=5**0.5, generator=generator)
            with torch.no_grad():
                weight.copy_(drawn)
    model.lora = settings


def merge_lora(model: "LanguageModel") -> None:
    """Merge LoRA into the model's matrices, in place; all weights become trainable again."""
    for _, _, layer in _layers(model):
        layer.merge()
    remove_lora(model)


def remove_lora(model: "LanguageModel") -> None:
    """Take LoRA out of a model, in place, so that it is what it was before; all weights become trainable again."""
    for parent, name, layer in list(_layers(model)):
        setattr(parent, name, layer.get_base_layer())
    # By it peft knows that a model has adapters.
    vars(getattr(model, "inner", model)).pop("peft_config", None)
    for weight in model.parameters():
        weight.requires_grad_(True)
    model.lora = None


@contextmanager
def lora_switched_off(model: "LanguageModel") -> Iterator[None]:
    """Inside, the model computes what it would without LoRA: with the weights that it had before."""
    layers = [layer for _, _, layer in _layers(model)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def lora_weights(weights: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """The LoRA weights among a model's weights; they share memory with the model if `weights` do."""
    return {name: weight.detach().contiguous() for name, weight in weights.items() if ".lora_" in name}


def without_lora(weights: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """The other weights, under their names without LoRA."""
    others = {name: weight for name, weight in weights.items() if ".lora_" not in name}
    return {name.replace(".base_layer.", "."): weight.detach().contiguous() for name, weight in others.items()}


def _targets(model: "LanguageModel", wanted: tuple[str, ...]) -> list[str]:
    from torch import nn

    inner = getattr(model, "inner", None)
    head = model.unembedding if inner is None else inner.get_output_embeddings()  # type: ignore[attr-defined]
    known = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    found = [name for name in known if not wanted or name.endswith(wanted)]
    if not found:
        ends = sorted({name.rsplit(".", 1)[-1] for name in known})
        raise ConfigError(f"lora.targets {list(wanted)} match no matrix of the model; known: {', '.join(ends)}")
    return found


def _layers(model: Any) -> Iterator[tuple[Any, str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BaseTunerLayer):
                yield parent, name, child
