"""What the Trainer iterates over: the microbatches of each step, and their loss, in parts that add up.

The loss of a step, computed in parts, and a check for token ids without an embedding.

Each part is divided by the denominator of the whole step, and the parts add up. So neither micro-batching nor packing
nor the number of ranks changes the loss, and ranks need no communication.

Token ids without an embedding are found before torch fails at them (on a GPU, without saying where).

What the Trainer iterates over: the microbatches of each step, always the same number.

The Trainer counts microbatches per optimiser step, so a short last step is filled up with rows of padding. Nothing is
sharded here: the loader has already given this rank its own rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from penstock.core.errors import ConfigError
from penstock.models.theirs.tensors import Rows, as_rows, model_inputs, targets_and_weights
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.blank_images import with_blank
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.torch_tensors import unknown_id
from penstock.plan.loader import Step
from penstock.plan.loader.loader import Loader


def known_ids(model: Any) -> int | None:
    """Number of ids in the model's input embedding; None if the model does not say.

    `num_embeddings` comes first, because the weight itself may be sharded away from this process.
    """
    try:
        embedding = model.get_input_embeddings()
        return int(getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0])
    except (AttributeError, NotImplementedError):
        return None


def refuse_unknown_ids(rows: Sequence[ModelInput], known: int | None) -> None:
    """Refuse rows with an id that is not below `known`; costs one pass over the tokens, on the CPU.

    Raises:
        ConfigError: There is one; says where in the row.
    """
    for found in (unknown_id(row, known) for row in rows if known is not None):
        if found:
            raise ConfigError(
                f"{found}, but the model has embeddings for {known} ids; the data were prepared with another "
                "tokenizer: prepare them with the model's, or call model.resize_token_embeddings(…)"
            )


def weighted_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    loss_weights: torch.Tensor | None,
    denominator: float,
    *,
    chunk_tokens: int = 4096,
) -> torch.Tensor:
    """Sum of cross-entropy times weight over all targets, divided by `denominator`, in float32.

    Args:
        logits: [..., vocabulary], any float dtype.
        targets: [...] int64, already shifted; −100 = none.
        loss_weights: [...] float32, or None for 1 wherever there is a target.
        denominator: Sum of weights of the whole step over all ranks: `step.loss_denominator`; 0 gives a loss of 0.
        chunk_tokens: Tokens per chunk. If there are several chunks, each is computed again in the backward pass, so
            that only one chunk of float32 probabilities exists at any time.
    """
    flat, goals = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    weights = (goals != IGNORE).float() if loss_weights is None else loss_weights.reshape(-1)
    pieces = list(zip(flat.split(chunk_tokens), goals.split(chunk_tokens), weights.split(chunk_tokens), strict=True))
    if len(pieces) == 1 or not torch.is_grad_enabled():
        sums = [_weighted_sum(*piece) for piece in pieces]
    else:
        sums = [checkpoint(_weighted_sum, *piece, use_reentrant=False) for piece in pieces]
    total = torch.stack(sums).sum()
    return total / denominator if denominator else total


def loss(model: Any, rows: Rows, denominator: float) -> torch.Tensor:
    """Loss of a transformers causal language model on one row or several; call backward for each, then step.

    If data parallelism averages gradients over ranks (DDP, FSDP), multiply by the number of ranks.

    Args:
        model: Any causal language model that `check_isolation` passes; the rows go to its device.
        rows: Of one step of the loader.
        denominator: `step.loss_denominator`.

    Raises:
        ConfigError: A row has an id that the model has no embedding for.
    """
    refuse_unknown_ids(as_rows(rows), known_ids(model))
    device = next(model.parameters()).device
    targets, weights = targets_and_weights(rows, device)
    return weighted_loss(model(**model_inputs(rows, device)).logits, targets, weights, denominator)


def _weighted_sum(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    losses = cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="none")
    return (losses * weights).sum()


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
                yield batch(rows[begin : begin + self._size], step.loss_denominator, self._device, self._known_ids)


def batch(
    rows: Sequence[ModelInput], denominator: float, device: torch.device, known_ids: int | None
) -> dict[str, Any]:
    """Model arguments of some rows, and what the loss needs."""
    if all(row.media is not None and not len(row.media) for row in rows):
        rows = [with_blank(row) for row in rows]
    refuse_unknown_ids(rows, known_ids)
    targets, weights = targets_and_weights(rows, device)
    return {**model_inputs(rows, device), TARGETS: targets, WEIGHTS: weights, DENOMINATOR: denominator}


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
