"""The processes that train together: this process's rank, and sums over all ranks.

Each rank's loss is already divided by the denominator of the whole step, so gradients are *summed*
over ranks: in `gradient_sums` where each rank has all weights, in `sharding` where they are split.
"""

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    rendezvous,
)

from penstock.core.errors import ConfigError, OutputError
from penstock.core.folders import local_path, lock_folder
from penstock.learn.training.processes import SAVE_PATIENCE
from penstock.learn.training.run_folder import LOCK
from penstock.learn.training.settings import check_device
from penstock.plan.loader.agreement import torch_gather
from penstock.plan.loader.data_parallel import DataParallel

PATIENCE = timedelta(hours=1)
"""How long a rank waits for others: as long as one may evaluate, or read data, alone. A rank that
ends is noticed at once, by torchrun; this is for one that hangs.
"""
_groups = 0
"""Process groups that this process has begun."""


def _begin_group(device: torch.device) -> None:
    """A process group of all ranks; its names in the store are its own.

    A second group in the same processes (two runs, one after the other) would else read the
    addresses of the first, which has ended, and wait for it.
    """
    global _groups
    store: Store
    if DataParallel.from_env().size > 1:
        store, rank, size = next(rendezvous("env://"))
    else:
        store, rank, size = HashStore(), 0, 1
    _groups += 1
    names = PrefixStore(f"penstock-{_groups}", store)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=names,
        rank=rank,
        world_size=size,
        timeout=PATIENCE,
        # Known from the start, so that communicators are made at once and on the right GPU.
        device_id=device if on_gpu else None,
    )


@final
class Ranks:
    """This process among those that torchrun started; a single process without torchrun.

    Use as a context manager: it leaves the process group at the end of the block.

    Args:
        device: Of this process.
        context_parallel: Processes that share each row: those with neighbouring ranks.

    Attributes:
        place: Rank and size among all processes.
        data: Among those that get different rows.
        context: Among those that share a row.
        context_group: Their process group; None: this process has rows of its own.
        saving_group: Process group of all ranks for checkpoints, which are written beside the
            training: messages of a thread must not mix with those of the steps. None: one process.

    Raises:
        ConfigError: `context_parallel` does not divide the number of processes.
    """

    def __init__(self, device: torch.device, context_parallel: int = 1) -> None:
        self.place = DataParallel.from_env()
        self.device = device
        rank, size = self.place.rank, self.place.size
        if size % context_parallel:
            raise ConfigError(
                f"training.context_parallel is {context_parallel}, which does not divide the "
                f"number of processes, {size}; start a multiple of {context_parallel} with "
                "torchrun"
            )
        self.data = DataParallel(rank // context_parallel, size // context_parallel)
        self.context = DataParallel(rank % context_parallel, context_parallel)
        self.context_group: Any = None
        self.saving_group: Any = None
        self._host_group: Any = None
        self._mine = False
        self._lock: weakref.finalize[[int], Ranks] | None = None

    def __enter__(self) -> "Ranks":
        if self.several:
            self.begin_group()
            self.saving_group = dist.new_group(backend="gloo", timeout=SAVE_PATIENCE)
        if self.several and dist.get_backend() != "gloo":
            # Numbers of the host go by the network, past the device and what it still computes.
            self._host_group = dist.new_group(backend="gloo", timeout=PATIENCE)
        if self.context.size > 1:
            self.context_group, _ = dist.new_subgroups(self.context.size)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock()
        if self._mine and dist.is_initialized():
            dist.destroy_process_group()
        elif dist.is_initialized():
            for group in (self.saving_group, self.context_group):
                if group is not None:
                    dist.destroy_process_group(group)

    def begin_group(self) -> None:
        """Begin the process group unless there is one; a single process needs its own to shard."""
        if not dist.is_initialized():
            _begin_group(self.device)
            self._mine = True

    @property
    def is_first(self) -> bool:
        """Whether this process writes what only one may write."""
        return self.place.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.place.size > 1

    def hold(self, run: Path) -> None:
        """Lock a run's folder against other trainings until this one ends.

        Raises:
            OutputError: Another process trains into the folder, or it cannot be created.
        """
        if self._lock is not None:
            self._lock()
        local_path(run, "a run's folder")
        try:
            run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{run}: cannot be written: {error.strerror}") from error
        self._lock = weakref.finalize(
            self, os.close, lock_folder(run, run / LOCK, doing="training")
        )

    def barrier(self) -> None:
        """Wait until all ranks arrive."""
        if self.several:
            dist.barrier()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over all ranks, in float64; numbers of the host, so no device waits."""
        if not self.several:
            return list(values)
        total = np.array(values, np.float64)
        dist.all_reduce(torch.from_numpy(total), group=self._host_group)
        found: list[float] = total.tolist()
        return found

    def sum_tensor(self, value: Tensor) -> Tensor:
        """A tensor of the device summed over all ranks; it stays there."""
        if not self.several:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total

    def sum_of_rows(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks with different rows, in float64; ranks that share rows
        have the same.
        """
        return [value / self.context.size for value in self.sum(values)]

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        if not self.several:
            return value
        found = np.array([value], np.int64)
        dist.all_reduce(torch.from_numpy(found), dist.ReduceOp.MIN, group=self._host_group)
        return int(found[0])

    def gather(self, value: object) -> list[Any]:
        """The values of all ranks, in order."""
        gather = torch_gather() if self.several else None
        return [value] if gather is None else list(gather(value))

    def differ(self, number: int) -> bool:
        """Whether not all ranks have the same number; the same answer on all ranks."""
        return self.agree(self.sum([number])[0] != number * self.place.size)

    def agree(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; the same answer on all ranks."""
        return self.sum([float(flag)])[0] > 0


def local_device(name: str) -> torch.device:
    """The device that a name means in this process: `auto` is this rank's GPU if there is one, else
    the CPU.

    Raises:
        ConfigError: The machine has no such device.
    """
    check_device("device", name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_initialized():
        # Rows differ in their documents, so tensors in their sizes: blocks of fixed sizes would
        # leave gaps that no later tensor fits. Read once, when the first tensor comes to a GPU.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if name == "cuda" and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    device = torch.device(name)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError):
        # A torch built without CUDA raises AssertionError.
        count = torch.cuda.device_count()
        here = f"cpu and {count} of cuda" if count else "cpu"
        raise ConfigError(
            f"device {name!r}: not found; torch finds {here}; give one of these, or auto"
        ) from None
    return device
