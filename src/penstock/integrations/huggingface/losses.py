"""The loss of a whole step, in parts: each part is divided by the denominator of the step, and the parts add up.

So neither micro-batching nor packing nor the number of ranks changes the loss, and no rank must ask another.
"""

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from penstock.inputs import IGNORE
from penstock.integrations.huggingface.tensors import Rows, as_rows, model_inputs, targets_and_weights
from penstock.integrations.huggingface.vocabulary import known_ids, refuse_unknown_ids


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
        denominator: Sum of weights of the whole step over all ranks, as `step.loss_denominator`; 0 gives a loss of 0.
        chunk_tokens: So many tokens are worked on at a time; with more, each chunk is computed again in the backward
            pass, so that only one chunk of float32 probabilities exists at any time.
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
    """Loss of a transformers causal language model on one row or several; backward it for each, then step.

    Under data parallelism that averages gradients over ranks (DDP, FSDP), multiply by the number of ranks.

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
