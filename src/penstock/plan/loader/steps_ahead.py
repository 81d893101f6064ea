"""Plans steps in a thread of its own, and asks for their units: of several steps at once, which
share most of them.
"""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Int64
from penstock.data.shards.tables.holder import Holder
from penstock.data.stores import daemons
from penstock.plan.loader.step_planner import StepPlan

AHEAD_STEPS = 256
"""Steps that are planned ahead, at most."""
GROUP_STEPS, GROUP_SHARE = 32, 16
"""Steps whose units are asked for, and let go, together: at most so many, and at most this part of
the bytes that are planned ahead, a sixteenth. The first is alone, the next are two, four, …: the
first step must not wait for others.
"""
_LOOK_SECONDS = 0.1
_ALL_SECONDS = 0.5
"""How often it is looked whether all units are here, at most."""
_ALL_SHARE = 100
"""Looking takes at most this part of the time: a hundredth."""

Wanted = list[tuple[Holder, Annotated[Int64, "units"]]]

_running: "weakref.WeakSet[StepsAhead]" = weakref.WeakSet()


@final
@dataclass(slots=True)
class _Group:
    """Steps whose units are held together."""

    wanted: Wanted
    steps: int
    """How many of them are not filled."""


class _AllHere:
    """Stands in the queue of plans where the thread that plans ahead ended."""


