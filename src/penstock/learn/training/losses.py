"""The loss of one row, its exact share of the step's loss, without ever holding the logits of a
whole row.

    loss = Σ_d weight_d ÷ denominator_d × Σ over targets at distance d of loss_weight × (cross
    entropy + z × log² Z)

The denominators are the step's, over all rows and ranks, so the losses of all rows add up to the
step's loss. How rows are shared among microbatches and ranks changes only the order of additions,
and no all-reduce is needed.

`cross_entropy` computes the sums, in chunks of the positions that have a target.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, final, overload

import torch
from torch import Tensor, nn

from penstock.core.errors import ConfigError
from penstock.core.suggestions import suggests
from penstock.learn.training.cross_entropy import chunked_cross_entropy
from penstock.learn.training.document_losses import (
    DocumentLosses,
    SlotDocuments,
    row_documents,
)
from penstock.models.building import as_language_model
from penstock.models.head import Head, Logits
from penstock.models.language_model import LanguageModel
from penstock.models.row_tensors import RowTensors
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.loader import Step


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLoss:
    """The loss of one row, and the sums that metrics add up over rows, microbatches and ranks."""

    loss: Tensor
    """Scalar with gradient; call `backward` on it."""
    cross_entropy: Tensor
    """[D] float64: sum of loss weight × cross entropy in nats at each distance; not divided."""
    weights: Tensor
    """[D] float64: sum of the loss weights at each distance."""
    num_targets: int
    """Number of targets with a weight other than 0, over all distances."""
    groups: Tensor | None = None
    """[2, G] float64: both sums at distance 1 for each group of slots; None if no groups were
    given.
    """


@overload
def loss(
    model: LanguageModel | nn.Module,
    rows: ModelInput | RowTensors | Step,
    denominators: float | Sequence[float] | None = None,
    *,
    by: None = None,
    z_loss: float = 0.0,
    distance_weights: Sequence[float] | None = None,
    chunk: int | None = None,
) -> Tensor: ...


@overload
def loss(
    model: LanguageModel | nn.Module,
    rows: ModelInput | RowTensors | Step,
    *,
    by: Literal["document"],
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> DocumentLosses: ...


@suggests
def loss(
    model: LanguageModel | nn.Module,
    rows: ModelInput | RowTensors | Step,
    denominators: float | Sequence[float] | None = None,
    *,
    by: Literal["document"] | None = None,
    z_loss: float = 0.0,
    distance_weights: Sequence[float] | None = None,
    chunk: int | None = None,
) -> Tensor | DocumentLosses:
    """A row's part of the step's loss, or that of all rows of a step on this rank: a scalar to call
    `backward` on. Or the sums of each document.

    ```python
    for row in step:                                            # the memory of one row at a time
        ps.loss(model, row, step.loss_denominators).backward()
    ps.loss(model, step).backward()                             # the same gradients, all rows in one pass

    with torch.no_grad():
        found = ps.loss(model, step, by="document")             # losses, weights, targets, right: [distances, documents]
    for place in found.worst(10):
        print(found.sources[place], found.numbers[place], found.means()[0, place])
    ```

    Sum the gradients of several ranks, do not average them: the denominators are those of the whole
    step.

    Args:
        model: Any object that `ps.train` takes as a model.
        rows: A row or a step of a loader that was made with the model's requirements.
        denominators: `step.loss_denominators` for a row; leave it out for a step, which has its
            own, and for sums by document, which are not divided.
        by: document: sums of losses, weights, targets and right predictions of each document, a
            prefix tree being one; with gradients, unless these are off.
        z_loss: As for `row_loss`.
        distance_weights: As for `row_loss`.
        chunk: As for `row_loss`.

    Raises:
        ConfigError: A row came without denominators, or sums by document with some; a row does not
            say where its documents begin; or as for `row_loss`.
    """  # noqa: E501
    model = as_language_model(model)
    if by is not None:
        _check_by(by, denominators, distance_weights)
        return _by_document(model, rows, z_loss, chunk)
    if isinstance(rows, Step):
        if denominators is not None:
            raise ConfigError(
                "ps.loss: a step has its own denominators; leave them out, or pass one of its rows"
            )
        denominators = rows.loss_denominators
        rows_in_pass = _rows_in_pass(model, rows)
        inputs: Iterable[ModelInput | RowTensors] = rows.joined(rows_in_pass)
    elif denominators is None:
        raise ConfigError(
            "ps.loss: a row needs the denominators of its step; pass step.loss_denominators"
        )
    else:
        inputs = [rows]
    parts = [
        row_loss(
            model, row, denominators, z_loss=z_loss, distance_weights=distance_weights, chunk=chunk
        ).loss
        for row in inputs
    ]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


def _check_by(
    by: str, denominators: float | Sequence[float] | None, distance_weights: Sequence[float] | None
) -> None:
    if by != "document":
        raise ConfigError(f"ps.loss: by must be 'document' or None, got {by!r}")
    for name, value in (("denominators", denominators), ("distance_weights", distance_weights)):
        if value is not None:
            raise ConfigError(
                f"ps.loss: sums by document are of each distance and not divided; leave out {name}"
            )


def _by_document(
    model: LanguageModel,
    rows: ModelInput | RowTensors | Step,
    z_loss: float,
    chunk: int | None,
) -> DocumentLosses:
    if not isinstance(rows, Step):
        whole = rows if isinstance(rows, ModelInput) else rows.source
        return row_documents(model, rows, SlotDocuments.of_row(whole), z_loss=z_loss, chunk=chunk)
    documents, each = rows.documents, _rows_in_pass(model, rows)
    parts = []
    for number, row in enumerate(rows.joined(each)):
        mine = range(number * each, min((number + 1) * each, len(rows)))
        slots = SlotDocuments.of_rows(documents, mine, row.sequence_length // len(mine))
        parts.append(row_documents(model, row, slots, z_loss=z_loss, chunk=chunk))
    return DocumentLosses.of_step(parts, documents)


def _rows_in_pass(model: LanguageModel, step: Step) -> int:
    """All rows of a step, if they may go through the model end to end and cost no more than one by
    one; otherwise 1.
    """
    if len(step) < 2 or not model.divisible_rows:
        return 1
    slots = step[0].sequence_length
    return len(step) if model.packing(len(step) * slots).longest >= slots else 1


def row_loss(
    model: LanguageModel,
    row: ModelInput | RowTensors,
    denominators: float | Sequence[float],
    *,
    z_loss: float = 0.0,
    distance_weights: Sequence[float] | None = None,
    chunk: int | None = None,
    groups: Tensor | None = None,
    num_groups: int = 0,
) -> RowLoss:
    """Run the model on one row, and compute the row's share of the step's loss.

    Args:
        model: A model of `penstock.models`: called with a row it gives hidden states [D, T, width];
            `logits` gives logits of any of them; `tensors` moves a `ModelInput` to its device.
        row: A `ModelInput` of the loader, or `RowTensors` on the model's device.
        denominators: `step.loss_denominators`, or `step.loss_denominator` if there is one target
            distance.
        z_loss: Coefficient of log² Z (PaLM, Chowdhery et al. 2022: 1e-4); 0: none.
        distance_weights: Weight of each target distance; None: the model's own.
        chunk: Positions per chunk; None: chosen by vocabulary and device.
        groups: int64 [K, T] on the model's device: K groups that each slot belongs to, for separate
            sums; None: none.
        num_groups: G, larger than every number in `groups`.

    Raises:
        ConfigError: The numbers of hidden states, targets, denominators and weights differ, or a
            denominator is not positive although there are targets.
    """
    tensors = model.tensors(row) if isinstance(row, ModelInput) else row
    hidden = model(tensors)
    return hidden_loss(
        Head.of_model(model),
        hidden,
        tensors.targets,
        tensors.loss_weights,
        denominators,
        z_loss=z_loss,
        distance_weights=model.prediction_weights if distance_weights is None else distance_weights,
        chunk=chunk,
        groups=groups,
        num_groups=num_groups,
        places=tensors.places,
    )


def hidden_loss(
    logits_of: Logits,
    hidden: Tensor,
    targets: Tensor,
    loss_weights: Tensor,
    denominators: float | Sequence[float],
    *,
    distance_weights: Sequence[float],
    z_loss: float = 0.0,
    chunk: int | None = None,
    groups: Tensor | None = None,
    num_groups: int = 0,
    places: Sequence[Tensor] | None = None,
) -> RowLoss:
    """The loss of hidden states [D, T, width] against targets [D, T] with weights [D, T]; see
    `row_loss`.

    `logits_of`: the head; a `Head` shares cast weights with other losses of the pass. `places`: for
    each distance int64 [n] on the device, the slots with a target and a weight other
    than 0. None: the device is asked for them, and the host waits for it.
    """
    divisors = (
        [float(denominators)]
        if isinstance(denominators, int | float)
        else [float(x) for x in denominators]
    )
    _check_counts(len(hidden), len(targets), len(divisors), len(distance_weights))
    head = Head.of(logits_of)
    total = torch.zeros((), device=hidden.device)
    sums, counts, num_targets = [], [], 0
    of_groups: Tensor | None = None
    for distance, divisor in enumerate(divisors):
        weights = loss_weights[distance]
        at = (
            ((weights != 0) & (targets[distance] != IGNORE)).nonzero()[:, 0]
            if places is None
            else places[distance]
        )
        if len(at) and not divisor > 0:
            raise ConfigError(
                f"loss: denominator {distance} is {divisor}, and the row has {len(at)} "
                f"targets at distance {distance + 1}; pass the step's loss_denominators"
            )
        every = len(at) == len(weights)
        each = (
            None if groups is None or distance else weights.new_empty(len(at), dtype=torch.float64)
        )
        part, cross_entropy = chunked_cross_entropy(
            head,
            hidden[distance] if every else hidden[distance].index_select(0, at),
            targets[distance][at],
            weights[at],
            scale=distance_weights[distance] / divisor if len(at) else 0.0,
            z_loss=z_loss,
            chunk=chunk,
            each=each,
        )
        total = total + part
        if each is not None and groups is not None:
            of_groups = _by_group(each, weights[at], groups[:, at], num_groups)
        num_targets += len(at)
        sums.append(cross_entropy)
        counts.append(weights[at].sum(dtype=torch.float64))
    return RowLoss(
        loss=total,
        cross_entropy=torch.stack(sums),
        weights=torch.stack(counts),
        num_targets=num_targets,
        groups=of_groups,
    )


def loss_of_documents(
    found: DocumentLosses, groups: Tensor | None = None, num_groups: int = 0
) -> RowLoss:
    """The sums of a row from those of its documents, undivided; `loss` is that at distance 1.

    Args:
        found: Of one row, without z_loss.
        groups: int64 [K, n] on the model's device: groups that each document belongs to.
        num_groups: G, larger than every number in `groups`.
    """
    losses, weights = found.losses, found.weights
    return RowLoss(
        loss=losses[0].sum(),
        cross_entropy=losses.detach().sum(1),
        weights=weights.sum(1),
        num_targets=int(found.targets.sum()),
        groups=None
        if groups is None
        else _by_group(losses[0].detach(), weights[0], groups, num_groups),
    )


def _by_group(each: Tensor, weights: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """[2, G]: sums of `each` and of weights over the targets of each group."""
    sums = each.new_zeros(2, num_groups)
    for line in groups:
        sums[0].index_add_(0, line, each)
        sums[1].index_add_(0, line, weights.double())
    return sums


def _check_counts(hidden: int, targets: int, denominators: int, weights: int) -> None:
    if not hidden == targets == denominators == weights:
        raise ConfigError(
            f"loss: the model predicts {hidden} target distances, the row has {targets}, with "
            f"{denominators} denominators and {weights} weights; all must agree: set the "
            "model's prediction_heads to the loader's distances, and pass "
            "step.loss_denominators"
        )
