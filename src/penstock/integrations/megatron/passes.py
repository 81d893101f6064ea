"""What a forward step of Megatron needs besides the arrays: the packed form's parameters, and the
loss of a step.
"""

from typing import Any

import torch

from penstock.core.errors import ConfigError, MissingExtraError


def packed_seq_params(batch: dict[str, object]) -> Any:
    """Megatron's `PackedSeqParams` of a batch of `Batches`.

    Raises:
        MissingExtraError: megatron-core is not installed.
    """
    try:
        from megatron.core.packed_seq_params import PackedSeqParams
    except ModuleNotFoundError as error:
        raise MissingExtraError("megatron-core") from error

    lengths, places, longest = (
        batch[name] for name in ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
    )
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=lengths,
        cu_seqlens_kv=lengths,
        cu_seqlens_q_padded=places,
        cu_seqlens_kv_padded=places,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def step_loss(
    config: object, batch: dict[str, Any], output: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss function of Megatron's forward step: `partial(ps.megatron.step_loss, model.config,
    batch)`.

    The gradients of the step become those of its weighted cross-entropies, divided by the weights
    of all targets of the whole step, however many microbatches and ranks there are. Megatron
    divides by the microbatches and averages over data-parallel ranks, so the loss is multiplied by
    both.

    Args:
        config: The model's `TransformerConfig`.
        batch: Of `Batches`, or this rank's part of it.
        output: [1, S] cross-entropy of each slot, as a GPTModel gives with labels.

    Returns:
        The loss to differentiate; and for the log this microbatch's part of the step's loss ("lm
        loss"): parts of all microbatches and data-parallel ranks add up to it.

    Raises:
        ConfigError: `calculate_per_token_loss`, with which Megatron divides gradients by a number
            of its own.
    """
    if getattr(config, "calculate_per_token_loss", False):
        raise ConfigError(
            "calculate_per_token_loss is on: Megatron would divide gradients by a number of "
            "tokens of its own, after penstock has divided the loss by the weights of the "
            "step; turn it off"
        )
    weights = batch["loss_mask"].reshape(-1)
    # A product with 0 would keep infinite losses of slots without a target.
    losses = torch.where(weights != 0, output.float().reshape(-1), 0.0)
    part = (losses * weights).sum() / (batch["denominator"] or 1.0)
    scale = batch["num_microbatches"] * batch["data_parallel_size"]
    return part * scale, {"lm loss": part.detach()}