@final
class StepsAhead:
    """Plans steps in a thread of its own, and asks for their units; `next` gives the plans, in
    order.

    As soon as all is here, the thread ends, and `next` plans itself: there is nothing to ask for
    any more.

    Args:
        plan: Gives the next plan; None at the end. From now on called by this thread only.
        wanted: The units of a step.
        size: Bytes of a step.
        most: Maximum bytes of the steps that are planned and not filled; one is always planned.
        hold_all: Holds all units, if all are here; whether they are.
    """

    def __init__(
        self,
        plan: Callable[[], StepPlan | None],
        wanted: Callable[[StepPlan], Wanted],
        size: Callable[[StepPlan], int],
        most: int,
        hold_all: Callable[[], bool],
    ) -> None:
        self._plan, self._wanted, self._size, self._most = plan, wanted, size, most
        self._hold_all, self._look = hold_all, 0.0
        self._plans: queue.SimpleQueue[StepPlan | BaseException | _AllHere | None] = (
            queue.SimpleQueue()
        )
        self._units: dict[int, tuple[Wanted, _Group]] = {}
        self._taken: dict[int, _Group] = {}
        self._sizes: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._stopped, self._waiting, self._bytes, self._few = False, 0, 0, 0
        self._thread = threading.Thread(target=self._work, name="penstock-ahead", daemon=True)
        _running.add(self)
        self._thread.start()

    def next(self) -> StepPlan | None:
        """The next plan; None at the end, or after `stop`. Never called by two threads at once."""
        item = self._plans.get()
        if item is None or isinstance(item, _AllHere):
            self._plans.put(item)
            return None if item is None or self._stopped else self._plan()
        if isinstance(item, BaseException):
            raise item
        return item

    def take(self, step: StepPlan) -> Wanted | None:
        """The units of a step, which are held until it is `done`; None: they were not asked for."""
        with self._changed:
            wanted, group = self._units.pop(step.index, (None, None))
            if group is not None:
                self._taken[step.index] = group
            return wanted

    def done(self, step: StepPlan) -> None:
        """A step was filled, or cannot be."""
        with self._changed:
            group = self._taken.pop(step.index, None)
        if group is not None:
            self._leave(group)
        with self._changed:
            if self._waiting:
                self._waiting -= 1
                self._bytes -= self._sizes.get()
            # The thread that plans would take turns with the filling ones for each step; it plans
            # some in a row.
            if self._waiting <= self._few:
                self._changed.notify_all()

    def stop(self) -> None:
        """End soon; never waits, because the garbage collector may call it."""
        self._stopped = True
        self._plans.put(None)

    def join(self) -> None:
        """Wait until nothing is planned or asked for any more."""
        self._thread.join()

    def _let_go(self) -> None:
        """Release what was asked for and will not be filled; a fill under way that finds nothing
        asks itself.
        """
        with self._changed:
            left, self._units = list(self._units.values()), {}
        for _, group in left:
            self._leave(group)

    def _leave(self, group: _Group) -> None:
        """One step of a group does not need its units any more."""
        with self._changed:
            group.steps -= 1
            is_last = not group.steps
        if is_last:
            release(group.wanted)

    def _has_room(self, size: int) -> bool:
        return not self._waiting or (
            self._bytes + size <= self._most and self._waiting < AHEAD_STEPS
        )

    def _plan_some(self, most: int, steps: list[StepPlan]) -> bool:
        """Plan up to `most` steps, as far as there is room, and append them to `steps`: at least
        one, for which this waits. False: there are no more.
        """
        size = total = 0
        while len(steps) < most and (
            not steps or (self._has_room(size) and total + size <= self._most // GROUP_SHARE)
        ):
            if (step := self._plan()) is None:
                return False
            size = self._size(step)
            with self._changed:
                while not steps and not self._has_room(size):
                    if self._stopped:
                        return False
                    self._few = self._waiting * 3 // 4
                    self._changed.wait(_LOOK_SECONDS)
                self._waiting, self._bytes = self._waiting + 1, self._bytes + size
                self._sizes.put(size)
            steps.append(step)
            total += size
        return True

    def _ask(self, steps: list[StepPlan]) -> None:
        """Ask for the units of some steps, and give their plans."""
        wanted = [self._wanted(step) for step in steps]
        group = _Group(_joined(wanted), len(steps))
        for holder, units in group.wanted:
            # The next step to be filled must not wait for room, which only its filling would make.
            holder.want(units, lambda: not self._stopped and self._waiting > len(steps))
        with self._changed:
            for step, mine in zip(steps, wanted, strict=True):
                self._units[step.index] = mine, group
        for step in steps:
            self._plans.put(step)

    def _work(self) -> None:
        try:
            most, has_more = 1, True
            while has_more and not self._stopped:
                if self._is_all_here():
                    self._plans.put(_AllHere())
                    break
                steps: list[StepPlan] = []
                try:
                    has_more = self._plan_some(most, steps)
                finally:  # steps before an error come before it
                    if steps and not self._stopped:
                        self._ask(steps)
                most = min(2 * most, GROUP_STEPS)
            else:
                self._plans.put(None)
        except BaseException as error:
            self._plans.put(error)
            self._plans.put(None)
        self._wait_for_the_last()
        self._let_go()

    def _is_all_here(self) -> bool:
        """Whether all units are here, asked now and then; if so, they are held."""
        now = time.monotonic()
        if now < self._look:
            return False
        found = self._hold_all()
        self._look = now + max(_ALL_SECONDS, _ALL_SHARE * (time.monotonic() - now))
        return found

    def _wait_for_the_last(self) -> None:
        """At the end of the sources, some steps are still to be filled."""
        with self._changed:
            self._few = self._waiting
            while self._units and not self._stopped:
                self._changed.wait(_LOOK_SECONDS)


@atexit.register
def _end_all() -> None:
    """Threads read mapped files; they must be done before the interpreter takes those apart. None
    waits for a store.
    """
    daemons.end()
    for ahead in list(_running):
        ahead.stop()
        ahead.join()


def _joined(wanted: Sequence[Wanted]) -> Wanted:
    """The units of several steps, in the order in which they are needed first."""
    if len(wanted) == 1:
        return wanted[0]
    # A step names the holders of the sources that it draws from.
    of_holder: dict[int, Wanted] = {}
    for step in wanted:
        for holder, units in step:
            of_holder.setdefault(id(holder), []).append((holder, units))
    found: Wanted = []
    for parts in of_holder.values():
        units, firsts = np.unique(np.concatenate([mine for _, mine in parts]), return_index=True)
        found.append((parts[0][0], units[np.argsort(firsts)]))
    return found


def release(wanted: Wanted) -> None:
    """Let units go."""
    for holder, units in wanted:
        holder.release(units)
