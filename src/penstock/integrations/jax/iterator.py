"""Batches with a state: an iterator that can be saved after any batch, also as one of Grain's, for
Orbax.

The state is a small dict that JSON can hold. It is the same in every process, so one copy in a
checkpoint is enough: Orbax's JSON item restores it on another number of processes. Grain's own
handler writes a file for each process and restores on the same number only.
"""

from collections.abc import Generator
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self, final

from jax.sharding import Mesh

from penstock.core.errors import MissingExtraError, StateError
from penstock.core.json_values import JsonObject
from penstock.integrations.jax.batch import Batch
from penstock.integrations.jax.batches import Axis, batches, open_batches
from penstock.plan.loader import Step
from penstock.plan.loader.loader import Loader

if TYPE_CHECKING:
    from typing import Protocol

    class GrainIterator(Protocol):
        """A `grain.DatasetIterator` of batches."""

        batches: "BatchIterator"

        def __iter__(self) -> Self: ...
        def __next__(self) -> Batch: ...
        def get_state(self) -> JsonObject: ...  # noqa: D102
        def set_state(self, state: JsonObject) -> None: ...  # noqa: D102
        def close(self) -> None: ...  # noqa: D102


@final
class BatchIterator:
    """The batches of `batches`, and the place after each.

    ```python
    iterator = psj.BatchIterator(loader, mesh=mesh, prefix=True)
    for batch in iterator:
        parameters = train(parameters, batch)
        manager.save(step, args=ocp.args.Composite(
            parameters=ocp.args.StandardSave(parameters), data=ocp.args.JsonSave(iterator.get_state())))
    ...
    iterator.set_state(manager.restore(step, args=ocp.args.Composite(data=ocp.args.JsonRestore()))["data"])
    ```

    Args:
        loader: As in `batches`; nothing else may iterate it.
        batch_size: As in `batches`.
        max_documents: As in `batches`.
        mesh: As in `batches`.
        axis: As in `batches`.
        prefix: As in `batches`.

    Raises:
        ConfigError, DistributedError: As `batches`.
    """  # noqa: E501

    def __init__(
        self,
        loader: Loader,
        *,
        batch_size: int | None = None,
        max_documents: int | None = None,
        mesh: Mesh | None = None,
        axis: Axis = "data",
        prefix: bool | None = None,
    ) -> None:
        self._loader = loader
        self._options: dict[str, Any] = {
            "batch_size": batch_size,
            "max_documents": max_documents,
            "mesh": mesh,
            "axis": axis,
            "prefix": prefix,
        }
        self._pairs: Generator[tuple[Batch, Step]] = batches(loader, **self._options)
        begin, end = loader.data_parallel.rows(loader.settings.constant_rows("JAX"))
        self._batches_per_step = 1 if batch_size is None else (end - begin) // batch_size
        self._before, self._taken, self._skip = loader.state_dict(), 0, 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        while self._skip:
            next(self._pairs)
            self._skip -= 1
        batch, step = next(self._pairs)
        self._taken += 1
        if self._taken == self._batches_per_step:
            self._before, self._taken = step.resume_state, 0
        return batch

    @property
    def step(self) -> int:
        """Number of the step that the next batch belongs to."""
        return int(self._before["step"])

    def get_state(self) -> JsonObject:
        """The place after the last batch: the loader's state before the current step, and the
        batches taken of it.
        """
        return {"loader": self._before, "batches_taken": self._taken, "batches_of": self._shape()}

    def set_state(self, state: JsonObject) -> None:
        """Go on after the batch that `state` was saved after.

        A state between two steps fits any number of processes and any batch size; one within a
        step, those it was saved with, because other processes would have taken other rows of that
        step.

        Raises:
            StateError: It is no such state, or was saved within a step with others; or the loader
                refuses it.
        """
        try:
            before, taken, shape = (
                state["loader"],
                int(state["batches_taken"]),
                [int(n) for n in state["batches_of"]],
            )
        except (TypeError, KeyError, ValueError):
            raise StateError(
                "not a state of a BatchIterator: expected loader, batches_taken and "
                f"batches_of, found {state!r:.200}"
            ) from None
        if taken and shape != self._shape():
            raise StateError(
                f"the state was saved after {taken} of {shape[0]} batches of a step, with "
                f"{shape[1]} processes; now it is {self._batches_per_step} batches a step "
                f"with {self._loader.data_parallel.size}: take those, or a state that was "
                "saved at the end of a step"
            )
        self._loader.load_state_dict(before)
        # The processes compared their data and settings when it was made.
        self._pairs = open_batches(self._loader, **self._options)
        self._before, self._taken, self._skip = before, taken, taken

    def close(self) -> None:
        """End; the loader stops working ahead."""
        self._pairs.close()

    def _shape(self) -> list[int]:
        return [self._batches_per_step, self._loader.data_parallel.size]


def grain_iterator(
    loader: Loader,
    *,
    batch_size: int | None = None,
    max_documents: int | None = None,
    mesh: Mesh | None = None,
    axis: Axis = "data",
    prefix: bool | None = None,
) -> "GrainIterator":
    """A `BatchIterator` as a `grain.DatasetIterator`, for code that takes those; its own is its
    attribute `batches`.

    ```python
    iterator = psj.grain_iterator(loader, mesh=mesh)
    manager.save(step, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator)))
    manager.restore(step, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(iterator)))
    ```

    Args: As `BatchIterator`.

    Raises:
        MissingExtraError: Grain is not installed.
        ConfigError, DistributedError: As `batches`.
    """  # noqa: E501
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "max_documents": max_documents,
        "mesh": mesh,
        "axis": axis,
        "prefix": prefix,
    }
    made: GrainIterator = _grain_class()(BatchIterator(loader, **options))
    return made


@cache
def _grain_class() -> Any:
    """The subclass; made on first use, because Grain takes seconds to import and few have it."""
    try:
        grain: Any = import_module("grain")
    except ImportError:
        raise MissingExtraError("grain") from None

    class LoaderIterator(grain.DatasetIterator):  # type: ignore[misc]
        """Batches of a loader."""

        def __init__(self, inner: BatchIterator) -> None:
            super().__init__()
            self.batches = inner

        def __next__(self) -> Batch:
            self._assert_not_closed()
            return next(self.batches)

        def get_state(self) -> JsonObject:
            return self.batches.get_state()

        def set_state(self, state: dict[str, object]) -> None:
            self.batches.set_state(state)

        def close(self) -> None:
            super().close()
            self.batches.close()

    return LoaderIterator
