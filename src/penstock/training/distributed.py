"""The processes that train together: who this one is, and sums over all of them.

Each rank's loss is already divided by the denominator of the whole step, so gradients are *summed* over ranks. Without
sharding each rank has all weights, and gradients are summed once a step, in buckets of one dtype: the same sum on every
rank, in an order that the number of ranks alone decides.
"""

import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.errors import ConfigError, OutputError
from penstock.loader import DataParallel
from penstock.locations import local_path
from penstock.locks import lock_folder
from penstock.training.run_folder import LOCK
from penstock.training.settings import check_device

BUCKET_BYTES = 32 << 20
"""Gradients that are summed in one call, at most, unless one alone is larger."""


@final
class Ranks:
    """This process among those that torchrun started; a single one where it did not.

    Use as a context manager: the process group is left when the block is.
    """

    def __init__(self, device: torch.device) -> None:
        self.place = DataParallel.from_env()
        self.device = device
        self._mine = False
        self._lock: weakref.finalize[[int], Ranks] | None = None

    def __enter__(self) -> "Ranks":
        if self.place.size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            self._mine = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock()
        if self._mine and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this process writes what only one may write."""
        return self.place.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.place.size > 1

    def hold(self, run: Path) -> None:
        """Keep other trainings out of a run's folder for as long as this one lasts.

        Raises:
            OutputError: Another process trains into it, or it cannot be made.
        """
        if self._lock is not None:
            self._lock()
        local_path(run, "a run's folder")
        try:
            run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{run}: cannot be written: {error.strerror}") from error
        self._lock = weakref.finalize(self, os.close, lock_folder(run, run / LOCK, doing="training"))

    def barrier(self) -> None:
        """Wait until all are here."""
        if self.several:
            dist.barrier()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over all ranks, in float64."""
        if not self.several:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        found: list[float] = total.tolist()
        return found

    def agree(self, flag: bool) -> bool:
        """Whether any rank says so; the same answer on all of them."""
        return self.sum([float(flag)])[0] > 0

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add the gradients of all ranks, in place. A parameter that no row reached counts as zeros.

        Of a single process too: its optimiser then does what that of several does, and has a state for each parameter.
        """
        bucket: list[Tensor] = []
        for parameter in parameters:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if not self.several:
                continue
            if bucket and (bucket[0].dtype != parameter.grad.dtype or _bytes(bucket) > BUCKET_BYTES):
                _sum_bucket(bucket)
                bucket = []
            bucket.append(parameter.grad)
        if bucket:
            _sum_bucket(bucket)


def local_device(name: str) -> torch.device:
    """The device that a name means for this process: `auto` is this rank's GPU where there is one, else the CPU.

    Raises:
        ConfigError: There is no such device.
    """
    check_device("device", name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    device = torch.device(name)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError):
        # Torch says so by an AssertionError where it was built without CUDA.
        count = torch.cuda.device_count()
        here = f"cpu and {count} of cuda" if count else "cpu"
        raise ConfigError(f"device {name!r}: is not here, torch finds {here}; give one that is here, or auto") from None
    return device


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _sum_bucket(gradients: Sequence[Tensor]) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
