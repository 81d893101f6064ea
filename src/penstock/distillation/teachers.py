"""Teachers: what the trainer asks for each row. This one runs a model in the same process; `process_teacher` runs one
in another, and `cached_teacher` reads what was written before."""

from collections.abc import Sequence
from typing import Protocol, final

import torch

from penstock.distillation.boundaries import starts_boundary
from penstock.distillation.outputs import TeacherOutputs, Wanted, outputs_of
from penstock.distillation.rows import TeacherRow
from penstock.errors import ConfigError
from penstock.inputs import ModelInput
from penstock.models import LanguageModel, require_packed_rows
from penstock.tokenizers import Tokenizer


class Teacher(Protocol):
    """Says what comes next in rows."""

    def ask(self, rows: Sequence[TeacherRow]) -> None:
        """Tell which rows come next, so that work may begin elsewhere; what was asked before is forgotten."""

    def outputs(self, row: TeacherRow) -> TeacherOutputs:
        """What it says about a row; rows that were asked come in that order."""

    def close(self) -> None:
        """Give back what it holds; nothing can be asked of it afterwards."""


@final
class ModelTeacher:
    """A model in this process. It computes when outputs are fetched.

    Args:
        model: Keeps its mode, and gets no gradients.
        tokenizer: Its tokenizer.
        wanted: What to keep of its distributions.
        packed: Whether its rows hold several documents, so that a model that must not see them is refused at once.

    Raises:
        ConfigError: The model has fewer embeddings than the tokenizer has ids.
        IsolationError: The model lets documents of a row see each other.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, wanted: Wanted, *, packed: bool = True) -> None:
        if model.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"the teacher has embeddings for {model.vocab_size} ids and its tokenizer ({tokenizer.name}) "
                f"{tokenizer.vocab_size}; give the tokenizer that it was trained with"
            )
        if packed:
            # How long its rows are shows with the first; a model refuses those that it cannot read.
            require_packed_rows(model, 1)
        self.model, self.tokenizer, self.wanted = model, tokenizer, wanted
        self._boundary = torch.from_numpy(starts_boundary(tokenizer)).to(model.device) if wanted.boundary else None

    def ask(self, rows: Sequence[TeacherRow]) -> None:
        """Nothing: see the class."""

    def outputs(self, row: TeacherRow) -> TeacherOutputs:
        """Run the model on the row; the tensors are on its device."""
        return self.run(row.input)

    def run(self, row: ModelInput, into: TeacherOutputs | None = None) -> TeacherOutputs:
        """Run the model on what a teacher reads of a row; `into`: as for `outputs_of`."""
        return outputs_of(
            self.model,
            row,
            self.wanted,
            vocab_size=self.tokenizer.vocab_size,
            boundary=self._boundary,
            into=into,
        )

    def close(self) -> None:
        """Nothing: the model is the caller's."""
