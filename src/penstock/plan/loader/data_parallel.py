"""Which part of each step is this process's, and which dimension of a device mesh is which
parallelism.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

from penstock.core.errors import ConfigError, DistributedError
from penstock.core.suggestions import suggests
from penstock.plan.loader.mixture import whole

DATA_DIMENSIONS = (
    "dp",
    "data",
    "data_parallel",
    "ddp",
    "fsdp",
    "hsdp",
    "dp_replicate",
    "dp_shard",
    "replicate",
    "shard",
    "dp_shard_mod_ep",
    "dp_shard_in_ep",
)
"""Names of mesh dimensions whose ranks get different rows: those of torch, Accelerate, torchtitan
and JAX.
"""
MODEL_DIMENSIONS = (
    "tp",
    "tensor",
    "tensor_parallel",
    "model",
    "mp",
    "pp",
    "pipe",
    "pipeline",
    "pipeline_parallel",
    "stage",
    "cp",
    "context",
    "context_parallel",
    "sp",
    "seq",
    "sequence",
    "sequence_parallel",
    "ep",
    "expert",
    "etp",
    "expert_parallel",
)
"""Names of mesh dimensions whose ranks share a model or a row, and so get the same rows."""


@suggests
@final
@dataclass(frozen=True, slots=True)
class DataParallel:
    """Rank among the processes that share each step.

    Processes that share a model (tensor, pipeline, expert parallel) or a row (context parallel)
    have one rank.
    """

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
            raise ConfigError(
                f"data_parallel: rank must be 0 … {self.size - 1}, got {self.rank} of {self.size}"
            )

    @classmethod
    def from_env(cls) -> "DataParallel":
        """What torchrun says (RANK, WORLD_SIZE); a single process when it says nothing."""
        rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if (rank is None) != (size is None):
            raise DistributedError(
                f"RANK is {rank} and WORLD_SIZE is {size}: set both (torchrun does) or neither"
            )
        if not all((value or "0").isdecimal() for value in (rank, size)):
            raise DistributedError(
                f"RANK is {rank!r} and WORLD_SIZE is {size!r}: both must be numbers"
            )
        return cls(int(rank or 0), int(size or 1))

    @classmethod
    def of(cls, value: "DataParallel | tuple[int, int] | Mesh | None") -> "DataParallel":
        """From what a user may pass: this class, (rank, size), a torch DeviceMesh (see
        `from_mesh`), or None.

        Raises:
            DistributedError: None in a run of several processes, where every rank would train on
                the same rows.
        """
        if value is None:
            found = cls.from_env()
            if found.size > 1:
                raise DistributedError(
                    f"this is rank {found.rank} of {found.size}, but data_parallel was not "
                    "given, so every rank would train on the same rows; pass "
                    "data_parallel=DataParallel.from_env(), (rank, size) or a DeviceMesh"
                )
            return cls()
        if isinstance(value, DataParallel):
            return value
        if isinstance(value, tuple) and len(value) == 2:
            return cls(*value)
        if isinstance(value, Mesh):
            return cls.from_mesh(value)
        raise ConfigError(
            f"data_parallel: expected DataParallel, (rank, size) or a DeviceMesh, got {value!r:.60}"
            + ("; call it: DataParallel.from_env()" if callable(value) else "")
        )

    @classmethod
    def from_mesh(cls, mesh: "Mesh", dims: Sequence[str | int] | None = None) -> "DataParallel":
        """From a torch `DeviceMesh` of any number of dimensions.

        Ranks that differ only in other dimensions (tensor, pipeline, expert, context parallel) get
        the same rows.

        Args:
            mesh: The mesh, of which this process is a part.
            dims: The data-parallel dimensions, by name or number; None: those named in
                `DATA_DIMENSIONS`. A mesh of one dimension is data parallel, unless its name is one
                of `MODEL_DIMENSIONS`.

        Raises:
            ConfigError: The names do not say which dimensions are data parallel; lists all
                dimensions.
            DistributedError: This process is not in the mesh.
        """
        axes = _data_dimensions(mesh) if dims is None else _chosen(mesh, dims)
        place = mesh.get_coordinate()
        if place is None:
            raise DistributedError(
                f"data_parallel: this process is not in the mesh {_describe(mesh)}"
            )
        rank, size = 0, 1
        for axis in axes:
            ranks = _size(mesh, axis)
            rank, size = rank * ranks + int(place[axis]), size * ranks
        return cls(rank, size)

    def rows(self, num_rows: int) -> tuple[int, int]:
        """This rank's rows [begin, end) of a step of `num_rows`."""
        if num_rows % self.size:
            raise ConfigError(
                f"a step of {num_rows} rows does not divide among {self.size} ranks; "
                f"set rows_per_step to a multiple of {self.size}"
            )
        each = num_rows // self.size
        return self.rank * each, (self.rank + 1) * each


