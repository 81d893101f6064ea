"""Where a batch's rows go: on one device, or split over an axis of a mesh, in one process or several."""

from math import prod

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.errors import ConfigError, DistributedError
from penstock.integrations.jax.batch import Batch
from penstock.loader import DataParallel

Axis = str | tuple[str, ...]
"""Name of one axis of a mesh, or of several that split rows together."""


def data_parallel(mesh: Mesh, axis: Axis = "data") -> DataParallel:
    """This process's place among those that get different rows, for `Loader(data_parallel=…)`.

    Processes that share the rows of a mesh's place (their devices differ along other axes only) have one place.

    Raises:
        ConfigError: The mesh has no such axis, or this process's devices do not lie side by side along it.
    """
    held = _shards_here(mesh, axis)
    count = len(held)
    if held[-1] - held[0] + 1 != count or held[0] % count or _num_shards(mesh, axis) % count:
        raise ConfigError(
            f"mesh: this process's devices hold shards {held} of {_num_shards(mesh, axis)} along {axis!r}; order the "
            "devices so that those of a process lie side by side (jax.make_mesh does)"
        )
    return DataParallel(held[0] // count, _num_shards(mesh, axis) // count)


def check_place(place: DataParallel, batch_size: int, mesh: Mesh | None, axis: Axis) -> None:
    """Refuse a loader that gives this process other rows than its devices are due, or rows that do not divide."""
    if mesh is None:
        if jax.process_count() > 1 and place.size == 1:
            raise DistributedError(
                f"this is process {jax.process_index()} of {jax.process_count()}, and the loader gives each all rows; "
                "pass it data_parallel=penstock.integrations.jax.data_parallel(mesh), and the mesh to batches"
            )
        return
    due = data_parallel(mesh, axis)
    if place != due:
        raise DistributedError(
            f"the loader's place is rank {place.rank} of {place.size}, in the mesh this process is rank {due.rank} of "
            f"{due.size} along {axis!r}; pass the loader data_parallel=penstock.integrations.jax.data_parallel(mesh)"
        )
    shards = len(_shards_here(mesh, axis))
    if batch_size % shards:
        raise ConfigError(
            f"{batch_size} rows of this process in a batch do not divide among its {shards} shards along {axis!r}; "
            "change rows_per_step or batch_size"
        )


def put(batch: Batch, processes: int, mesh: Mesh | None, axis: Axis) -> Batch:
    """A batch of NumPy arrays on the devices: rows split, the denominator everywhere."""
    if mesh is None:
        on_device: Batch = jax.device_put(batch)
        return on_device
    split, whole = NamedSharding(mesh, PartitionSpec(axis)), NamedSharding(mesh, PartitionSpec())

    def place(array: jax.Array) -> jax.Array:
        everywhere = array is batch.loss_denominator
        shape = array.shape if everywhere else (array.shape[0] * processes, *array.shape[1:])
        placed: jax.Array = jax.make_array_from_process_local_data(whole if everywhere else split, array, shape)
        return placed

    split_up: Batch = jax.tree.map(place, batch)
    return split_up


def _axes(axis: Axis) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else axis


def _num_shards(mesh: Mesh, axis: Axis) -> int:
    unknown = [name for name in _axes(axis) if name not in mesh.shape]
    if unknown:
        raise ConfigError(f"mesh: it has the axes {', '.join(mesh.axis_names)}, and no {unknown[0]!r}; pass axis=…")
    return prod(mesh.shape[name] for name in _axes(axis))


def _shards_here(mesh: Mesh, axis: Axis) -> list[int]:
    """Numbers of the shards along `axis` that this process's devices hold."""
    shards = _num_shards(mesh, axis)
    indices = NamedSharding(mesh, PartitionSpec(axis)).addressable_devices_indices_map((shards,))
    return sorted({index[0].indices(shards)[0] for index in indices.values() if index is not None})
