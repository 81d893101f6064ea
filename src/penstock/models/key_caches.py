"""Which cache of keys and values a device takes: pages on CUDA, else slots (on the CPU, the system
itself provides memory page by page).
"""

from collections.abc import Sequence

import torch
from torch import nn

from penstock.models.cache import Cache
from penstock.models.paged_cache import PagedCache
from penstock.models.static_steps import no_graphs

KeyCache = Cache | PagedCache


def new_key_cache(
    module: nn.Module,
    *,
    layers: int,
    sequences: int,
    capacity: int,
    kv_heads: int,
    head_width: int,
    device: torch.device,
    dtype: torch.dtype,
    windows: Sequence[int | None],
    softcap: float | None,
    recurrent: bool = False,
) -> KeyCache:
    """An empty cache; see `Cache` for the arguments.

    Args:
        module: Its weights; steps of a sharded one are not recorded, as its ranks must run them
            together.
    """
    paged = device.type == "cuda"
    made: KeyCache = (PagedCache if paged else Cache)(
        layers=layers,
        sequences=sequences,
        capacity=capacity,
        kv_heads=kv_heads,
        head_width=head_width,
        device=device,
        dtype=dtype,
        windows=windows,
        softcap=softcap,
        recurrent=recurrent,
    )
    if isinstance(made, PagedCache) and (
        no_graphs() or any(hasattr(weight, "device_mesh") for weight in module.parameters())
    ):
        made.steps = None
    return made
