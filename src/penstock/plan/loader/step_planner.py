"""Plans steps: the rows of each optimiser step, cut from the plan's windows for all ranks."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Int64, Records
from penstock.core.errors import ConfigError, StateError
from penstock.core.terminal import PLAIN_SECONDS, Progress
from penstock.plan.loader._plan_kernels import PIECE
from penstock.plan.loader._target_kernels import UNTRAINED
from penstock.plan.loader.plan import Plan, PlanState, Window
from penstock.plan.sampling._kernels import SKIPPED

SHOW_AFTER = 1.0
"""Seconds until the bar appears in a terminal; elsewhere plain lines begin after
`PLAIN_SECONDS`.
"""

Watch = Callable[[int, int | None], None]
"""(rows planned so far, rows to plan or None when that is not known)."""

ANCHORS = 256
"""Plan states that are kept at most, evenly spread over what was planned, so that `seek` replays
little.
"""


@contextmanager
def replay_progress(title: str, *, enabled: bool = True) -> Iterator[Watch]:
    """Gives a function that takes the progress; each call costs a look at the clock.

    Args:
        title: What is being done, a few words.
        enabled: False shows nothing; let one rank show it.
    """
    began, wait = time.monotonic(), SHOW_AFTER if sys.stderr.isatty() else PLAIN_SECONDS
    bar: Progress | None = None
    before = 0
    with ExitStack() as stack:

        def watch(done: int, total: int | None) -> None:
            nonlocal bar, before
            if bar is None:
                if not enabled or time.monotonic() - began < wait:
                    return
                bar = stack.enter_context(
                    Progress(title, total=None if total is None else total - done, unit=" rows")
                )
                before = done
            bar.advance(done - before - bar.done)

        yield watch


def balanced_order(loads: Annotated[Int64, "rows"]) -> Annotated[Int64, "rows"]:
    """An order of rows in which equal runs of them have about equal loads, however many runs.

    Rows are divided into two halves of equal size, and each half again, while their number is even;
    then by 3, 5, … Each division takes rows from the largest load on, and gives each group one of
    every few, the larger to the group that has less. So runs of 1/2, 1/4, 1/8, … of the rows are
    balanced, and the order depends on nothing but the loads.
    """
    order: Annotated[Int64, "rows"] = np.array(
        _divided(np.argsort(-loads, kind="stable").tolist(), loads.tolist())
    )
    return order


def _divided(rows: list[int], loads: list[int]) -> list[int]:
    """Rows in descending order of their loads → balanced."""
    count = len(rows)
    parts = next((prime for prime in range(2, count) if count % prime == 0), count)
    if parts == count:
        return rows
    groups: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for begin in range(0, count, parts):
        least_first = sorted(range(parts), key=sums.__getitem__)
        for row, group in zip(rows[begin : begin + parts], least_first, strict=True):
            groups[group].append(row)
            sums[group] += loads[row]
    return [row for group in groups for row in _divided(group, loads)]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepState:
    """State of the planner between two steps, which may be inside a window."""

    step: int
    """Steps before it."""
    window_start: PlanState
    """State of the plan before the window that the last of these steps took its last row from."""
    rows_used: int
    """Rows of that window that are in these steps."""
    known_from: int = 0
    """Steps before this one are not those of the plan: it went on after an end that it does not
    have any more.
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """What one step holds, for all ranks."""

    pieces: Annotated[Records, PIECE, "pieces"]
    """Row after row."""
    row_starts: Annotated[Int64, "rows+1"]
    """The pieces of row i are row_starts[i] … row_starts[i + 1] − 1."""
    after: StepState
    """State after this step."""
    skipped: Annotated[Records, SKIPPED, "sources"]
    """What was left out up to the end of its last window."""
    untrained: Annotated[Records, UNTRAINED, "sources"] | None = None
    """As in `PlanState`, up to the end of its last window."""
    window: Window
    """The window of its last row."""

    @property
    def index(self) -> int:
        """Number of the step, from 0."""
        return self.after.step - 1


