"""Context parallelism: ranks share a row, gather its keys and values, and attend with their own
queries.

```python
part = ps.inputs.RowSlice.of(row, rank, size)                             # this rank's slots, NumPy
attention = slice_attention(part, group, device="cuda", dtype=torch.bfloat16)
hidden = attention(q, k, v)                                                # of this rank's t slots, in each layer
```

The backward pass sums the gradients of keys and values over the ranks, each of which gets those of
its own slots. So the sum over ranks of the losses of slices has the gradients of the whole row, to
rounding. Each layer takes one collective for keys and values together in each direction, and every
rank must run the same layers. The graph keeps the gathered keys and values of each layer, unless
the layer is checkpointed.

Source: context parallelism with gathered keys, Llama 3, arXiv:2407.21783, section 3.3.2.
"""  # noqa: E501

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.core.errors import ConfigError, DistributedError
from penstock.models.attention.row_attention import RowAttention
from penstock.models.attention.slices import prepare_slice
from penstock.plan.inputs import RowSlice
from penstock.plan.inputs.torch_tensors import on_device


def slice_attention(
    part: RowSlice,
    group: object = None,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    backend: str = "auto",
    window: int | None = None,
    softcap: float | None = None,
) -> RowAttention:
    """Attention of a slice, over the keys of all ranks that share the row; called with q, k and v
    of its own t slots.

    Args:
        part: This rank's slice, as `RowSlice.of` gives it.
        group: The ranks that share the row: a process group, or a `DeviceMesh` of one dimension;
            None: all ranks.
        device: Device of queries, keys and values.
        dtype: Their dtype.
        backend: per_document, varlen, dense or auto.
        window: Maximum tokens that a token sees, including itself; None: all before it.
        softcap: Scores are kept within ± this number; None: they are as they come.

    Raises:
        ConfigError: The backend does not support the slice.
        DistributedError: The group is not the one that the row was split for.
    """
    device, group = torch.device(device), _process_group(group)
    _check_place(part, group)
    name, attend = prepare_slice(
        part, device=device, dtype=dtype, backend=backend, window=window, softcap=softcap
    )
    order = on_device(part.order, device)

    def gathered(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        keys, values = gather_slots((k, v), order, group)
        return attend(q, keys, values, sinks)

    return RowAttention(
        backend=name,
        slots=len(part.index),
        device=device,
        dtype=dtype,
        softcap=softcap,
        _attend=gathered,
    )


def gather_slots(tensors: tuple[Tensor, ...], order: Tensor, group: object = None) -> list[Tensor]:
    """What all ranks of a group have of each tensor, in the row's order; gradients go back to the
    ranks, summed.

    Args:
        tensors: [t, heads, dim] of this rank's slots; heads may differ.
        order: int64 [T'], that of the slice, on the same device.
        group: The ranks that share the row: a process group, or a `DeviceMesh` of one dimension;
            None: all ranks.

    Returns:
        [T', heads, dim] of each.
    """
    joined: Tensor = _Gather.apply(torch.cat(tensors, 1), order, _process_group(group))
    return list(joined.split([x.shape[1] for x in tensors], 1))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, order: Tensor, group: Any) -> Tensor:
        ctx.order, ctx.group, ctx.size = order, group, len(order) // len(own)
        if ctx.size == 1:
            return own[order]
        everyone = own.new_empty((len(order), *own.shape[1:]))
        dist.all_gather_into_tensor(everyone, own.contiguous(), group=group)
        return everyone[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        order, [gradient] = ctx.order, gradients
        # Ranks add up: in half precision the sum would be rounded once for each.
        by_rank = torch.empty_like(
            gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)
        )
        by_rank[order] = gradient.to(by_rank.dtype)
        if ctx.size == 1:
            return by_rank.to(gradient.dtype), None, None
        own = by_rank.new_empty((len(by_rank) // ctx.size, *by_rank.shape[1:]))
        dist.reduce_scatter_tensor(own, by_rank, group=ctx.group)
        return own.to(gradient.dtype), None, None


def _process_group(group: object) -> object:
    """A process group; that of a mesh of one dimension."""
    if not hasattr(group, "get_group"):
        return group
    if getattr(group, "ndim", 1) != 1:
        raise ConfigError(
            "context parallelism takes one dimension of a mesh, such as mesh['cp'], not all "
            f"of {group}"
        )
    return group.get_group()


def _check_place(part: RowSlice, group: Any) -> None:
    several = dist.is_available() and dist.is_initialized()
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if several else (0, 1)
    if (rank, size) != (part.rank, part.size):
        what = "this process of the group" if several else "this process, without a process group,"
        raise DistributedError(
            f"the slice is that of rank {part.rank} of {part.size}, but {what} is rank {rank} "
            f"of {size}; split the row by the group's rank and size: RowSlice.of(row, "
            "dist.get_rank(group), dist.get_world_size(group))"
        )
