"""Rows and steps as torch tensors, for any loop.

Arrays become tensors without a copy where the dtype is right and the device is the CPU.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, cast

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError, MissingExtraError
from penstock.core.suggestions import suggests

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "train") from error

import numpy as np

from penstock.plan.inputs.model_input import ModelInput, RowFields

_INT64 = ("tokens", "targets", "positions")
"""Fields that torch needs in int64; converted on the device, so that fewer bytes are copied."""

_in_flight: deque[tuple[Any, list[torch.Tensor]]] = deque()
"""Copies to a GPU in progress, with the page-locked memory that they read: the loader must not
refill it until then.
"""


@suggests
def to_torch(
    row: ModelInput, device: torch.device | str | None = None, non_blocking: bool = True
) -> RowFields[torch.Tensor]:
    """The fields of a row by name: arrays as tensors (tokens, targets, positions in int64), numbers
    as they are.

    Args:
        row: A row of a loader.
        device: Target device; None: the CPU, sharing memory with the row's arrays if dtypes agree.
        non_blocking: Copy from page-locked memory without waiting.
    """
    fields = {
        name: getattr(row, name)
        for name in (
            "tokens",
            "targets",
            "loss_weights",
            "positions",
            "document_ids",
            "cu_seqlens",
            "max_seqlen",
            "num_tokens",
            "source_ids",
            "prefix_lengths",
            "prefix",
            "reach",
            "columns",
        )
    }
    return cast("RowFields[torch.Tensor]", as_tensors(fields, device, non_blocking))


def as_tensors(
    fields: dict[str, Any], device: torch.device | str | None, non_blocking: bool
) -> dict[str, Any]:
    """Arrays as tensors, those of `_INT64` in int64; numbers as they are."""
    held = {name: _tensor(value) for name, value in fields.items() if isinstance(value, np.ndarray)}
    if device is not None and non_blocking and torch.device(device).type == "cuda":
        # From pageable memory, the copy would wait for the GPU.
        held = {k: v if v.is_pinned() else v.pin_memory() for k, v in held.items()}
    moved: dict[str, Any] = (
        dict(held)
        if device is None
        else {k: v.to(device, non_blocking=non_blocking) for k, v in held.items()}
    )
    if device is not None and non_blocking and torch.device(device).type == "cuda":
        _hold(list(held.values()), torch.device(device))
    for name in _INT64:
        if (tensor := moved.get(name)) is not None and tensor.dtype != torch.int64:
            moved[name] = tensor.long()
    if fields.get("columns"):
        moved["columns"] = as_tensors(dict(fields["columns"]), device, non_blocking)
    return {**fields, **moved}


def as_host_tensor(name: str, value: Any) -> Any:
    """The same for one field, on the CPU."""
    if not isinstance(value, np.ndarray):
        return as_tensors(dict(value), None, False) if name == "columns" else value
    tensor = _tensor(value)
    return tensor.long() if name in _INT64 and tensor.dtype != torch.int64 else tensor


def device_of(name: Any) -> torch.device:
    """A device by its name.

    Raises:
        ConfigError: torch knows no such device.
    """
    try:
        return torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"device {name!r}: expected one that torch knows, such as cpu, cuda, cuda:1, xpu or mps"
        ) from None


def is_cpu(device: Any) -> bool:
    """Whether a device is the host; None is."""
    return device is None or device_of(device).type == "cpu"


def on_device(array: Array | torch.Tensor, device: torch.device) -> torch.Tensor:
    """An array of the host as a tensor on a device; the host does not wait for the device.

    A GPU copies from page-locked memory of torch's own pool, which is not used again until the copy
    is done. On the CPU nothing is copied.
    """
    tensor = array if isinstance(array, torch.Tensor) else _tensor(np.ascontiguousarray(array))
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def together_on_device(
    parts: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Tensors of the host on a device, in one copy; the host does not wait for the device.

    Args:
        parts: Each in int64, float64 or uint8.
        device: On the CPU nothing is copied.

    Returns:
        The same tensors by the same names.
    """
    if device.type == "cpu" or not parts:
        return dict(parts)
    raw = [x.contiguous().view(-1).view(torch.uint8) for x in parts.values()]
    # Each begins at a multiple of 8 bytes, so that it can be seen in its own dtype.
    sizes = [-(-len(x) // 8) * 8 for x in raw]
    whole = torch.zeros(sum(sizes), dtype=torch.uint8)
    for held, x in zip(whole.split(sizes), raw, strict=True):
        held[: len(x)] = x
    sent = on_device(whole, device).split(sizes)
    return {
        name: held[: len(x)].view(like.dtype).view(like.shape)
        for held, x, (name, like) in zip(sent, raw, parts.items(), strict=True)
    }


def on_host(tensor: torch.Tensor) -> Any:
    """A tensor as an array of NumPy; of a device, the host waits for it."""
    return (tensor if tensor.device.type == "cpu" else tensor.cpu()).numpy()


def unknown_id(row: ModelInput, known: int) -> str | None:
    """A token id of a row that is not below `known`, with its place, for messages; None: there is
    none.
    """
    slot = int(row.tokens.argmax())
    if row.tokens[slot] < known:
        return None
    place = "padding (the loader's pad_id)" if slot >= row.num_tokens else f"slot {slot} of a row"
    return f"token id {int(row.tokens[slot])} in {place}"


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _hold(tensors: list[torch.Tensor], device: torch.device) -> None:
    while _in_flight and _in_flight[0][0].query():
        _in_flight.popleft()
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record()
    _in_flight.append((event, tensors))
