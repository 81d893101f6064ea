"""The door that every model has, our own and those of transformers: what training and generation rely on."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.inputs import InputRequirements, ModelInput
from penstock.models.cache import LayerAttend, SequenceCache
from penstock.models.lora import LoraSettings
from penstock.models.packing import PackingVerdict
from penstock.models.row_tensors import RowTensors


class LanguageModel(Protocol):
    """A causal language model over packed rows; also a torch module."""

    lora: LoraSettings | None
    """What trains beside the frozen weights; see `add_lora`."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: ids below it are known."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of hidden states, queries and keys."""

    @property
    def prediction_weights(self) -> tuple[float, ...]:
        """How much each target distance counts in the loss: D numbers."""

    def requirements(self) -> InputRequirements:
        """What a loader must give for it."""

    def packing(self, slots: int) -> PackingVerdict:
        """Whether documents may share a row of this many slots: only if each gives what it gives alone."""

    def tensors(self, row: ModelInput, backend: str = "auto") -> RowTensors:
        """A row on the model's device, with attention as this model attends; refused where `packing` does."""

    def __call__(self, row: RowTensors) -> Tensor:
        """Final hidden states [D, T, width] of a row, one for each target distance."""

    def run(self, tokens: Tensor, positions: Tensor, attend: LayerAttend) -> Tensor:
        """Final hidden states [D, ..., width] of tokens int64 [...], attending by a function of yours."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] → [..., vocab], float32 or wider."""

    def new_cache(self, sequences: int, capacity: int) -> SequenceCache:
        """Room for a number of sequences with a number of tokens each; what it keeps of them is the model's to know."""

    def extend(self, tokens: Tensor, lengths: Tensor, cache: Any, sequences: Tensor | None = None) -> Tensor:
        """Feed new tokens of sequences; logits [B, vocab] after each one's last new token. `cache`: of `new_cache`."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All weights, as torch has them; so are the two below."""

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All parts by name."""

    def state_dict(self) -> dict[str, Tensor]:
        """All weights by name."""
