"""LoRA through peft: small matrices beside frozen ones are all that trains, and are merged into them for export.

Source: LoRA, arXiv:2106.09685. First weights are a function of the seed and of each matrix's name, drawn on the CPU, as
those of models are. `LoraSettings` can be read without torch and peft.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from penstock.errors import ConfigError, MissingExtraError
from penstock.randomness import key_for

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.models.language_model import LanguageModel

MOST_RANK = 1 << 16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """What is trained beside a frozen model."""

    rank: int = 8
    """Columns and rows between the two small matrices."""
    alpha: float = 16.0
    """What they add counts alpha / rank."""
    targets: tuple[str, ...] = ()
    """Last parts of the names of the matrices that get them, such as query or q_proj; empty: all but the output."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MOST_RANK or not 0 < self.alpha < float("inf"):
            raise ConfigError(
                f"lora: rank must be 1 to {MOST_RANK:,} and alpha above 0; got {self.rank} and {self.alpha}"
            )


def add_lora(model: "LanguageModel", settings: LoraSettings, *, seed: int = 0) -> None:
    """Freeze a model and put LoRA beside its matrices, in place; it computes what it did before.

    Raises:
        ConfigError: It has LoRA already, or no matrices of these names.
        MissingExtraError: peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtraError("peft", "lora") from error
    import torch

    if model.lora is not None:
        raise ConfigError("the model has LoRA already; merge_lora(model) makes room for another")
    names = _targets(model, settings.targets)
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=names)  # type: ignore[arg-type]
    inject_adapter_in_model(config, model)  # type: ignore[arg-type]
    for name, weight in lora_weights(model.state_dict()).items():
        if "lora_A" in name:
            generator = torch.Generator("cpu").manual_seed(key_for(seed, "lora", name))
            drawn = torch.empty(weight.shape)
            torch.nn.init.kaiming_uniform_(drawn, a=5**0.5, generator=generator)
            with torch.no_grad():
                weight.copy_(drawn)
    model.lora = settings


def merge_lora(model: "LanguageModel") -> None:
    """Add LoRA's matrices to those they stand beside, in place; all weights can be trained again."""
    for parent, name, layer in list(_layers(model)):
        layer.merge()
        setattr(parent, name, layer.get_base_layer())
    for weight in model.parameters():
        weight.requires_grad_(True)
    model.lora = None


def lora_weights(weights: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """Those of a model's weights that are LoRA's; views, which share memory with the model where `weights` do."""
    return {name: weight.detach().contiguous() for name, weight in weights.items() if ".lora_" in name}


def without_lora(weights: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """The others, under the names that they have without LoRA."""
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
        raise ConfigError(f"lora.targets {list(wanted)} fit no matrix of the model; known: {', '.join(ends)}")
    return found


def _layers(model: Any) -> Iterator[tuple[Any, str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BaseTunerLayer):
                yield parent, name, child
