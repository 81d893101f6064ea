"""Initial weights of the transformer, a function of the seed and of each weight's name."""

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.core.randomness import key_for
from penstock.models.ours.transformer import Transformer
from penstock.models.recurrent.mixers import Mixer
from penstock.models.settings import ModelSettings


def empty_transformer(
    settings: ModelSettings, device: torch.device | str, dtype: torch.dtype
) -> Transformer:
    """A transformer with uninitialised weights."""
    with torch.device("meta"), _WithoutInit():
        model = Transformer(settings)

    def allocated(weight: Tensor) -> Tensor:
        # As `to_empty` does, which imports sympy for it.
        return torch.empty(
            weight.shape, dtype=dtype if weight.is_floating_point() else weight.dtype, device=device
        )

    model._apply(allocated)
    return model


@final
class _WithoutInit(TorchFunctionMode):
    """Leaves out `torch.nn.init`, which imports torch's compiler (seconds) to fill weights without
    memory.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Initialise weights; see `drawn_weights`."""
    weights = dict(model.named_parameters())
    for name, values in drawn_weights(model, seed):
        weights[name].copy_(values)


def drawn_weights(
    model: Transformer, seed: int, own: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The initial weights of a model by name, one after the other, on the CPU: norms are 1, all
    others from a normal distribution.

    Args:
        model: Its weights may be anywhere, and are not read.
        seed: Of the draws.
        own: Its weights by the names that they had before LoRA was added; None: it has none.

    Weights that write to the residual stream are smaller by √(2 × layers), so that its variance
    does not grow with depth.

    Source: GPT-2 (Radford et al. 2019), section 2.3.
    """
    settings = model.settings
    for name, module in model.named_modules():
        if isinstance(module, Mixer):
            generator = torch.Generator("cpu").manual_seed(key_for(seed, "weights", name))
            for inside, values in module.drawn(generator):
                yield f"{name}.{inside}", values
    for name, weight in model.named_parameters() if own is None else own.items():
        if name.endswith(("decay_log", "step_bias")):
            continue
        if weight.ndim == 1:
            yield name, torch.ones(weight.shape)
            continue
        writes = name.endswith(("output.weight", "down.weight"))
        std = settings.init_std / (2 * settings.layers) ** 0.5 if writes else settings.init_std
        generator = torch.Generator("cpu").manual_seed(key_for(seed, "weights", name))
        yield name, torch.randn(weight.shape, generator=generator).mul_(std)
