"""The head of a model for the length of a pass: hidden states to logits, with weights cast once.

A model that computes in bfloat16 from float32 weights casts its output matrix whenever it is used.
A loss in chunks uses it once a chunk, and to cast a matrix of 128k × 4,096 moves 3 GB. A `Head`
casts each weight at its first use, and takes that copy as long as it lives.

The copies are leaves of the graph, so the gradient of a chunk ends at them. Losses sum these over
chunks in float32, and hand the sum to the weight itself: nothing is rounded on the way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize
from torch.nn.utils.stateless import _reparametrize_module

from penstock.models.gradients import leaves
from penstock.models.language_model import LanguageModel

_Copies = dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]]
"""Identity and dtype → the weight, which is kept so that its identity stays its own; and its
copy.
"""
_held: ContextVar[_Copies | None] = ContextVar("held", default=None)

Logits = Callable[[Tensor], Tensor]
"""Hidden states [n, width] to logits [n, vocab]; a `Head` is one."""


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight of a head in `dtype`: the copy that the `Head` in use has, otherwise a new one."""
    copies = _held.get()
    # What is computed from weights is another tensor each time.
    if copies is None or weight.dtype == dtype or not isinstance(weight, nn.Parameter):
        return weight.to(dtype)
    key = id(weight), dtype
    if key not in copies:
        copy = weight.detach().to(dtype)
        if weight.requires_grad and not torch.is_inference_mode_enabled():
            copy.requires_grad_()
        copies[key] = weight, copy
    return copies[key][1]


def matrix_of(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """The weight of a module in `dtype`, as `cast`; one with a few trained rows (`TrainedPart`) is
    put together of copies.
    """
    rows = None
    if parametrize.is_parametrized(module, "weight"):
        rows = getattr(module.parametrizations["weight"][0], "rows", None)  # type: ignore[index]
    if _held.get() is None or rows is None:
        return cast(module.weight, dtype)  # type: ignore[arg-type]
    parts = {name: cast(one, dtype) for name, one in module.named_parameters()}
    with _reparametrize_module(module, parts):
        found: Tensor = module.weight  # type: ignore[assignment]
    return found


def wide(scores: Tensor) -> Tensor:
    """Logits in float32 or wider."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


@final
@dataclass(frozen=True, slots=True)
class HeadParts:
    """The weights of a head, and the kind of its logits."""

    vocab_size: int
    """Logits of a position."""
    dtype: torch.dtype
    """Of its logits."""
    weights: list[Tensor]
    """Those with a gradient; empty if gradients are off."""
    used: list[Tensor]
    """For each of them the leaf of the graph: a copy in another dtype, or the weight itself."""


@final
class Head:
    """Hidden states to logits, for one pass: weights must not change while it lives.

    Args:
        logits_of: [n, width] → [n, vocab], each position independent of the others.
    """

    def __init__(self, logits_of: Callable[[Tensor], Tensor]) -> None:
        self._logits_of = logits_of
        self._copies: _Copies = {}
        self._parts: dict[bool, HeadParts] = {}

    @classmethod
    def of_model(cls, model: LanguageModel) -> "Head":
        """That of a model, with logits in the dtype in which it computes."""
        return cls(model.narrow_logits)

    @classmethod
    def of(cls, given: Logits) -> "Head":
        """A head as it is, and any other function as a head."""
        return given if isinstance(given, Head) else cls(given)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, width] → [n, vocab]; the graph ends at `HeadParts.used`."""
        with self._holding():
            return self._logits_of(hidden)

    def wide(self, hidden: Tensor) -> Tensor:
        """[n, width] → [n, vocab], in float32 or wider."""
        return wide(self(hidden))

    def divided(self, temperature: float) -> "Head":
        """The head of logits / temperature, with the same copies."""
        if temperature == 1:
            return self
        logits_of = self._logits_of
        made = Head(lambda hidden: wide(logits_of(hidden)) / temperature)
        made._copies = self._copies
        return made

    def parts(self, hidden: Tensor) -> HeadParts:
        """Its parts, found by the graph for one of the hidden states [n, width]."""
        gradients = torch.is_grad_enabled()
        if gradients not in self._parts:
            one = hidden[:1].detach() if len(hidden) else hidden.new_zeros(1, hidden.shape[-1])
            probe = self(one)
            used = leaves(probe)
            weight_of = {id(copy): weight for weight, copy in self._copies.values()}
            self._parts[gradients] = HeadParts(
                probe.shape[-1], probe.dtype, [weight_of.get(id(leaf), leaf) for leaf in used], used
            )
        return self._parts[gradients]

    @contextmanager
    def _holding(self) -> Iterator[None]:
        token = _held.set(self._copies)
        try:
            yield
        finally:
            _held.reset(token)


def no_loss(logits_of: Logits, hidden: Tensor) -> Tensor:
    """0, a scalar with the hidden states [n, width] and the head in its graph; n may be 0.

    A rank without targets must give every weight that the others train a gradient, if only zeros:
    FSDP2 reduces the parameters that have one, so without the head's its collective would not have
    the size of the other ranks' (pytorch issue 174862).
    """
    weights = Head.of(logits_of).parts(hidden).weights
    zero = hidden.sum() * 0.0
    return zero + _Zero.apply(zero, *weights) if weights else zero


class _Zero(torch.autograd.Function):
    """0 of tensors, which get gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, *tensors: Tensor) -> Tensor:
        ctx.tensors = tensors
        return torch.zeros_like(like)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros_like(one) for one in ctx.tensors)
