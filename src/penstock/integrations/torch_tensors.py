"""Rows as torch tensors, for any loop.

Arrays become tensors without a copy where the dtype is right and the device is the CPU.
"""

from collections import deque
from typing import Any

from penstock.errors import MissingExtraError

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "train") from error

import numpy as np

from penstock.inputs import ModelInput

_INT64 = ("tokens", "targets", "positions")
"""Fields that torch wants in int64; converted on the device, so that fewer bytes travel."""

_in_flight: deque[tuple[Any, list[torch.Tensor]]] = deque()
"""Copies to a GPU under way, with the page-locked memory they read: the loader must not fill it anew until then."""


def to_torch(
    row: ModelInput, device: torch.device | str | None = None, non_blocking: bool = True
) -> dict[str, torch.Tensor | int | None]:
    """The fields of a row by name: arrays as tensors (tokens, targets, positions in int64), numbers as they are.

    Args:
        row: What a loader gave.
        device: Where to; None leaves them on the CPU, sharing memory with the row's arrays where dtypes agree.
        non_blocking: Copy from page-locked memory without waiting.
    """
    fields = {
        name: getattr(row, name)
        for name in (
            "tokens", "targets", "loss_weights", "positions", "document_ids", "cu_seqlens", "max_seqlen", "num_tokens",
            "source_ids", "prefix_lengths", "prefix",
        )
    }  # fmt: skip
    held = {name: _tensor(value) for name, value in fields.items() if isinstance(value, np.ndarray)}
    moved = held if device is None else {k: v.to(device, non_blocking=non_blocking) for k, v in held.items()}
    if device is not None and non_blocking and torch.device(device).type == "cuda":
        _hold(list(held.values()), torch.device(device))
    moved = {name: tensor.long() if name in _INT64 else tensor for name, tensor in moved.items()}
    return {**fields, **moved}


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _hold(tensors: list[torch.Tensor], device: torch.device) -> None:
    while _in_flight and _in_flight[0][0].query():
        _in_flight.popleft()
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record()
    _in_flight.append((event, tensors))
