"""Weights that are trained next to LoRA: rows of an embedding, or whole weights, each next to its
frozen original.

A part is a parametrization of torch: whoever reads the weight gets the original with the trained
rows in it. So the original cannot move, neither by gradients nor by weight decay, and the optimizer
holds a state for the trained rows only. A weight that several modules share has one part.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

_TRAINED = re.compile(r"\.parametrizations\.(\w+)\.0\.trained$")
_ORIGINAL = re.compile(r"\.parametrizations\.(\w+)\.original$")


@final
class TrainedPart(nn.Module):
    """Rows of a weight that are trained, or all of it.

    Args:
        original: The weight.
        rows: The first row, and that after the last one; None: the whole weight.
    """

    def __init__(self, original: Tensor, rows: tuple[int, int] | None) -> None:
        super().__init__()
        self.rows = rows
        self.off = False
        value = original.detach() if rows is None else original.detach()[rows[0] : rows[1]]
        self.trained = nn.Parameter(value.clone())

    def forward(self, original: Tensor) -> Tensor:
        """The weight with the trained rows in it."""
        if self.off:
            return original
        if self.rows is None:
            return self.trained
        first, end = self.rows
        return torch.cat([original[:first], self.trained, original[end:]])


def train_part(
    model: nn.Module, weights: Iterable[nn.Parameter], rows: tuple[int, int] | None
) -> None:
    """Train parts of weights next to the weights themselves, which are frozen; for all modules that
    share them.
    """
    parts = {id(weight): TrainedPart(weight, rows) for weight in weights}
    for module in list(model.modules()):
        if isinstance(module, parametrize.ParametrizationList):
            continue
        for name, weight in list(module.named_parameters(recurse=False)):
            if id(weight) in parts:
                weight.requires_grad_(False)
                parametrize.register_parametrization(module, name, parts[id(weight)])


def trained_parts(model: Any) -> Iterator[tuple[nn.Module, str, TrainedPart]]:
    """(module, name of its weight, part) of all parts of a model; a shared one comes once for each
    module.
    """
    for module in list(model.modules()):
        if not parametrize.is_parametrized(module):
            continue
        for name, listed in list(module.parametrizations.items()):
            if isinstance(listed[0], TrainedPart):
                yield module, name, listed[0]


def remove_parts(model: nn.Module, *, keep: bool) -> None:
    """Take all parts out of a model, in place; with `keep` their values replace those of the
    original weights.
    """
    for module, name, part in list(trained_parts(model)):
        if keep:
            original = module.parametrizations[name].original  # type: ignore[union-attr, index]
            first, end = part.rows or (0, None)
            with torch.no_grad():
                (original if part.rows is None else original[first:end]).copy_(part.trained)
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)


def is_trained_part(name: str) -> bool:
    """Whether a weight of this name is the trained part of another."""
    return _TRAINED.search(name) is not None


def weight_of(name: str) -> str:
    """Name of the weight that a trained part, or the original next to it, stands for; other names
    stay.
    """
    return _ORIGINAL.sub(r".\1", _TRAINED.sub(r".\1", name))


def num_rows(table: nn.Module) -> int:
    """Rows of an embedding, without making the weight of one that is trained in part."""
    if parametrize.is_parametrized(table, "weight"):
        return len(table.parametrizations["weight"].original)  # type: ignore[union-attr, index]
    weight: Tensor = table.weight  # type: ignore[assignment]
    return len(weight)
