"""Which part of each step is this process's."""

import os
import sys
from dataclasses import dataclass
from typing import Any, final

from penstock.core.errors import ConfigError, DistributedError
from penstock.loader.mixture import whole


@final
@dataclass(frozen=True, slots=True)
class DataParallel:
    """Rank among the processes that share each step. Processes that share a model (tensor, pipeline) have one rank."""

    rank: int = 0
    """This process, 0 … size − 1."""
    size: int = 1
    """Number of processes that get different rows."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", whole("data_parallel: rank", self.rank))
        object.__setattr__(self, "size", whole("data_parallel: size", self.size))
        if self.size < 1:
            raise ConfigError(f"data_parallel: size must be at least 1, got {self.size}")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"data_parallel: rank must be 0 … {self.size - 1}, got {self.rank} of {self.size}")

    @classmethod
    def from_env(cls) -> "DataParallel":
        """What torchrun says (RANK, WORLD_SIZE); a single process when it says nothing."""
        rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if (rank is None) != (size is None):
            raise DistributedError(f"RANK is {rank} and WORLD_SIZE is {size}: set both (torchrun does) or neither")
        if not all((value or "0").isdecimal() for value in (rank, size)):
            raise DistributedError(f"RANK is {rank!r} and WORLD_SIZE is {size!r}: both must be numbers")
        return cls(int(rank or 0), int(size or 1))

    @classmethod
    def of(cls, value: "DataParallel | tuple[int, int] | Any | None") -> "DataParallel":
        """From what a user may pass: this class, (rank, size), a 1-D torch DeviceMesh, or None.

        Raises:
            DistributedError: None in a run of several processes, where every rank would train on the same rows.
        """
        if value is None:
            found = cls.from_env()
            if found.size > 1:
                raise DistributedError(
                    f"this is rank {found.rank} of {found.size}, but data_parallel was not given, so every rank would "
                    "train on the same rows; pass data_parallel=DataParallel.from_env(), (rank, size) or a DeviceMesh"
                )
            return cls()
        if isinstance(value, DataParallel):
            return value
        if isinstance(value, tuple) and len(value) == 2:
            return cls(*value)
        if hasattr(value, "get_local_rank") and hasattr(value, "size"):
            if getattr(value, "ndim", 1) != 1:
                raise ConfigError(f"data_parallel: pass the data-parallel dimension of the mesh, not all of {value}")
            return cls(int(value.get_local_rank()), int(value.size()))
        raise ConfigError(f"data_parallel: expected DataParallel, (rank, size) or a DeviceMesh, got {value!r}")

    def rows(self, num_rows: int) -> tuple[int, int]:
        """This rank's rows [begin, end) of a step of `num_rows`."""
        if num_rows % self.size:
            raise ConfigError(
                f"a step of {num_rows} rows does not divide among {self.size} ranks; "
                f"set rows_per_step to a multiple of {self.size}"
            )
        each = num_rows // self.size
        return self.rank * each, (self.rank + 1) * each


def refuse_worker_process() -> None:
    """Refuse to iterate a loader in a worker process of torch's `DataLoader`: every worker would have all rows.

    Raises:
        DistributedError: This process is such a worker.
    """
    data = sys.modules.get("torch.utils.data")
    worker = None if data is None else data.get_worker_info()
    if worker is not None:
        raise DistributedError(
            f"a torch DataLoader iterates this Loader in worker {worker.id} of {worker.num_workers}, but each worker "
            "would give every row, and none would report its state; set num_workers=0: a Loader has threads of its own "
            "(threads=, prefetch=)"
        )
