"""FSDP2: weights, gradients and optimiser states shared out among the ranks, each gathered where it is needed."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from penstock.errors import ConfigError, StateError
from penstock.training.distributed import Ranks


def shard(model: Any, ranks: Ranks) -> None:
    """Shard a model in place, block by block; call it when all ranks have the same weights.

    Gradients are summed over ranks, not averaged, because each rank's loss is divided by the whole step's denominator.

    Raises:
        ConfigError: There is a single process, or the model has no blocks to shard by.
    """
    from torch.distributed.fsdp import fully_shard

    if not ranks.several:
        raise ConfigError("training.shard needs several processes; start them with torchrun, or set it to false")
    blocks = getattr(model, "blocks", None)
    if blocks is None:
        raise ConfigError("training.shard: this model has no `blocks` to shard by; train it without shard")
    mesh = init_device_mesh(ranks.device.type, (ranks.place.size,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in (model, *blocks):
        module.set_gradient_divide_factor(1.0)
        # Else a factor becomes a scaled sum, which gloo does not know.
        module.set_force_sum_reduction_for_comms(True)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights on the CPU of the first rank (empty on others); every rank must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: Any = get_model_state_dict(model, options=options)
    return dict(weights)


def load_whole_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Give a sharded model weights that every rank has whole."""
    set_model_state_dict(model, {**weights}, options=StateDictOptions(full_state_dict=True))


@torch.no_grad()
def share_out(whole: Mapping[str, torch.Tensor], shares: Mapping[str, torch.Tensor]) -> None:
    """Give each tensor of `shares`, in place, its part of the whole tensor of that name; every rank has all of them.

    Raises:
        StateError: One is not among the whole ones.
    """
    for name, share in shares.items():
        if name not in whole:
            raise StateError(f"optimizer state: {name} is missing; resume with the optimizer that it was saved with")
        if isinstance(share, DTensor):
            share.copy_(distribute_tensor(whole[name].to(share.device), share.device_mesh, share.placements))
        else:
            share.copy_(whole[name])
