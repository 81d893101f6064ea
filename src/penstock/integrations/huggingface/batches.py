"""The batches that the Trainer iterates over: microbatches of each step, always the same number.

The Trainer counts microbatches per optimiser step, so a short last step is filled up with rows of
padding. Nothing is sharded here: the loader has already given this rank its own rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch

from penstock.integrations.huggingface.losses import refuse_unknown_ids
from penstock.models.theirs.tensors import model_inputs, targets_and_weights
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.blank_images import with_blank
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.loader import Step
from penstock.plan.loader.loader import Loader

TARGETS, WEIGHTS, DENOMINATOR = "penstock_targets", "penstock_loss_weights", "penstock_denominator"
"""Keys of a batch for the loss, not for the model."""


@final
class Microbatches:
    """Steps as batches for `Trainer`.

    Args:
        steps: Returns an iterator over a loader's steps.
        rows_per_rank: Rows of a whole step on this rank.
        rows_per_microbatch: Rows of one batch.
        device: Where batches go.
        known_ids: Number of ids that the model has embeddings for; None: unknown.
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
                yield batch(
                    rows[begin : begin + self._size],
                    step.loss_denominator,
                    self._device,
                    self._known_ids,
                )


def batch(
    rows: Sequence[ModelInput], denominator: float, device: torch.device, known_ids: int | None
) -> dict[str, Any]:
    """Model arguments of some rows, and what the loss needs."""
    if all(row.media is not None and not len(row.media) for row in rows):
        rows = [with_blank(row) for row in rows]
    refuse_unknown_ids(rows, known_ids)
    targets, weights = targets_and_weights(rows, device)
    return {
        **model_inputs(rows, device),
        TARGETS: targets,
        WEIGHTS: weights,
        DENOMINATOR: denominator,
    }


def blank(row: ModelInput) -> ModelInput:
    """A row of padding as long as `row`, without targets."""
    return replace(
        row,
        tokens=np.zeros_like(row.tokens),
        targets=np.full_like(row.targets, IGNORE),
        loss_weights=None if row.loss_weights is None else np.zeros_like(row.loss_weights),
        document_ids=None if row.document_ids is None else np.zeros_like(row.document_ids),
        num_tokens=0,
        source_ids=row.source_ids[:0],
        media=None if row.media is None else row.media.without_images(),
    )


def is_finite(loader: Loader) -> bool:
    """Whether the loader ends on its own."""
    return all(source.max_epochs is not None for source in loader.mixture.sources)
