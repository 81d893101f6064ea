"""The interface by which the parts of a model of transformers see the whole."""

from typing import Any, Protocol

from torch import Tensor

from penstock.models.language_model import LanguageModel
from penstock.models.recurrent.operations import Operations
from penstock.models.row_tensors import RowTensors
from penstock.models.theirs.attention import AttentionFit
from penstock.plan.inputs.model_input import ModelInput


class TheirModel(LanguageModel, Protocol):
    """A model of transformers behind the door, for what tries how rows and caches of it are
    exact.
    """

    inner: Any
    """The model itself."""
    operations: Operations
    """How recurrent layers are computed."""
    fit: AttentionFit
    """Whether our attention replaces its own."""
    rotary: tuple[int, str] | None
    """Tokens of a text above which its rotary frequencies change, and their type; None: they never
    do.
    """
    logits_width: int
    """Logits of a token, at least `vocab_size`."""

    @property
    def trial_model(self) -> "TheirModel":
        """The model that trials run on: this one, or its twin."""

    @property
    def is_on_meta(self) -> bool:
        """Whether it has no weights yet."""

    @property
    def packed(self) -> Any:
        """How its rows of several documents run."""

    @property
    def images(self) -> Any:
        """How it reads images."""

    @property
    def generation(self) -> Any:
        """How it generates."""

    @property
    def has_vision(self) -> bool:
        """Whether it reads images."""

    def hidden(self, given: dict[str, object]) -> Tensor:
        """Hidden states [B, n, width] for arguments of transformers; logits if the head is more
        than a matrix.
        """

    def document(self, tokens: Tensor) -> Tensor:
        """`hidden` of one document, tokens [n]."""

    def read(self, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """(final hidden states, output) of the model itself for its own arguments."""

    def row_tensors(self, row: ModelInput) -> RowTensors:
        """`tensors` without asking whether the documents of the row may share it."""
