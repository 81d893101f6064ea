"""Puts a loader's steps on devices as batches: on one device, or split over an axis of a mesh, in
one process or more.

Rows are copied once, into new memory that only JAX holds: the loader reuses its own buffers, and
JAX on the CPU may keep a NumPy array instead of copying it.
"""

import json
from collections.abc import Generator
from math import prod
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.core.errors import ConfigError, DistributedError
from penstock.integrations.jax.batch import Batch, stack
from penstock.plan.loader import Step
from penstock.plan.loader.agreement import Gather, check_ranks
from penstock.plan.loader.data_parallel import DataParallel
from penstock.plan.loader.loader import Loader

Axis = str | tuple[str, ...]
"""Name of one mesh axis, or of several that split rows together."""


def data_parallel(mesh: Mesh, axis: Axis = "data") -> DataParallel:
    """This process's place among the processes that get different rows, for
    `Loader(data_parallel=…)`.

    Processes that get the same rows (their devices differ only along other axes) have the same
    place.

    Raises:
        ConfigError: The mesh has no such axis, or this process's devices are not contiguous along
            it.
    """
    held = _shards_here(mesh, axis)
    count = len(held)
    if held[-1] - held[0] + 1 != count or held[0] % count or _num_shards(mesh, axis) % count:
        raise ConfigError(
            f"mesh: this process's devices hold shards {held} of {_num_shards(mesh, axis)} "
            f"along {axis!r}; order the devices so that those of a process are contiguous "
            "(jax.make_mesh does)"
        )
    return DataParallel(held[0] // count, _num_shards(mesh, axis) // count)


def check_place(place: DataParallel, batch_size: int, mesh: Mesh | None, axis: Axis) -> None:
    """Refuse a loader that gives this process the rows of other devices, or a number of rows that
    does not divide.
    """
    if mesh is None:
        if jax.process_count() > 1 and place.size == 1:
            raise DistributedError(
                f"this is process {jax.process_index()} of {jax.process_count()}, and the "
                "loader gives each all rows; pass "
                "data_parallel=penstock.integrations.jax.data_parallel(mesh) to it, and the "
                "mesh to batches"
            )
        return
    expected = data_parallel(mesh, axis)
    if place != expected:
        raise DistributedError(
            f"the loader is rank {place.rank} of {place.size}, but in the mesh this process "
            f"is rank {expected.rank} of {expected.size} along {axis!r}; pass "
            "data_parallel=penstock.integrations.jax.data_parallel(mesh) to it"
        )
    shards = len(_shards_here(mesh, axis))
    if batch_size % shards:
        raise ConfigError(
            f"this process's {batch_size} rows of a batch cannot be divided among its "
            f"{shards} shards along {axis!r}; change rows_per_step or batch_size"
        )


def put(batch: Batch, processes: int, mesh: Mesh | None, axis: Axis) -> Batch:
    """Put a batch of NumPy arrays on the devices: rows are split, the denominator is replicated."""
    if mesh is None:
        on_device: Batch = jax.device_put(batch)
        return on_device
    split, whole = NamedSharding(mesh, PartitionSpec(axis)), NamedSharding(mesh, PartitionSpec())

    def place(array: jax.Array) -> jax.Array:
        everywhere = array is batch.loss_denominator
        shape = array.shape if everywhere else (array.shape[0] * processes, *array.shape[1:])
        placed: jax.Array = jax.make_array_from_process_local_data(
            whole if everywhere else split, array, shape
        )
        return placed

    split_up: Batch = jax.tree.map(place, batch)
    return split_up


def _axes(axis: Axis) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else axis


def _num_shards(mesh: Mesh, axis: Axis) -> int:
    unknown = [name for name in _axes(axis) if name not in mesh.shape]
    if unknown:
        raise ConfigError(
            f"mesh: it has the axes {', '.join(mesh.axis_names)}, but no {unknown[0]!r}; pass "
            "axis=…"
        )
    return prod(mesh.shape[name] for name in _axes(axis))


def _shards_here(mesh: Mesh, axis: Axis) -> list[int]:
    """Numbers of the shards along `axis` that this process's devices hold."""
    shards = _num_shards(mesh, axis)
    indices = NamedSharding(mesh, PartitionSpec(axis)).addressable_devices_indices_map((shards,))
    return sorted({index[0].indices(shards)[0] for index in indices.values() if index is not None})


def batches(
    loader: Loader,
    *,
    batch_size: int | None = None,
    max_documents: int | None = None,
    mesh: Mesh | None = None,
    axis: Axis = "data",
    prefix: bool | None = None,
) -> Generator[tuple[Batch, Step]]:
    """Iterate over the loader's steps, as pairs of a batch and its step.

    The step stays on the host: save `step.resume_state` when the step's last batch is trained. A
    short last step gets rows of padding, so that a jitted function never sees another shape.

    Args:
        loader: Continues from its current place; with several processes, make it with
            `data_parallel(mesh)`.
        batch_size: Rows of this process per batch, a divisor of its rows per step; None: all of
            them. With fewer, a step is several batches (gradient accumulation), all with the
            denominator of the whole step.
        max_documents: Maximum documents per row; None: the loader's `documents_per_row`, else a
            row's number of tokens, which both always suffice. A row with more is an error, only in
            the process that has this row.
        mesh: Where to put batches, split by rows over `axis`. None: this process's default device.
        axis: Name of the mesh axis, or axes, over which rows are split.
        prefix: Whether the model supports bidirectional prefixes, as in `InputRequirements.prefix`:
            True, it reads `batch.prefix`; False, it cannot; None, unknown. An objective that makes
            prefixes requires True.

    Raises:
        ConfigError: `batch_size` does not divide the rows or is not divisible among the devices, an
            objective makes prefixes that the model does not support, or a row has too many
            documents: names the row. Or a process has other data or settings than the first: all
            call this together, and compare.
        DistributedError: The loader's place is not that of this process in the mesh.
    """
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "max_documents": max_documents,
        "mesh": mesh,
        "axis": axis,
        "prefix": prefix,
    }
    made = open_batches(loader, **options)
    static = {name: options[name] for name in ("batch_size", "max_documents", "prefix")}
    check_ranks(loader, process_gather(), static)
    return made


