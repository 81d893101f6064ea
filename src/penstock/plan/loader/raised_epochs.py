"""A state under other `max_epochs`: where no row before it changes, the plan goes on under the new
ones.

An epoch more adds rows at the end, as long as no source was finished before. At the end of all
sources, the last window was closed early: with more to come, its rows would have been filled up.
They were trained as they were, so the plan goes on in a new window, at the next step; what was
planned before that is then no longer what this plan says.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from penstock.core.errors import StateError
from penstock.plan.loader.mixture import Source
from penstock.plan.loader.plan import Plan, PlanState, Window
from penstock.plan.loader.step_planner import StepState

_CURE = "a new run takes its sources from where they stand: continue_from=RUN (--continue-from)"


def moved(old: Plan, plan: Plan, state: StepState, say: Callable[[str], None]) -> StepState:
    """A state of one plan as a state of another that differs from it in `max_epochs` alone.

    Args:
        old: The plan of the state; its place changes.
        plan: The other plan.
        state: The state.
        say: Called with a sentence for each source with another limit.

    Raises:
        StateError: The rows before the state would be others.
    """
    start = state.window_start
    pairs = list(zip(old.mixture.sources, plan.mixture.sources, strict=True))
    positions = start.cursors["position"].tolist()
    limits = list(zip(positions, old.ends, plan.ends, strict=True))
    finished = [
        pair[1].name
        for pair, (at, then, now) in zip(pairs, limits, strict=True)
        if then <= at and then != now
    ]
    old.restore(start)
    window = old.next_window()
    at_end = window is None or (state.rows_used == window.num_rows and old.next_window() is None)
    _refuse_lower(plan, pairs, old.state().cursors["position"].tolist() if at_end else positions)
    # One of its own, as the other may be at work.
    plan = plan.with_max_epochs([source.max_epochs for source in plan.mixture.sources])
    plan.restore(start)
    aligned = start.row + state.rows_used == _row_of(plan, state.step)
    same = not finished and aligned and _same_rows(window, plan.next_window(), state.rows_used)
    if not same and not at_end:
        why = (
            f"source {finished[0]!r} had ended before"
            if finished
            else "a source ends in the rows before the state"
        )
        raise StateError(
            f"max_epochs changed, and {why}: rows that were trained would be others; {_CURE}"
        )
    for before_source, now_source in pairs:
        if before_source.max_epochs != now_source.max_epochs:
            say(
                f"max_epochs of source {now_source.name!r} was "
                f"{_text(before_source.max_epochs)}, is "
                f"{_text(now_source.max_epochs)}{'' if same else ': goes on after the end, in new rows'}"  # noqa: E501
            )
    if same:
        return state
    end: PlanState = replace(old.state(), row=_row_of(plan, state.step))
    return replace(state, window_start=end, rows_used=0, known_from=state.step)


def _refuse_lower(plan: Plan, pairs: list[tuple[Source, Source]], positions: list[int]) -> None:
    """Refuse limits that are lower than where the sources stand."""
    found = zip(positions, pairs, plan.ends, plan.sizes.tolist(), strict=True)
    for position, (then, now), end, size in found:
        if position > end:
            epoch = (position - 1) // size
            raise StateError(
                f"source {now.name!r}: max_epochs was {_text(then.max_epochs)}, is "
                f"{_text(now.max_epochs)}, and the state stands in epoch {epoch} (the first "
                "one is 0): it cannot be lower than that"
            )


def _row_of(plan: Plan, step: int) -> int:
    ramp = plan.settings.ramp
    return ramp.before(step) - ramp.before(plan.first_step)


def _same_rows(old: Window | None, new: Window | None, rows: int) -> bool:
    """Whether the first rows of two windows hold the same."""
    if not rows:
        return True
    if old is None or new is None or min(old.num_rows, new.num_rows) < rows:
        return False
    end = old.row_starts[rows]
    return bool(
        np.array_equal(old.row_starts[: rows + 1], new.row_starts[: rows + 1])
        and np.array_equal(old.pieces[:end], new.pieces[:end])
    )


def _text(limit: float | None) -> str:
    return "no limit" if limit is None else f"{limit:g}"
