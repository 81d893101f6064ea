"""From windows to steps: the rows of each optimiser step, for all ranks, from any place on."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from penstock.errors import ConfigError, StateError
from penstock.loader.plan import Place, Plan, Window
from penstock.loader.replay import Watch

ANCHORS = 256
"""Places that are remembered at most, evenly spread over what was planned, so that `seek` replays little."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlace:
    """A place between two steps."""

    step: int
    """Steps before it."""
    place: Place
    """Beginning of the window that the last of them took its last row from."""
    rows: int
    """Rows of that window that are used up."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """What one step holds, for all ranks."""

    pieces: np.ndarray[Any, np.dtype[np.int64]]
    """[pieces, PIECE_COLUMNS], row after row."""
    row_starts: np.ndarray[Any, np.dtype[np.int64]]
    """[rows + 1]: the pieces of row i are row_starts[i] … row_starts[i + 1] − 1."""
    after: StepPlace
    """The place after this step."""

    @property
    def index(self) -> int:
        """Number of the step, from 0."""
        return self.after.step - 1


@final
class StepPlanner:
    """Step plans one after another.

    Args:
        plan: Where windows come from; nobody else may use it.
        row_multiple: A last, short step gets empty rows up to a multiple of this, so that all ranks have as many.
        anchors: Places of the same plan that are known already.
    """

    def __init__(self, plan: Plan, row_multiple: int, anchors: dict[int, Place] | None = None) -> None:
        self._plan, self._rows_per_step, self._row_multiple = plan, plan.settings.rows_per_step, row_multiple
        self.first = StepPlace(step=0, place=plan.place(), rows=0)
        self.anchors = {0: plan.place(), **(anchors or {})}
        """Places between windows, by the rows before them."""
        self._anchor_every = 1
        self.start(self.first)

    def start(self, place: StepPlace) -> None:
        """Go on from `place`."""
        self._plan.restore(place.place)
        self._after = place
        self._window: Window | None = None
        self._used = place.rows

    def next(self) -> StepPlan | None:
        """Gather the rows of the next step from windows; None when every source is finished."""
        parts: list[np.ndarray[Any, Any]] = []
        starts = [np.zeros(1, np.int64)]
        rows = pieces = 0
        while rows < self._rows_per_step and (window := self._open_window()) is not None:
            last = min(window.num_rows, self._used + self._rows_per_step - rows)
            begin, end = window.row_starts[self._used], window.row_starts[last]
            parts.append(window.pieces[begin:end])
            starts.append(window.row_starts[self._used + 1 : last + 1] - begin + pieces)
            rows, pieces, self._used = rows + last - self._used, pieces + int(end - begin), last
        if self._window is None or rows == 0:
            return None
        starts.append(np.full(-rows % self._row_multiple, pieces, np.int64))
        self._after = StepPlace(step=self._after.step + 1, place=self._window.place, rows=self._used)
        return StepPlan(pieces=np.concatenate(parts), row_starts=np.concatenate(starts), after=self._after)

    def find(self, step: int, near: StepPlace | None = None, watch: Watch | None = None) -> StepPlace:
        """The place before step number `step`, replaying the plan from the nearest place that is known.

        `watch` is told after each window how far the replay is.

        Raises:
            ConfigError: The sources end before it.
        """
        row = step * self._rows_per_step
        known = [place for first, place in self.anchors.items() if first <= row]
        if near is not None and near.place.row <= row:
            known.append(near.place)
        start = max(known, key=lambda place: place.row)
        self._plan.restore(start)
        while (window := self._next_window()) is not None:
            if watch is not None:
                watch(min(window.place.row + window.num_rows, row) - start.row, row - start.row)
            if window.place.row + window.num_rows > row:
                return StepPlace(step=step, place=window.place, rows=row - window.place.row)
        end = self._plan.place()
        if step == -(-end.row // self._rows_per_step):
            # Right after the last step, which may be short.
            return StepPlace(step=step, place=end, rows=0)
        raise ConfigError(
            f"cannot seek to step {step}: the sources end before it, after {self._plan.place().row} rows "
            f"({self._plan.place().row / self._rows_per_step:.1f} steps)"
        )

    def _open_window(self) -> Window | None:
        """A window with rows left."""
        if self._window is None:
            # Just started: the first rows of the window may be used up already.
            self._window = self._next_window()
            if self._window is not None and self._used > self._window.num_rows:
                raise StateError(f"the state says {self._used} rows of a window that has {self._window.num_rows}")
        while self._window is not None and self._used == self._window.num_rows:
            following = self._next_window()
            if following is None:
                return None
            self._window, self._used = following, 0
        return self._window

    def _next_window(self) -> Window | None:
        place = self._plan.place()
        if place.window % self._anchor_every == 0:
            self.anchors[place.row] = place
        if len(self.anchors) > ANCHORS:
            self._anchor_every *= 2
            self.anchors = {row: kept for row, kept in self.anchors.items() if kept.window % self._anchor_every == 0}
        return self._plan.next_window()
