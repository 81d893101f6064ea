"""Activation checkpointing: blocks keep little for the backward pass and run again there.

`full` keeps the input of a block, 2 × width bytes a slot in bfloat16, and costs one more forward
pass. `selective` also keeps what attention gave, about 4.3 × width, so that attention, whose cost
grows with the length of documents, is not computed again; keeping the matrix products, too, would
save only a third (measured; 28 to 38 × width without checkpoints). Gradients are equal bit for bit,
since the same operations run on the same inputs.

Source: Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174; selective: Reducing
Activation Recomputation in Large Transformer Models, arXiv:2205.05198.
"""

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from penstock.models.theirs.recurrence import running_row


def checkpoint_blocks(blocks: Iterable[nn.Module], *, selective: bool) -> None:
    """Let blocks run again in the backward pass instead of keeping their activations.

    Args:
        blocks: Of a model, before they are compiled or sharded, which then covers this.
        selective: Whether they keep what attention gave.
    """
    for block in blocks:
        _checkpoint(block, selective=selective)


def _checkpoint(block: nn.Module, *, selective: bool) -> None:
    # What runs around a block, such as the hooks of FSDP, is not part of it.
    forward = block.forward
    keeps: dict[str, Any] = {}
    if selective:
        keeps["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    @functools.wraps(forward)
    def run(*args: Any, **given: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **given)
        again = forward
        if not torch.compiler.is_compiling():
            # The backward pass may run in another thread, which knows nothing of the row.
            again = _again(forward, running_row())
        return checkpoint(again, *args, use_reentrant=False, **keeps, **given)

    block.forward = run


def _again(
    forward: Callable[..., Any], running: Callable[[], AbstractContextManager[None]] | None
) -> Callable[..., Any]:
    def run(*args: Any, **given: Any) -> Any:
        with nullcontext() if running is None else running():
            return forward(*args, **given)

    return run


def _policy(_context: object, operation: Any, *args: object, **given: object) -> CheckpointPolicy:
    keeps = _is_attention(operation)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _is_attention(operation: Any) -> bool:
    """Whether an operation is the attention of a block, by whichever backend."""
    name = str(operation)
    return "backward" not in name and any(
        part in name
        for part in ("scaled_dot_product", "varlen_attn", "penstock.attend", "flex_attention")
    )
