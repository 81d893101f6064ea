"""Teachers: what the trainer asks for each row. This one runs a model in the same process; `process_teacher` runs one
in another, and `cached_teacher` reads what was written before."""

from collections.abc import Sequence
from typing import Protocol, final

import torch

from penstock.distillation.boundaries import starts_boundary
from penstock.distillation.outputs import TeacherOutputs, Wanted, outputs_of
from penstock.distillation.rows import TeacherRow
from penstock.errors import ConfigError, IsolationError
from penstock.inputs import ModelInput
from penstock.models import LanguageModel, PackedRows, require_packed_rows
from penstock.tokenizers import Tokenizer

ANY_ROWS = PackedRows(1, 1)
"""Rows that hold several documents, of unknown lengths; a model refuses those that it must not see."""


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
        packed: Its rows that hold several documents, so that a model that must not see them is refused at once; None:
            no row does. By default how long they are shows with the first.

    Raises:
        ConfigError: The model has fewer embeddings than the tokenizer has ids.
        IsolationError: The model lets documents of a row see each other.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, wanted: Wanted, *, packed: PackedRows | None = ANY_ROWS
    ) -> None:
        if model.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"the teacher has embeddings for {model.vocab_size} ids and its tokenizer ({tokenizer.name}) "
                f"{tokenizer.vocab_size}; give the tokenizer that it was trained with"
            )
        if packed is not None:
            _require_packed(model, packed, tokenizer.name)
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


def _require_packed(model: LanguageModel, packed: PackedRows, name: str) -> None:
    try:
        require_packed_rows(model, packed.slots, packed.longest)
    except IsolationError as error:
        most = model.packing(packed.slots).longest
        cure = f". Or let this teacher read less of a document: max_tokens of {most} or less" if most else ""
        raise IsolationError(f"teacher {name!r}: {error}{cure}") from None
