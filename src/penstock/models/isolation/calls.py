"""Calls of a model under test: by which function, in which state, and what its errors say."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.core.errors import IsolationError
from penstock.models.attention.compiling import uncompiled
from penstock.models.isolation.comparison import not_finite
from penstock.models.isolation.report import CURE, describe, names
from penstock.models.theirs.tensors import model_inputs
from penstock.plan.inputs.model_input import ModelInput

Forward = Callable[[Any, ModelInput], Any]
"""(model, row) → logits [T, vocabulary]."""


class TorchModel(Protocol):
    """A torch module, or a model behind the interface `LanguageModel`."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All weights."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All weights by name."""

    def modules(self) -> Iterator[nn.Module]:
        """All modules."""

    def eval(self) -> object:
        """Evaluation mode."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass, with whatever arguments it takes."""


def transformers_forward(model: TorchModel, row: ModelInput) -> Tensor:
    """Logits [T, vocabulary] of a row by the call of a causal model of transformers."""
    device = next(model.parameters()).device
    output = model(**model_inputs(row, device))
    if getattr(output, "logits", None) is None:
        raise IsolationError(
            f"{describe(model)} cannot be checked: it returns no logits; take the model with "
            "its head, as AutoModelForCausalLM loads it, or pass forward="
        )
    logits: Tensor = output.logits[0]
    return logits


def explained(forward: Forward) -> Forward:
    """A caller's own function, whose mistakes are more likely than a model that takes no packed
    rows.
    """

    def call(model: TorchModel, row: ModelInput) -> Tensor:
        try:
            logits: Tensor = forward(model, row)
            return logits
        except (IsolationError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a caller's code raises
            found = " ".join(f"{type(error).__name__}: {error}".split())
            raise IsolationError(
                f"{describe(model)}: forward= failed on a row of several documents ({found}). "
                "It gets the model and one row of NumPy arrays (ps.to_torch(row) has tensors "
                "by name), and returns logits [T, vocabulary]. If it is right, the model "
                f"takes no such rows. {CURE}"
            ) from error

    return call


def guarded(
    variant: TorchModel, forward: Forward, model: TorchModel
) -> Callable[[ModelInput], Tensor]:
    """The call of a model whose own code may fail on packed rows, which is an `IsolationError`."""

    def call(row: ModelInput) -> Tensor:
        try:
            logits: Tensor = forward(variant, row)
            return logits
        except (IsolationError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model's own code may raise anything on packed rows
            found = " ".join(f"{type(error).__name__}: {error}".split())
            raise IsolationError(
                f"{describe(model)} cannot be run on a row of several documents ({found}). {CURE}"
            ) from error

    return call


def refuse_uncheckable(model: TorchModel) -> None:
    """Refuse a model without embeddings, which the check needs to trace tokens."""
    embeddings = (
        getattr(model, "get_input_embeddings", None) if isinstance(model, torch.nn.Module) else None
    )
    with suppress(AttributeError, NotImplementedError):
        if callable(embeddings) and embeddings().weight is not None:
            return
    raise IsolationError(
        f"{type(model).__name__} cannot be checked: it has no get_input_embeddings(), which "
        "the check needs to trace tokens; pass a language model of transformers, unwrapped "
        "(model.module of DDP), or give yours that method and pass forward=, a function "
        "(model, row) → logits [T, vocabulary]"
    )


def refuse_nan(model: TorchModel, alone: Sequence[Tensor]) -> None:
    """Refuse a model with NaN logits; the error names weights that are not finite."""
    if not any(bool(logits.isnan().any()) for logits in alone):
        return
    broken = not_finite(model.named_parameters())
    cause = (
        f"NaN or infinity in {names(broken)}"
        if broken
        else "all weights are finite, so its own arithmetic fails"
    )
    raise IsolationError(
        f"{describe(model)} cannot be checked: its logits of a document alone are NaN "
        f"({cause}); load weights that are finite, or compute in float32"
    )


def vocabulary_size(model: TorchModel) -> int:
    """Rows of the embedding."""
    return len(embedding(model).weight)


def embedding(model: TorchModel) -> nn.Embedding:
    """The embedding of the tokens."""
    found: nn.Embedding = model.get_input_embeddings()  # type: ignore[attr-defined]
    return found


@contextmanager
def undisturbed(model: TorchModel) -> Iterator[None]:
    """Evaluation mode, separate random generators, and nothing compiled within the block."""
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    model.eval()
    try:
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), uncompiled():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def without_zeros(model: TorchModel, seed: int) -> Iterator[TorchModel]:
    """The model with noise in every all-zero parameter: projections that start at zero would hide a
    leak.
    """
    generator = torch.Generator().manual_seed(seed)
    filled = [p for p in model.parameters() if p.numel() and not bool(p.detach().any())]
    with torch.no_grad():
        for parameter in filled:
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    try:
        yield model
    finally:
        with torch.no_grad():
            for parameter in filled:
                parameter.zero_()
