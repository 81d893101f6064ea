"""Teachers: what the trainer asks for each row, how sure a teacher is, and which tokens begin at a
boundary.

`ModelTeacher` runs a model in this process; `process_teacher` runs one in another, and
`cached_teacher` reads what was written before. `document_scores` is used to choose among several
teachers; a document's score depends on that document alone, so ranks need not agree on anything.

`starts_boundary` is used to debias likelihoods of chunks. The probability of a chunk's tokens does
not say where the next token may begin: a tokenizer may write " hel" as a token only if "lo" does
not follow. Approximate likelihood matching therefore multiplies a chunk's probability by that of a
boundary after it (Minixhofer, Vulić, Ponti 2025, arXiv:2503.20083, section 3.2), and the boundary
must be the same event of the text for both tokenizers. Here it is *the next byte is ASCII
whitespace, or the text ends*: a token begins at a boundary if its first byte is space, tab, newline
or carriage return, or if it is a control token. The first byte alone decides, so the event is the
same for any two tokenizers with byte tables, whatever their pre-tokenizers do. The authors' code
(tokenkit) uses space, tab, newline and special tokens. Punctuation does not count, because whether
it begins a pre-token depends on the text before it.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.arrays import Bool
from penstock.core.errors import ConfigError, IsolationError, TokenizerError
from penstock.learn.distillation.outputs import TeacherOutputs, Wanted, outputs_of
from penstock.learn.distillation.teacher_rows import TeacherRow
from penstock.models import LanguageModel, PackedRows
from penstock.models.language_model import require_packed_rows
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.torch_tensors import on_device
from penstock.tokenizers import Tokenizer

WHITESPACE = b" \t\n\r"
"""First bytes of tokens that begin at a boundary."""
Score = Literal["likelihood", "entropy", "confidence"]
ANY_ROWS = PackedRows(1, 1)
"""Rows that hold several documents of unknown lengths; a model refuses rows that it cannot take
when it sees them.
"""


def starts_boundary(tokenizer: Tokenizer) -> Bool:
    """Which tokens begin at a boundary, bool [vocab_size].

    Raises:
        TokenizerError: The tokenizer has no byte table.
    """
    try:
        table = tokenizer.byte_table
    except TokenizerError as error:
        raise TokenizerError(
            f"{tokenizer.name}: boundaries are found by bytes, and this tokenizer has "
            f"{error}; set debias to false, or use loss uld"
        ) from None
    is_whitespace = np.zeros(256, np.bool_)
    is_whitespace[np.frombuffer(WHITESPACE, np.uint8)] = True
    starts = table.is_control.copy()
    spelled = table.lengths > 0
    starts[spelled] |= is_whitespace[table.data[table.offsets[:-1][spelled]]]
    return starts


def document_scores(outputs: TeacherOutputs, row: TeacherRow, score: Score) -> Tensor:
    """How sure a teacher is of each document, float64 [n], higher is surer, on the device of
    `outputs`; −∞ where it predicts no token, as it reads none or one.

    Args:
        outputs: The teacher's outputs for `row`.
        row: A row of n documents.
        score: likelihood: minus nats per byte of text, which is comparable across tokenizers;
            entropy: minus the mean entropy of its predictions; confidence: the mean probability of
            its most likely token, at the temperature of `outputs`.
    """
    device = outputs.token_log_probs.device
    documents = on_device(row.slot_documents, device)
    count = len(row.text_bytes)
    positions = row.input.positions
    assert positions is not None
    predicted = np.bincount(row.slot_documents[positions > 0], minlength=count)[:count]
    # Of what it did not predict, a sum of 0 would be the best likelihood of all.
    unread = on_device(predicted == 0, device)

    def sums(values: Tensor) -> Tensor:
        # Padding is counted as one more document, after the last.
        found = torch.zeros(count + 1, dtype=torch.float64, device=device).index_add(
            0, documents, values.double()
        )
        return found[:count]

    if score == "likelihood":
        text_bytes = on_device(row.text_bytes, device).clamp_min(1)
        found = sums(outputs.token_log_probs) / text_bytes
        return found.masked_fill(unread, -torch.inf)
    tokens = sums(torch.ones_like(outputs.entropy)).clamp_min(1)
    if score == "entropy":
        return (-sums(outputs.entropy) / tokens).masked_fill(unread, -torch.inf)
    logs = outputs.top_log_probs if outputs.log_probs is None else outputs.log_probs
    assert logs is not None
    return (sums(logs.amax(-1).exp()) / tokens).masked_fill(unread, -torch.inf)


class Teacher(Protocol):
    """Predicts the tokens of rows."""

    def ask(self, rows: Sequence[TeacherRow]) -> None:
        """Announce the next rows, so that work may begin elsewhere; rows announced before are
        forgotten.
        """

    def outputs(self, row: TeacherRow) -> TeacherOutputs:
        """Predictions for a row; announced rows must be fetched in order."""

    def close(self) -> None:
        """Release resources; the teacher cannot be used afterwards."""


@final
class ModelTeacher:
    """A model in this process. It computes when outputs are fetched.

    Args:
        model: Its training mode is kept, and it gets no gradients.
        tokenizer: The model's tokenizer.
        wanted: What to keep of its distributions.
        packed: Sizes of rows that hold several documents, so that a model which cannot take them is
            refused at once; None: no row holds several. By default the sizes are unknown until the
            first row.

    Raises:
        ConfigError: The model has fewer embeddings than the tokenizer has ids.
        IsolationError: The model lets documents of a row see each other.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        wanted: Wanted,
        *,
        packed: PackedRows | None = ANY_ROWS,
    ) -> None:
        if model.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"the teacher has embeddings for {model.vocab_size} ids, its tokenizer "
                f"({tokenizer.name}) has {tokenizer.vocab_size}; give the tokenizer that it "
                "was trained with"
            )
        if packed is not None:
            _require_packed(model, packed, tokenizer.name)
        self.model, self.tokenizer, self.wanted = model, tokenizer, wanted
        self._boundary = (
            torch.from_numpy(starts_boundary(tokenizer)).to(model.device)
            if wanted.boundary
            else None
        )

    def ask(self, rows: Sequence[TeacherRow]) -> None:
        """Do nothing: the model runs when outputs are fetched."""

    def outputs(self, row: TeacherRow) -> TeacherOutputs:
        """Run the model on the row; the tensors are on its device."""
        return self.run(row.input)

    def run(self, row: ModelInput, into: TeacherOutputs | None = None) -> TeacherOutputs:
        """Run the model on a row's input; `into`: see `outputs_of`."""
        return outputs_of(
            self.model,
            row,
            self.wanted,
            vocab_size=self.tokenizer.vocab_size,
            boundary=self._boundary,
            into=into,
        )

    def close(self) -> None:
        """Do nothing: the model belongs to the caller."""


def _require_packed(model: LanguageModel, packed: PackedRows, name: str) -> None:
    try:
        require_packed_rows(model, packed.slots, packed.longest)
    except IsolationError as error:
        most = model.packing(packed.slots).longest
        cure = f". Or set this teacher's max_tokens to {most} or less" if most else ""
        raise IsolationError(f"teacher {name!r}: {error}{cure}") from None
