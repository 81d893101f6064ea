"""Losses by document: sums of weighted losses and of targets that are predicted right, for each
document of packed rows, through the head in chunks.

    losses[d − 1, i] = Σ over the targets at distance d of document i of weight × (cross entropy + z × log² Z)

Guarantees: the sums of all documents add up to what `ps.loss` divides by the step's denominators.
Each depends on its document alone, in any row. A prefix tree is one document, and what its paths
share counts once, as in the loss. Each sum has a gradient of its own, so any function of them can
be trained.

Cost: without gradients, that of the loss. The gradient of the head depends on what becomes of each
sum, so the backward pass computes the logits again, a chunk at a time.

Levanter has the same as `per_segment_loss`, from the losses of all positions of a row.
"""  # noqa: E501

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self, final

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.core.arrays import Float64, Int64
from penstock.core.errors import ConfigError
from penstock.learn.training.cross_entropy import chunked_cross_entropy
from penstock.models.head import Head, no_loss
from penstock.models.language_model import LanguageModel
from penstock.models.row_tensors import RowTensors
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.torch_tensors import on_device, on_host
from penstock.plan.loader import StepDocuments


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DocumentLosses:
    """Sums of the n documents of rows, row after row, at each of D target distances."""

    losses: Tensor
    """[D, n] float64: sums of weight × (cross entropy in nats + z_loss × log² Z), with gradient;
    not divided.
    """
    weights: Tensor
    """[D, n] float64: sums of the loss weights."""
    targets: Tensor
    """[D, n] int64: targets with a weight other than 0."""
    right: Tensor
    """[D, n] int64: those of them that the model predicts right: the likeliest token, or the first
    of several, is the target.
    """
    rows: Annotated[Int64, "documents"]
    """[n] row of each document, among those that were given."""
    sources: Annotated[Int64, "documents"]
    """[n] number of its source in the mixture; −1: the padding of a joined row."""
    numbers: Annotated[Int64, "documents"] | None = None
    """[n] its number in its source, as in `Step.documents`; None: a row was given, which does not
    have it.
    """
    first_tokens: Annotated[Int64, "documents"] | None = None
    """[n] first of its tokens that is here, as in `Step.documents`; None: a row was given."""

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        distances = len(self.losses)
        return f"DocumentLosses({len(self)} documents, {distances} target distances)"

    def means(self) -> Annotated[Float64, "distances documents"]:
        """[D, n] loss for each unit of weight, on the host; NaN for documents without targets."""
        weights = on_host(self.weights)
        means = np.full(weights.shape, np.nan)
        np.divide(on_host(self.losses.detach()), weights, out=means, where=weights != 0)
        return means

    def worst(self, count: int, *, distance: int = 1) -> Annotated[Int64, "found"]:
        """[≤ count] places of the documents with the highest mean loss, the highest first; those
        without targets are left out.
        """
        means = self.means()[distance - 1]
        order: Int64 = np.argsort(-means, kind="stable")
        known: Int64 = order[~np.isnan(means[order])]
        return known[:count]

    @classmethod
    def of_step(cls, parts: "Sequence[DocumentLosses]", documents: StepDocuments) -> Self:
        """Those of all rows of a step, in order, with their places in the data."""
        sums = {
            name: torch.cat([getattr(one, name) for one in parts], 1)
            for name in ("losses", "weights", "targets", "right")
        }
        return cls(
            **sums,
            rows=documents.rows,
            sources=documents.sources,
            numbers=documents.numbers,
            first_tokens=documents.first_tokens,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotDocuments:
    """Which document each slot of a row belongs to. T slots, n documents."""

    numbers: Annotated[Int64, "slots"]
    """[T] number of the slot's document in the row; n: none of them."""
    sources: Annotated[Int64, "documents"]
    """[n] number of each document's source."""

    @classmethod
    def of_row(cls, row: ModelInput) -> Self:
        """Of a row alone.

        Raises:
            ConfigError: The row does not say where its documents begin.
        """
        if row.reach is not None and row.paths is None:
            # As of block diffusion: each document is several nodes.
            raise _unknown("the nodes of its documents")
        # With prefix trees these are nodes.
        numbers, sources = _numbers(row), row.source_ids.astype(np.int64)
        if row.paths is None:
            return cls(numbers=numbers, sources=sources)
        count = int(row.paths.documents.max(initial=-1)) + 1
        whole = np.full(row.sequence_length, count, np.int64)
        whole[row.paths.slots] = row.paths.documents[row.paths.owners]
        of_documents = np.full(count + 1, -1, np.int64)
        of_documents[whole] = np.append(sources, -1)[numbers]
        return cls(numbers=whole, sources=of_documents[:count])

    @classmethod
    def of_rows(cls, documents: StepDocuments, rows: range, slots: int) -> Self:
        """Of consecutive rows of a step, end to end.

        Args:
            documents: Of the step.
            rows: The rows.
            slots: Of each row.
        """
        mine = slice(*np.searchsorted(documents.rows, (rows.start, rows.stop)))
        lengths, sources = documents.lengths[mine], documents.sources[mine]
        numbers = np.full((len(rows), slots), len(lengths), np.int64)
        of_rows = documents.rows[mine] - rows.start
        for number, line in enumerate(numbers):
            here = np.flatnonzero(of_rows == number)
            line[: lengths[here].sum()] = np.repeat(here, lengths[here])
        return cls(numbers=numbers.ravel(), sources=sources)


def _unknown(what: str) -> ConfigError:
    return ConfigError(
        f"losses by document: the row has {what} and does not say where documents begin; give the "
        "step, ps.loss(model, step, by='document'), or if documents of the row see each other, "
        "make the loader with requirements that have document_ids=True"
    )


def _numbers(row: ModelInput) -> Int64:
    """[T] number of the document, or node, of each slot of a row."""
    padded = int(row.num_tokens < row.sequence_length)
    if row.document_ids is not None:
        numbers, count = (
            row.document_ids.astype(np.int64),
            int(row.document_ids.max(initial=-1)) + 1,
        )
    else:
        # Rows of one shape repeat the last entry.
        lengths = np.empty(0, np.int64) if row.cu_seqlens is None else np.diff(row.cu_seqlens)
        lengths = lengths[lengths > 0]
        numbers, count = np.repeat(np.arange(len(lengths)), lengths), len(lengths)
    if count != len(row.source_ids) + padded:
        raise _unknown(f"{len(row.source_ids)} documents")
    return numbers


def row_documents(
    model: LanguageModel,
    row: ModelInput | RowTensors,
    documents: SlotDocuments,
    *,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> DocumentLosses:
    """Run the model on one row, or on rows end to end, and sum its losses by document.

    Args:
        model: As for `row_loss`.
        row: Of T slots; of a row that ranks share, this rank's part gives this rank's part of each
            sum.
        documents: Those of all T slots.
        z_loss: As for `row_loss`.
        chunk: As for `row_loss`.

    Raises:
        ConfigError: The model predicts another number of distances than the row has.
    """
    tensors = model.tensors(row) if isinstance(row, ModelInput) else row
    hidden = model(tensors)
    if len(hidden) != len(tensors.targets):
        raise ConfigError(
            f"losses by document: the model predicts {len(hidden)} target distances, the row has "
            f"{len(tensors.targets)}; set the model's prediction_heads to the loader's distances"
        )
    numbers = documents.numbers
    if tensors.part is not None:
        # Slots past the end of the row have no targets, so any document does.
        numbers = numbers[np.minimum(tensors.part.index, len(numbers) - 1)]
    owners, count = on_device(numbers, hidden.device), len(documents.sources)
    head = Head.of_model(model)
    sums = [
        _sums(head, hidden[d], tensors, d, owners, count, z_loss=z_loss, chunk=chunk)
        for d in range(len(hidden))
    ]
    losses, weights, targets, right = (
        torch.stack(lines)[:, :count] for lines in zip(*sums, strict=True)
    )
    return DocumentLosses(
        losses=losses,
        weights=weights,
        targets=targets,
        right=right,
        rows=np.zeros(count, np.int64),
        sources=documents.sources,
    )


def _sums(
    head: Head,
    hidden: Tensor,
    row: RowTensors,
    distance: int,
    owners: Tensor,
    count: int,
    *,
    z_loss: float,
    chunk: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of one distance: losses, weights, targets and those that are right, each [count + 1]; the
    last is that of padding, which has none.
    """
    weights, targets = row.loss_weights[distance], row.targets[distance]
    at = (
        ((weights != 0) & (targets != IGNORE)).nonzero()[:, 0]
        if row.places is None
        else row.places[distance]
    )
    mine, weights = owners[at], weights[at]
    each, right = target_losses(
        head, hidden.index_select(0, at), targets[at], weights, z_loss=z_loss, chunk=chunk
    )
    empty = torch.zeros(count + 1, dtype=torch.float64, device=hidden.device)
    whole = torch.zeros(count + 1, dtype=torch.int64, device=hidden.device)
    losses = empty.index_add(0, mine, each)
    if not len(at):
        losses = losses + no_loss(head, hidden[:0])
    return (
        losses,
        empty.index_add(0, mine, weights.double()),
        whole.index_add(0, mine, torch.ones_like(mine)),
        whole.index_add(0, mine, right.long()),
    )


def target_losses(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each target, and whether it is predicted right.

    Args:
        head: Hidden states to logits.
        hidden: [n, width], of positions that have a target.
        targets: int64 [n].
        weights: [n] loss weights.
        z_loss: Coefficient of log² Z.
        chunk: Positions per chunk; None: chosen by vocabulary and device.

    Returns:
        Weight × (cross entropy + z_loss × log² Z), float64 [n] with gradient; bool [n].
    """
    given = _Given(head, targets, weights, z_loss, chunk)
    if len(hidden) and torch.is_grad_enabled():
        parts = head.parts(hidden)
        if hidden.requires_grad or parts.weights:
            found: tuple[Tensor, Tensor] = _TargetLosses.apply(given, hidden, *parts.weights)
            return found
    return given.measure(hidden)


@final
@dataclass(frozen=True, slots=True)
class _Given:
    """The arguments of `target_losses`."""

    head: Head
    targets: Tensor
    weights: Tensor
    z_loss: float
    chunk: int | None

    def measure(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Without gradients."""
        each = torch.zeros(len(hidden), dtype=torch.float64, device=hidden.device)
        squares, right = torch.zeros_like(each), torch.zeros_like(each, dtype=torch.bool)
        with torch.no_grad():
            chunked_cross_entropy(
                self.head,
                hidden,
                self.targets,
                self.weights,
                z_loss=self.z_loss,
                chunk=self.chunk,
                each=each,
                squares=squares,
                right=right,
            )
        return each.add_(squares, alpha=self.z_loss), right

    def loss(self, hidden: Tensor, factors: Tensor) -> Tensor:
        """Σ factor × loss of each target, a scalar with gradient."""
        loss, _ = chunked_cross_entropy(
            self.head,
            hidden,
            self.targets,
            self.weights.double() * factors,
            z_loss=self.z_loss,
            chunk=self.chunk,
        )
        return loss


class _TargetLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: _Given, hidden: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.given = given
        # The weights, too: autograd says if they are changed before the backward pass uses them.
        ctx.save_for_backward(hidden, *weights)
        each, right = given.measure(hidden)
        ctx.mark_non_differentiable(right)
        return each, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            states = hidden.detach().requires_grad_(wanted[0])
            loss = ctx.given.loss(states, incoming)
            inputs = [one for one, need in zip((states, *weights), wanted, strict=True) if need]
            found = iter(torch.autograd.grad(loss, inputs))
        return None, *(next(found) if need else None for need in wanted)
