"""The loss of one row: its share of the step's loss, exact however the step is cut.

    loss = Σ_d weight_d ÷ denominator_d × Σ over targets at distance d of loss_weight × (cross entropy + z × log² Z)

The denominators are the step's, over all rows and ranks, so the losses of all rows add up to the step's loss: how
the rows are shared among microbatches and ranks changes nothing but the order of additions, and no all-reduce is
needed. Only positions that are targets reach the head, in chunks (see `chunked_cross_entropy`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.inputs import IGNORE, ModelInput
from penstock.models.language_model import LanguageModel
from penstock.models.row_tensors import RowTensors
from penstock.training.chunked_cross_entropy import chunked_cross_entropy


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLoss:
    """The loss of one row, and the sums that metrics add up over rows, microbatches and ranks."""

    loss: Tensor
    """Scalar, with gradient: what to call `backward` on."""
    cross_entropy: Tensor
    """[D] float64: at each distance the sum of loss weight × cross entropy in nats; not divided by anything."""
    weights: Tensor
    """[D] float64: sum of the loss weights at each distance."""
    num_targets: int
    """Targets of all distances that count at all."""
    groups: Tensor | None = None
    """[2, G] float64: at distance 1 both sums for each group of slots; None where no groups were given."""


def loss(
    model: LanguageModel,
    row: ModelInput | RowTensors,
    denominators: float | Sequence[float],
    *,
    z_loss: float = 0.0,
    distance_weights: Sequence[float] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """One row's part of the step's loss, a scalar to call `backward` on; the arguments are those of `row_loss`.

    ```python
    for row in step:
        penstock.training.loss(model, row, step.loss_denominator).backward()
    ```
    """
    return row_loss(model, row, denominators, z_loss=z_loss, distance_weights=distance_weights, chunk=chunk).loss


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
    """Run the model on one row, and take its part of the step's loss.

    Args:
        model: A model of `penstock.models`: called with a row it gives hidden states [D, T, width]; `logits` gives
            logits of any of them; `tensors` moves a `ModelInput` to its device.
        row: A `ModelInput` of the loader, or `RowTensors` on the model's device.
        denominators: `step.loss_denominators`, or `step.loss_denominator` where there is one target distance.
        z_loss: Coefficient of log² Z (PaLM, Chowdhery et al. 2022: 1e-4); 0: none.
        distance_weights: How much each target distance counts; None: the model's own.
        chunk: Positions whose logits exist at once; None: by vocabulary and device.
        groups: int64 [K, T] on the model's device: K groups that each slot is in, for sums of their own; None: none.
        num_groups: G, above all numbers in `groups`.

    Raises:
        ConfigError: The numbers of hidden states, targets, denominators and weights differ, or a denominator is no
            positive number although there are targets.
    """
    tensors = model.tensors(row) if isinstance(row, ModelInput) else row
    hidden = model(tensors)
    return hidden_loss(
        model.logits,
        hidden,
        tensors.targets,
        tensors.loss_weights,
        denominators,
        z_loss=z_loss,
        distance_weights=model.prediction_weights if distance_weights is None else distance_weights,
        chunk=chunk,
        groups=groups,
        num_groups=num_groups,
    )


def hidden_loss(
    logits_of: Callable[[Tensor], Tensor],
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
) -> RowLoss:
    """The loss of hidden states [D, T, width] against targets [D, T] with weights [D, T]; see `row_loss`."""
    divisors = [float(denominators)] if isinstance(denominators, int | float) else [float(x) for x in denominators]
    _check_counts(len(hidden), len(targets), len(divisors), len(distance_weights))
    total = torch.zeros((), device=hidden.device)
    sums, counts, num_targets = [], [], 0
    of_groups: Tensor | None = None
    for distance, divisor in enumerate(divisors):
        weights = loss_weights[distance]
        places = ((weights != 0) & (targets[distance] != IGNORE)).nonzero()[:, 0]
        if len(places) and not divisor > 0:
            raise ConfigError(
                f"loss: denominator {distance} is {divisor}, and the row has {len(places)} targets at distance "
                f"{distance + 1}; pass the step's loss_denominators"
            )
        every = len(places) == len(weights)
        each = None if groups is None or distance else weights.new_empty(len(places), dtype=torch.float64)
        part, cross_entropy = chunked_cross_entropy(
            logits_of,
            hidden[distance] if every else hidden[distance].index_select(0, places),
            targets[distance][places],
            weights[places],
            scale=distance_weights[distance] / divisor if len(places) else 0.0,
            z_loss=z_loss,
            chunk=chunk,
            each=each,
        )
        total = total + part
        if each is not None and groups is not None:
            of_groups = _by_group(each, weights[places], groups[:, places], num_groups)
        num_targets += len(places)
        sums.append(cross_entropy)
        counts.append(weights[places].sum(dtype=torch.float64))
    return RowLoss(
        loss=total,
        cross_entropy=torch.stack(sums),
        weights=torch.stack(counts),
        num_targets=num_targets,
        groups=of_groups,
    )


def _by_group(each: Tensor, weights: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """[2, G]: sums over the targets of each group, of what each adds and of weights."""
    sums = each.new_zeros(2, num_groups)
    for line in groups:
        sums[0].index_add_(0, line, each)
        sums[1].index_add_(0, line, weights.double())
    return sums


def _check_counts(hidden: int, targets: int, denominators: int, weights: int) -> None:
    if not hidden == targets == denominators == weights:
        raise ConfigError(
            f"loss: the model predicts {hidden} target distances, the row has {targets}, with {denominators} "
            f"denominators and {weights} weights; all must agree: set the model's prediction_heads to the loader's "
            "distances, and pass step.loss_denominators"
        )
