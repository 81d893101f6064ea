"""What every model offers to training and generation: our own model and those of transformers.

It includes whether a model may see several documents in one row; each model decides that itself.
Code that must pack rows (training, teachers) calls `require_packed_rows`. Code that can do without
(scores, held-out losses) calls `most_packed`, and gives longer documents, or all of them, separate
rows.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, final
from weakref import WeakSet

import torch
from torch import Tensor, nn

from penstock.core.errors import IsolationError
from penstock.media.prompts import PromptImages
from penstock.media.rows import BlankImage
from penstock.models.attention import LayerAttend
from penstock.models.cache import SequenceCache
from penstock.models.facts import ModelFacts
from penstock.models.lora.settings import LoraSettings, NewRows
from penstock.models.row_tensors import RowTensors
from penstock.plan.inputs import RowSlice
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.requirements import InputRequirements

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("penstock.models")
_warned: "WeakSet[LanguageModel]" = WeakSet()


@final
@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows that hold several documents, which must not see each other."""

    slots: int
    longest: int
    """Maximum tokens of a document."""


@final
@dataclass(frozen=True, slots=True)
class PackingVerdict:
    """Which documents may share a row of some number of slots."""

    longest: int
    """Documents of at most this many tokens may share a row; 0: none may."""
    reason: str | None = None
    """Why longer documents may not share a row; None: all that fit may."""
    way: str = ""
    """How such rows run, in words, where there is a choice."""


def require_packed_rows(model: "LanguageModel", slots: int, longest: int | None = None) -> None:
    """Refuse a model that must not see several documents in one row.

    Args:
        model: The model that gets the rows.
        slots: Slots of a row.
        longest: Maximum tokens of a document; None: the slots of a row.

    Raises:
        IsolationError: Documents of a row would see each other; says how much, and the cure.
    """
    found = model.packing(slots)
    if found.reason is not None and (slots if longest is None else longest) > found.longest:
        raise IsolationError(found.reason)


def most_packed(model: "LanguageModel", slots: int) -> int:
    """Maximum tokens in a row of several documents; 0: each document needs its own row, which is
    logged once.

    Args:
        model: The model that gets the rows.
        slots: Slots of a row.
    """
    found = model.packing(slots)
    if found.longest == 0 and model not in _warned:
        _warned.add(model)
        _log.warning("scores one document per row, which is exact but slower: %s", found.reason)
    return min(found.longest, slots)


class LanguageModel(Protocol):
    """A causal language model over packed rows; also a torch module."""

    lora: LoraSettings | None
    """The LoRA that trains next to the frozen weights; see `add_lora`."""

    new_rows: NewRows | None
    """Rows of the embedding for entries that its tokenizer gained; None: none are known."""

    origin: str | None
    """The run, folder or hub name that its weights came from; None: they are new, or it is not
    known.
    """

    facts: ModelFacts
    """What the folder of its weights says; empty where they were made here."""

    @property
    def lora_module(self) -> nn.Module | None:
        """The module that gets LoRA, and by whose names its parts are chosen; None: it can have
        none.
        """

    def get_input_embeddings(self) -> nn.Module:
        """Its embedding, or what stands for one, under transformers' name."""

    def get_output_embeddings(self) -> nn.Module | None:
        """Its output matrix, under transformers' name; None: it has none of its own."""

    @property
    def uses_our_attention(self) -> bool:
        """Whether only attention mixes tokens, and it is ours."""

    @property
    def divisible_rows(self) -> bool:
        """Whether a row may be cut, or joined to others, at no cost: it takes attention as a
        function (`run`).
        """

    @property
    def vocab_size(self) -> int:
        """Number of known ids."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of hidden states, queries and keys."""

    def compute_in(self, dtype: torch.dtype, *, casts: bool = True) -> None:
        """Compute hidden states in a dtype, with weights as they are. Trials of rows are as before.

        `casts` False: the weights are cast by other means, as FSDP2 does. ConfigError: it cannot.
        """

    @property
    def prediction_weights(self) -> tuple[float, ...]:
        """How much each of the D target distances counts in the loss."""

    def requirements(self) -> InputRequirements:
        """What a loader must provide for it."""

    def packing(self, slots: int) -> PackingVerdict:
        """Whether documents may share a row of `slots` slots: only if each gives the same result as
        alone.
        """

    def tensors(self, row: ModelInput, backend: str = "auto") -> RowTensors:
        """A row on the model's device, ready for its attention; refused if `packing` does not allow
        it.
        """

    def slice_tensors(
        self, part: RowSlice, group: "ProcessGroup | None" = None, backend: str = "auto"
    ) -> RowTensors:
        """This rank's part of a row that the ranks of a group share; refused if the model mixes
        tokens otherwise than by our attention.
        """

    def __call__(self, row: RowTensors) -> Tensor:
        """Final hidden states [D, T, width] of a row, for each target distance."""

    def begin_step(self, *, seed: int, number: int, tokens: int) -> None:
        """Say which training step comes: the run's seed, its number from 0, and its tokens on all
        ranks.
        """

    def pending_sums(self) -> dict[str, Tensor]:
        """Scalars of the step by name, on the device, to be summed over ranks; empty: it has
        none.
        """

    def end_step(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Figures of the step, if the model has any, from its `pending_sums` over all ranks."""

    def run(self, tokens: Tensor, positions: Tensor, attend: LayerAttend) -> Tensor:
        """Final hidden states [D, ..., width] of tokens int64 [...], with `attend` as the
        attention.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] → [..., vocab], float32 or wider."""

    def narrow_logits(self, hidden: Tensor) -> Tensor:
        """`logits` in the dtype in which the model makes them; for `Head`."""

    def new_cache(self, sequences: int, capacity: int) -> SequenceCache:
        """An empty cache for a number of sequences with at most `capacity` tokens each."""

    def extend(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: Any,
        sequences: Tensor | None = None,
        images: Sequence[PromptImages | None] | None = None,
    ) -> Tensor:
        """Append new tokens to sequences of a `new_cache`; logits [B, vocab] after the last new
        token of each.

        `images`: of each row's prompt, whenever the row grows; new tokens may not begin or end
        within an image.
        """

    def expect_images(self, blank: BlankImage) -> None:
        """Prepare for prompts with images, before `new_cache`; ConfigError: it reads none, or of
        another processor.
        """

    def cache_features(self, folder: str | Path, blank: BlankImage) -> None:
        """Keep the features of images that a frozen tower gives; ConfigError: it has no tower, or
        trains it.
        """

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or convert the weights, as `torch.nn.Module.to`."""

    def train(self, mode: bool = True) -> Self:
        """Training mode or evaluation mode, as in torch."""

    def eval(self) -> Self:
        """Evaluation mode, as in torch."""

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Whether the weights have gradients, as in torch."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients, as in torch."""

    def grow_vocabulary(self, size: int) -> int:
        """Give it embeddings and logits for `size` ids, in place, more than it has; without LoRA.

        New rows are the mean of the old ones. Returns the number of rows before: the first new one.
        ConfigError: it is a module of your own, or logits of old tokens would change.
        """

    def parameters(self) -> Iterator[nn.Parameter]:
        """All weights, as in torch."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All weights by name, as in torch."""

    def modules(self) -> Iterator[nn.Module]:
        """All modules, as in torch."""

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules by name."""

    def state_dict(self) -> dict[str, Tensor]:
        """All weights by name."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Take the weights of a `state_dict`, as in torch."""
