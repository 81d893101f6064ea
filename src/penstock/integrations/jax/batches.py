"""A loader's steps as batches on the devices.

Rows are copied once, into fresh memory that is then JAX's alone: the loader fills its buffers again when nobody holds
them, and JAX on the CPU may keep a NumPy array instead of copying it.
"""

from collections.abc import Iterator

from jax.sharding import Mesh

from penstock.errors import ConfigError
from penstock.integrations.jax.batch import Batch, stack
from penstock.integrations.jax.placement import Axis, check_place, put
from penstock.loader import Loader, Step


def batches(
    loader: Loader,
    *,
    batch_size: int | None = None,
    max_documents: int | None = None,
    mesh: Mesh | None = None,
    axis: Axis = "data",
    prefix: bool | None = None,
) -> Iterator[tuple[Batch, Step]]:
    """The loader's steps, as pairs of a batch and the step it is of.

    The step stays on the host: `step.resume_state` is what to save when the step's last batch is trained. A last,
    short step gets rows of padding, so that a jitted function never sees another shape.

    Args:
        loader: Goes on from where it is; make it with `data_parallel(mesh)` where there are several processes.
        batch_size: Rows of this process in a batch, a divisor of its rows in a step; all of them when None. With less,
            a step is several batches (gradient accumulation), all with the denominator of the whole step.
        max_documents: Documents that a row holds at most; as many as it has tokens when None, which always suffices. A
            row with more is an error in the process whose row it is, and in no other.
        mesh: Where to put batches, split by rows over `axis`. None: this process's default device.
        axis: Name of the mesh's axis, or axes, over which rows are split.
        prefix: Whether the model honours bidirectional prefixes, as `InputRequirements.prefix`: True, it reads
            `batch.prefix`; False, it cannot; None, nobody says. An objective that makes some is refused unless True.

    Raises:
        ConfigError: `batch_size` does not divide the rows or the devices, an objective makes prefixes that the model
            does not honour, or a row has more documents: names the row.
        DistributedError: The loader's place is not that of this process in the mesh.
    """
    begin, end = loader.data_parallel.rows(loader.settings.rows_per_step)
    size = end - begin if batch_size is None else batch_size
    if size < 1 or (end - begin) % size:
        raise ConfigError(f"batch_size must divide the {end - begin} rows that this process has of a step, got {size}")
    slots = loader.settings.sequence_length
    most = slots if max_documents is None else max_documents
    if most < 1:
        raise ConfigError(f"max_documents must be at least 1, got {max_documents}")
    _check_prefixes(loader, prefix)
    check_place(loader.data_parallel, size, mesh, axis)
    return _batches(loader, size, end - begin, most, mesh, axis)


def _check_prefixes(loader: Loader, prefix: bool | None) -> None:
    """Refuse an objective with prefixes where nobody says that the model honours them."""
    source = loader.bidirectional_source
    if source is None or prefix is True:
        return
    cannot = "the model cannot honour them (prefix=False)" if prefix is False else "nobody says that the model does"
    raise ConfigError(
        f"source {source!r}: its objective has prefixes whose tokens see each other, and {cannot}; give the attention "
        "attention_mask(batch.segment_ids, batch.prefix) and call batches(…, prefix=True), or give the objective "
        "bidirectional=False"
    )


def _batches(
    loader: Loader, size: int, rows_per_step: int, max_documents: int, mesh: Mesh | None, axis: Axis
) -> Iterator[tuple[Batch, Step]]:
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
