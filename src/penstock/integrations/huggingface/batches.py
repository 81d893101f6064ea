"""What the Trainer iterates over: the microbatches of each step, always the same number of them.

A last, short step is filled up with rows that hold only padding, because the Trainer counts an optimiser step in
microbatches. Nothing here is sharded again: the loader has given this rank its own rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch

from penstock.inputs import IGNORE, ModelInput
from penstock.integrations.huggingface.tensors import model_inputs, targets_and_weights
from penstock.integrations.huggingface.vocabulary import refuse_unknown_ids
from penstock.loader import Loader, Step

TARGETS, WEIGHTS, DENOMINATOR = "penstock_targets", "penstock_loss_weights", "penstock_denominator"
"""Keys of a batch that are for the loss, not for the model."""


@final
class Microbatches:
    """Steps as batches for `Trainer`.

    Args:
        steps: Begins to hand out steps of a loader.
        rows_per_rank: Rows of a whole step on this rank.
        rows_per_microbatch: Rows of one batch.
        device: Where batches go.
        known_ids: Ids that the model has embeddings for, from 0; None when that is not known.
    """

    def __init__(
        self,
        steps: Callable[[], Iterator[Step]],
        rows_per_rank: int,
        rows_per_microbatch: int,
        device: torch.device,
        known_ids: int | None,
    ) -> None:
        self._steps, self._device, self._known_ids = steps, device, known_ids
        self._rows_per_rank, self._size = rows_per_rank, rows_per_microbatch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step in self._steps():
            rows = list(step)
            rows += [blank(rows[0])] * (self._rows_per_rank - len(rows))
            for begin in range(0, len(rows), self._size):
                yield batch(rows[begin : begin + self._size], step.loss_denominator, self._device, self._known_ids)


def batch(
    rows: Sequence[ModelInput], denominator: float, device: torch.device, known_ids: int | None
) -> dict[str, Any]:
    """Model arguments of some rows, and beside them what the loss needs."""
    refuse_unknown_ids(rows, known_ids)
    targets, weights = targets_and_weights(rows, device)
    return {**model_inputs(rows, device), TARGETS: targets, WEIGHTS: weights, DENOMINATOR: denominator}


def blank(row: ModelInput) -> ModelInput:
    """A row of padding as long as `row`, with nothing to train."""
    return replace(
        row,
        tokens=np.zeros_like(row.tokens),
        targets=np.full_like(row.targets, IGNORE),
        loss_weights=None if row.loss_weights is None else np.zeros_like(row.loss_weights),
        document_ids=None if row.document_ids is None else np.zeros_like(row.document_ids),
        num_tokens=0,
        source_ids=row.source_ids[:0],
    )


def is_finite(loader: Loader) -> bool:
    """Whether the loader ends by itself."""
    return all(source.max_epochs is not None for source in loader.mixture.sources)