@final
class StepPlanner:
    """Step plans one after another.

    Args:
        plan: Where windows come from; it must have no other user.
        row_multiple: A last, short step gets empty rows up to a multiple of this, so that all ranks
            have as many.
        known: States of the same plan that another planner knows already.
    """

    def __init__(self, plan: Plan, row_multiple: int, known: "StepPlanner | None" = None) -> None:
        self._plan, self._ramp, self._row_multiple = plan, plan.settings.ramp, row_multiple
        self.first = StepState(step=plan.first_step, window_start=plan.state(), rows_used=0)
        self.anchors: dict[int, PlanState] = (
            {0: plan.state()} if known is None else dict(known.anchors)
        )
        """States between windows, by the rows before them."""
        self._known_from: int = 0 if known is None else known._known_from
        self._anchor_every = 1
        self.start(replace(self.first, known_from=self._known_from))

    def start(self, state: StepState) -> None:
        """Go on from `state`."""
        self._plan.restore(state.window_start)
        self._after = state
        if state.known_from != self._known_from:
            self._known_from, self.anchors = state.known_from, {}
            if not state.known_from:
                self.anchors[0] = self.first.window_start
        self._window: Window | None = None
        self._used = state.rows_used

    def next(self) -> StepPlan | None:
        """Gather the rows of the next step from windows; None when every source is finished."""
        window, size = self._open_window(), self._ramp.rows(self._after.step)
        if (
            window is not None
            and self._used + size <= window.num_rows
            and size % self._row_multiple == 0
        ):
            # Nearly always: all rows from one window, and nothing to put together.
            row_starts = window.row_starts[self._used : self._used + size + 1]
            begin, end = row_starts.item(0), row_starts.item(-1)
            self._used += size
            return self._step_plan(
                window, *self._balanced(window.pieces[begin:end], row_starts - begin)
            )
        parts: list[Records] = []
        starts = [np.zeros(1, np.int64)]
        rows = pieces = 0
        while rows < size and (window := self._open_window()) is not None:
            last = min(window.num_rows, self._used + size - rows)
            begin, end = window.row_starts[self._used], window.row_starts[last]
            parts.append(window.pieces[begin:end])
            starts.append(window.row_starts[self._used + 1 : last + 1] - begin + pieces)
            rows, pieces, self._used = rows + last - self._used, pieces + int(end - begin), last
        if self._window is None or rows == 0:
            return None
        # Not the dtype that concatenate makes, which is equal: Numba knows a record's dtype by its
        # object.
        joined = np.concatenate(parts, out=np.empty(pieces, PIECE))
        joined, row_starts = self._balanced(joined, np.concatenate(starts))
        empty = np.full(-rows % self._row_multiple, pieces, np.int64)
        return self._step_plan(self._window, joined, np.concatenate([row_starts, empty]))

    def _balanced(
        self, pieces: Annotated[Records, PIECE, "pieces"], row_starts: Annotated[Int64, "rows+1"]
    ) -> tuple[Annotated[Records, PIECE, "pieces"], Annotated[Int64, "rows+1"]]:
        """Rows with images in an order that gives each rank about as many patches, however many
        ranks there are.
        """
        patches = self._plan.row_patches(pieces, row_starts)
        if patches is None or patches.min() == patches.max():
            return pieces, row_starts
        order = balanced_order(patches)
        sizes = np.diff(row_starts)[order]
        moved = np.concatenate(
            [pieces[row_starts[row] : row_starts[row + 1]] for row in order.tolist()]
        )
        out = np.empty(len(pieces), PIECE)
        out[:] = moved
        return out, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])

    def _step_plan(
        self,
        window: Window,
        pieces: Annotated[Records, PIECE, "pieces"],
        row_starts: Annotated[Int64, "rows+1"],
    ) -> StepPlan:
        """The step that ends in `window`, and the state after it."""
        after = self._after
        # Not `replace`, which takes 2 µs.
        self._after = StepState(
            step=after.step + 1,
            window_start=window.start,
            rows_used=self._used,
            known_from=after.known_from,
        )
        return StepPlan(
            pieces=pieces, row_starts=row_starts, after=self._after, skipped=window.skipped,
            untrained=window.untrained, window=window,
        )  # fmt: skip

    def row_of(self, step: int) -> int:
        """Rows of the plan before step number `step`."""
        return self._ramp.before(step) - self._ramp.before(self.first.step)

    def steps_of(self, rows: int) -> int:
        """Number of the step after those that the first rows of the plan fill; the last one may be
        short.
        """
        return self._ramp.steps(rows + self._ramp.before(self.first.step))

    def find(
        self, step: int, near: StepState | None = None, watch: Watch | None = None
    ) -> StepState:
        """The state before step number `step`, replaying the plan from the nearest known state.

        `watch` is called after each window with the progress of the replay.

        Raises:
            ConfigError: The sources end before it.
        """
        row, end_of = self.row_of(step), max(self._known_from, self.first.step)
        known = [state for first, state in self.anchors.items() if first <= row]
        if (
            near is not None
            and near.window_start.row <= row
            and near.known_from == self._known_from
        ):
            known.append(near.window_start)
        if step < end_of or not known:
            why = (
                "its sources had ended there"
                if self._known_from
                else "the loader was made to begin there"
            )
            first = end_of if step < end_of else self.steps_of(min(self.anchors, default=row + 1))
            raise ConfigError(
                f"cannot seek to step {step}: the plan is known from step {first} on, as {why}"
            )
        start = max(known, key=lambda state: state.row)
        self._plan.restore(start)
        found = replace(self.first, step=step, known_from=self._known_from)
        while (window := self._next_window()) is not None:
            if watch is not None:
                watch(min(window.start.row + window.num_rows, row) - start.row, row - start.row)
            if window.start.row + window.num_rows > row:
                return replace(found, window_start=window.start, rows_used=row - window.start.row)
        end = self._plan.state()
        if step == self.steps_of(end.row):
            # Right after the last step, which may be short.
            return replace(found, window_start=end, rows_used=0)
        raise ConfigError(
            f"cannot seek to step {step}: the sources end before it, after {end.row} rows "
            f"(step {self.steps_of(end.row)})"
        )

    def _open_window(self) -> Window | None:
        """A window with rows left."""
        if self._window is None:
            # Just started: the first rows of the window may be used up already.
            self._window = self._next_window()
            if self._window is not None and self._used > self._window.num_rows:
                raise StateError(
                    f"the state says {self._used} rows of a window that has {self._window.num_rows}"
                )
        while self._window is not None and self._used == self._window.num_rows:
            following = self._next_window()
            if following is None:
                return None
            self._window, self._used = following, 0
        return self._window

    def _next_window(self) -> Window | None:
        state = self._plan.state()
        if state.window % self._anchor_every == 0:
            self.anchors[state.row] = state
        if len(self.anchors) > ANCHORS:
            self._anchor_every *= 2
            self.anchors = {
                row: kept
                for row, kept in self.anchors.items()
                if kept.window % self._anchor_every == 0
            }
        return self._plan.next_window()
