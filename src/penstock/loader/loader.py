"""The loader: steps of model inputs, blended, shuffled, packed, resumable at every step.

Every rank runs the same plan and fills only its own rows. With `threads` a planning thread works ahead and a pool
fills steps; without, all happens in the caller's thread: the steps are the same bit for bit. Working ahead never
shows in a state: `step.resume_state` is the place after that step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import numpy as np

from penstock.errors import ConfigError
from penstock.inputs import EVERYTHING, InputRequirements
from penstock.loader import explain as explaining
from penstock.loader import state as states
from penstock.loader._kernels import PIECE_COLUMNS
from penstock.loader.data_parallel import DataParallel
from penstock.loader.fill import Fill
from penstock.loader.mixture import Mixture, Source
from penstock.loader.plan import Place, Plan, PlanSettings, Window
from penstock.loader.prefetch import Prefetch
from penstock.loader.recycling import BufferPool, pinned
from penstock.loader.step import Step
from penstock.packing import Packing
from penstock.sampling import LENGTH
from penstock.shards import open_dataset

ANCHORS = 256
"""Places that a loader remembers at most, evenly spread over what it has planned, so that `seek` replays little."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """What one step holds, for all ranks."""

    index: int
    pieces: np.ndarray[Any, np.dtype[np.int64]]
    row_starts: np.ndarray[Any, np.dtype[np.int64]]
    place: Place
    """Beginning of the last window that the step takes rows from."""
    rows: int
    """Rows of that window that are used up after the step."""


@final
class Loader:
    """Model inputs from a mixture, one optimiser step after another.

    ```python
    loader = ps.Loader(ps.Mixture([ps.Source("data/web")]), sequence_length=4096, rows_per_step=64, seed=7)
    for step in loader:
        for row in step: ...
        save(step.resume_state)
    ```

    Iterating goes on where the last iteration stopped being consumed; it ends when every source has had its
    `max_epochs`. A last, short step is filled up with empty rows, so that all ranks have as many.

    Args:
        mixture: The sources; a single `Source`, a path or an opened dataset will do.
        sequence_length: Token slots of a row.
        rows_per_step: Rows of one optimiser step over all ranks.
        seed: Seed of orders and keys.
        data_parallel: This process's place: `DataParallel`, (rank, size), or a 1-D torch DeviceMesh. May be left out
            only when there is one process.
        packing: `best_fit` (default), `best_fit_decreasing`, `next_fit`, `concat` or `none`.
        window_rows: Rows that are open together when packing.
        requirements: What the model needs; everything in int32 when None.
        pad_id: Token id in padding; it is never a target.
        threads: Filling threads; 0 does all in the caller's thread.
        prefetch: Steps that are prepared ahead, at most.
        pin_memory: Write into page-locked memory; by default when CUDA is there and torch is already imported.

    Raises:
        ConfigError: A setting is out of range, or two disagree.
        DistributedError: Several processes, and `data_parallel` was left out.
    """

    def __init__(
        self,
        mixture: Mixture | Source | Any,
        *,
        sequence_length: int,
        rows_per_step: int,
        seed: int = 0,
        data_parallel: DataParallel | tuple[int, int] | Any | None = None,
        packing: Packing = "best_fit",
        window_rows: int = 1024,
        requirements: InputRequirements | None = None,
        pad_id: int = 0,
        threads: int = 1,
        prefetch: int = 2,
        pin_memory: bool | None = None,
    ) -> None:
        self.mixture = _as_mixture(mixture)
        self.settings = PlanSettings(
            sequence_length=sequence_length, rows_per_step=rows_per_step, seed=seed, packing=packing,
            window_rows=window_rows,
        )  # fmt: skip
        self.data_parallel = DataParallel.of(data_parallel)
        self.data_parallel.rows(rows_per_step)
        if threads < 0 or prefetch < 1:
            raise ConfigError(f"threads must be at least 0 and prefetch at least 1, got {threads} and {prefetch}")
        self.requirements = requirements or EVERYTHING
        self.datasets = [_as_dataset(source.path) for source in self.mixture.sources]
        self._threads, self._prefetch_steps = threads, prefetch
        pin = _cuda_in_use() if pin_memory is None else pin_memory
        pool = BufferPool(keep=2 * (prefetch + threads + 2), allocate=pinned if pin else np.empty)
        self._fill = Fill(self.datasets, sequence_length, self.requirements, pad_id, pool)
        self._plan = Plan(self.mixture, self.datasets, self.settings)
        self._description = states.describe(self._plan)
        self._anchors: dict[int, Place] = {0: self._plan.place()}
        self._anchor_every = 1
        self._ahead: Prefetch | None = None
        self._start(0, self._plan.place(), 0)

    # -- iterating ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        """Steps from the current place on."""
        if self._threads == 0:
            while (plan := self._next_step_plan()) is not None:
                step = self._make(plan)
                self._consumed(step.index + 1, plan)
                yield step
            return
        self._start(self._step, self._place, self._rows)
        ahead = self._ahead = Prefetch(self._next_step_plan, self._make, self._threads, self._prefetch_steps)
        try:
            for plan, step in ahead:
                self._consumed(step.index + 1, plan)
                yield step
        finally:
            if self._ahead is ahead:
                # What was planned ahead and not consumed is forgotten: the next iteration plans it again.
                self._start(self._step, self._place, self._rows)

    @property
    def step(self) -> int:
        """Number of the step that comes next."""
        return self._step

    def state_dict(self) -> dict[str, Any]:
        """State after the last step that was handed out; the same as that step's `resume_state`."""
        return states.save(self._description, self._step, self._place, self._rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the step that `state` was saved from, on any number of ranks that divides the step.

        Raises:
            StateError: The state was made from other data or settings; the message names them.
        """
        self._start(*states.load(self._plan, state))

    def seek(self, step: int) -> Self:
        """Go on at step number `step`, replaying the plan from the nearest place that is known."""
        if step < 0:
            raise ConfigError(f"cannot seek to step {step}")
        row = step * self.settings.rows_per_step
        anchor = max(place for place in self._anchors if place <= row)
        self._start(self._step, self._place, self._rows)
        current = self._place.row
        if anchor < current <= row:
            self._plan.restore(self._place)
        else:
            self._plan.restore(self._anchors[anchor])
        while (window := self._next_window()) is not None:
            if window.place.row + window.num_rows > row:
                self._start(step, window.place, row - window.place.row)
                return self
        raise ConfigError(f"cannot seek to step {step}: the sources end before it, with {self._plan.place().row} rows")

    def explain(self, step: int, row: int | None = None) -> Any:
        """Where the tokens of a step come from: source, file, line, epoch and text of every piece of its rows.

        Args:
            step: Number of the step.
            row: Number of a row in the whole step (over all ranks); all rows when None.
        """
        other = Loader(
            Mixture(
                [
                    Source(
                        dataset, s.share, s.name, s.objective, s.max_epochs, s.slice, s.shuffle, s.too_long
                    )
                    for s, dataset in zip(self.mixture.sources, self.datasets, strict=True)
                ],
                self.mixture.changes,
            ),
            sequence_length=self.settings.sequence_length, rows_per_step=self.settings.rows_per_step,
            seed=self.settings.seed, data_parallel=DataParallel(), packing=self.settings.packing,
            window_rows=self.settings.window_rows, threads=0,
        )  # fmt: skip
        other._anchors = dict(self._anchors)
        plan = other.seek(step)._next_step_plan()
        assert plan is not None
        return explaining.explain(self.mixture, self.datasets, plan, row)

    # -- planning ----------------------------------------------------------------------------------------------------

    def _start(self, step: int, place: Place, rows: int) -> None:
        """Make (step, place, rows after it) the current place; an iterator that is under way ends with an error."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        self._plan.restore(place)
        self._step, self._place, self._rows = step, place, rows
        self._planned_step, self._window, self._window_used = step, None, rows

    def _consumed(self, step: int, plan: StepPlan) -> None:
        self._step, self._place, self._rows = step, plan.place, plan.rows

    def _next_window(self) -> Window | None:
        place = self._plan.place()
        if place.window % self._anchor_every == 0 and place.row not in self._anchors:
            self._anchors[place.row] = place
            if len(self._anchors) > ANCHORS:
                self._anchor_every *= 2
                self._anchors = {
                    row: anchor for row, anchor in self._anchors.items() if anchor.window % self._anchor_every == 0
                }
        return self._plan.next_window()

    def _next_step_plan(self) -> StepPlan | None:
        """Gather the rows of the next step from windows; None at the end."""
        wanted = self.settings.rows_per_step
        parts: list[np.ndarray[Any, Any]] = []
        starts = [np.zeros(1, np.int64)]
        rows = pieces = 0
        while rows < wanted:
            if self._window is None or self._window_used == self._window.num_rows:
                skip = self._window_used if self._window is None else 0
                following = self._next_window()
                if following is None:
                    break
                self._window, self._window_used = following, skip
                continue
            window, first = self._window, self._window_used
            last = min(window.num_rows, first + wanted - rows)
            begin, end = window.row_starts[first], window.row_starts[last]
            parts.append(window.pieces[begin:end])
            starts.append(window.row_starts[first + 1 : last + 1] - begin + pieces)
            rows, pieces, self._window_used = rows + last - first, pieces + int(end - begin), last
        if rows == 0 or self._window is None:
            return None
        if rows % self.data_parallel.size:
            # A finite pass may end in the middle of a step: empty rows, so that all ranks have as many.
            missing = self.data_parallel.size - rows % self.data_parallel.size
            starts.append(np.full(missing, pieces, np.int64))
        index = self._planned_step
        self._planned_step += 1
        return StepPlan(
            index=index,
            pieces=np.concatenate(parts) if parts else np.empty((0, PIECE_COLUMNS), np.int64),
            row_starts=np.concatenate(starts),
            place=self._window.place,
            rows=self._window_used,
        )

    def _make(self, plan: StepPlan) -> Step:
        """Fill this rank's rows of a planned step."""
        begin, end = self.data_parallel.rows(len(plan.row_starts) - 1)
        rows = self._fill.rows(plan.pieces, plan.row_starts[begin : end + 1])
        description, index, place, used = self._description, plan.index, plan.place, plan.rows
        return Step(
            index,
            rows,
            self._fill.weigh(plan.pieces),
            int(plan.pieces[:, LENGTH].sum()),
            lambda: states.save(description, index + 1, place, used),
        )


def _as_mixture(value: Any) -> Mixture:
    if isinstance(value, Mixture):
        return value
    if isinstance(value, Source):
        return Mixture([value])
    if isinstance(value, (list, tuple)):
        return Mixture([part if isinstance(part, Source) else Source(part) for part in value])
    return Mixture([Source(value)])


def _as_dataset(value: Any) -> Any:
    return open_dataset(value) if isinstance(value, (str, Path)) else value


def _cuda_in_use() -> bool:
    import sys

    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda.is_available())