@runtime_checkable
class Mesh(Protocol):
    """What is read of a torch `DeviceMesh`."""

    @property
    def ndim(self) -> int:
        """Number of its dimensions."""

    @property
    def mesh_dim_names(self) -> Sequence[str] | None:
        """Their names, if they have any."""

    def size(self, dim: int | None = None, /) -> int:
        """Ranks along a dimension, or in all."""

    def get_coordinate(self) -> Sequence[int] | None:
        """The place of this process in each dimension; None: it is not in the mesh."""


def _describe(mesh: Mesh) -> str:
    """A mesh in words: its dimensions with their sizes."""
    names = mesh.mesh_dim_names or [f"dimension {axis}" for axis in range(mesh.ndim)]
    return ", ".join(f"{name}: {_size(mesh, axis)}" for axis, name in enumerate(names))


def _size(mesh: Mesh, axis: int) -> int:
    return mesh.size() if mesh.ndim == 1 else mesh.size(axis)


def _data_dimensions(mesh: Mesh) -> list[int]:
    """The numbers of the data-parallel dimensions, by their names."""
    names, count = mesh.mesh_dim_names, mesh.ndim
    if count == 1:
        return [] if names and names[0].lower() in MODEL_DIMENSIONS else [0]
    if not names:
        raise ConfigError(
            f"data_parallel: the mesh has {count} dimensions without names "
            f"({_describe(mesh)}), so it does not say which get different rows; "
            "give them names (mesh_dim_names=), or pass DataParallel.from_mesh(mesh, "
            "dims=(…))"
        )
    known = DATA_DIMENSIONS + MODEL_DIMENSIONS
    unknown = [
        name
        for axis, name in enumerate(names)
        if name.lower() not in known and _size(mesh, axis) > 1
    ]
    if unknown:
        raise ConfigError(
            f"data_parallel: unknown mesh dimension {', '.join(map(repr, unknown))} in a mesh "
            f"with {_describe(mesh)}: do its ranks get different rows, or the "
            "same? Name those that get different rows: DataParallel.from_mesh(mesh, "
            f"dims=(…)); known as such are {', '.join(DATA_DIMENSIONS)}"
        )
    return [axis for axis, name in enumerate(names) if name.lower() in DATA_DIMENSIONS]


def _chosen(mesh: Mesh, dims: Sequence[str | int]) -> list[int]:
    """The numbers of dimensions that are given by name or number, in the order of the mesh."""
    if isinstance(dims, str | int):
        dims = (dims,)
    known: dict[str | int, int] = {axis: axis for axis in range(mesh.ndim)}
    known |= {name: axis for axis, name in enumerate(mesh.mesh_dim_names or ())}
    for one in dims:
        if one not in known:
            raise ConfigError(
                f"data_parallel: the mesh has no dimension {one!r}; it has {_describe(mesh)}"
            )
    axes = sorted(known[one] for one in dims)
    if len(set(axes)) < len(axes):
        raise ConfigError(
            f"data_parallel: dims {tuple(dims)!r} names a dimension of the mesh twice"
        )
    return axes


def refuse_worker_process() -> None:
    """Refuse to iterate a loader in a worker process of torch's `DataLoader`: every worker would
    have all rows.

    Raises:
        DistributedError: This process is such a worker.
    """
    data = sys.modules.get("torch.utils.data")
    worker = None if data is None else data.get_worker_info()
    if worker is not None:
        raise DistributedError(
            f"a torch DataLoader iterates this Loader in worker {worker.id} of "
            f"{worker.num_workers}, but each worker would give every row, and none would "
            "report its state; set num_workers=0: a Loader has threads of its own (threads=, "
            "prefetch=)"
        )
