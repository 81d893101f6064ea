"""The loss of a step, computed in parts that add up, and a check for token ids without an
embedding.

Each part is divided by the denominator of the whole step, and the parts add up. So neither
micro-batching nor packing nor the number of ranks changes the loss, and ranks need no
communication. Unknown ids are found before torch fails at them (on a GPU, without saying where).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from penstock.core.errors import ConfigError
from penstock.models.theirs.tensors import Rows, as_rows, model_inputs, targets_and_weights
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.torch_tensors import unknown_id


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
                f"{found}, but the model has embeddings for {known} ids; the data were "
                "prepared with another tokenizer: prepare them with the model's, or call "
                "model.resize_token_embeddings(…)"
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
        denominator: Sum of weights of the whole step over all ranks: `step.loss_denominator`; 0
            gives a loss of 0.
        chunk_tokens: Tokens per chunk. If there are several chunks, each is computed again in the
            backward pass, so that only one chunk of float32 probabilities exists at any time.
    """
    flat, goals = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    weights = (goals != IGNORE).float() if loss_weights is None else loss_weights.reshape(-1)
    pieces = list(
        zip(
            flat.split(chunk_tokens),
            goals.split(chunk_tokens),
            weights.split(chunk_tokens),
            strict=True,
        )
    )
    if len(pieces) == 1 or not torch.is_grad_enabled():
        sums = [_weighted_sum(*piece) for piece in pieces]
    else:
        sums = [checkpoint(_weighted_sum, *piece, use_reentrant=False) for piece in pieces]
    total = torch.stack(sums).sum()
    return total / denominator if denominator else total


def loss(model: Any, rows: Rows, denominator: float) -> torch.Tensor:
    """Loss of a transformers causal language model on one row or several; call backward for each,
    then step.

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


def _weighted_sum(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    losses = cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="none")
    return (losses * weights).sum()