def process_gather() -> Gather | None:
    """How JAX's processes talk; None where there is one."""
    if jax.process_count() == 1:
        return None

    def gather(value: object) -> list[Any]:
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(text)))).tolist()
        padded = np.zeros(max(lengths), np.uint8)
        padded[: len(text)] = text
        found = np.asarray(multihost_utils.process_allgather(padded))
        return [
            json.loads(row[:length].tobytes()) for row, length in zip(found, lengths, strict=True)
        ]

    return gather


def open_batches(
    loader: Loader,
    *,
    batch_size: int | None,
    max_documents: int | None,
    mesh: Mesh | None,
    axis: Axis,
    prefix: bool | None,
) -> Generator[tuple[Batch, Step]]:
    """As `batches`, without comparing processes."""
    begin, end = loader.data_parallel.rows(loader.settings.constant_rows("JAX"))
    size = end - begin if batch_size is None else batch_size
    if size < 1 or (end - begin) % size:
        raise ConfigError(
            f"batch_size must divide this process's {end - begin} rows of a step, got {size}"
        )
    slots = loader.settings.sequence_length
    most = (loader.settings.documents_per_row or slots) if max_documents is None else max_documents
    if most < 1:
        raise ConfigError(f"max_documents must be at least 1, got {max_documents}")
    _check_prefixes(loader, prefix)
    check_place(loader.data_parallel, size, mesh, axis)
    return _batches(loader, size, end - begin, most, mesh, axis)


def _check_prefixes(loader: Loader, prefix: bool | None) -> None:
    """Refuse an objective with prefixes unless the model is known to support them."""
    source = loader.bidirectional_source
    if source is None or prefix is True:
        return
    reason = (
        "does not support them (prefix=False)"
        if prefix is False
        else "is not known to support them"
    )
    raise ConfigError(
        f"source {source!r}: its objective has bidirectional prefixes, and the model "
        f"{reason}; pass attention_mask(batch.segment_ids, batch.prefix) to the attention and "
        "call batches(…, prefix=True), or set bidirectional=False in the objective"
    )


def _batches(
    loader: Loader, size: int, rows_per_step: int, max_documents: int, mesh: Mesh | None, axis: Axis
) -> Generator[tuple[Batch, Step]]:
    for step in loader:
        first = loader.data_parallel.rank * len(step)
        for begin in range(0, rows_per_step, size):
            batch = stack(
                step[begin : begin + size],
                like=step[0],
                size=size,
                max_documents=max_documents,
                denominators=step.loss_denominators,
                where=f"step {step.index}",
                first=first + begin,
            )
            yield put(batch, loader.data_parallel.size, mesh, axis), step
