"""Plans steps in a thread of its own, and asks for their units."""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Annotated, final

from penstock.core.arrays import Int64
from penstock.data.shards.tables.holder import Holder
from penstock.data.stores import daemons
from penstock.plan.loader.step_planner import StepPlan

AHEAD_STEPS = 256
"""Steps that are planned ahead, at most."""
_LOOK_SECONDS = 0.1
_ALL_SECONDS = 0.5
"""How often it is looked whether all units are here, at most."""
_ALL_SHARE = 100
"""Looking takes at most this part of the time: a hundredth."""

Wanted = list[tuple[Holder, Annotated[Int64, "units"]]]

_running: "weakref.WeakSet[StepsAhead]" = weakref.WeakSet()


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
        self._units: dict[int, Wanted] = {}
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
        """The units of a step, which the caller must release; None: they were not asked for."""
        with self._changed:
            return self._units.pop(step.index, None)

    def done(self) -> None:
        """A step was filled."""
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
        for wanted in left:
            release(wanted)

    def _wait_for_room(self, size: int) -> bool:
        """Wait until a step of this size may be planned; False if it never may."""
        with self._changed:
            while self._waiting and (
                self._bytes + size > self._most or self._waiting >= AHEAD_STEPS
            ):
                if self._stopped:
                    return False
                self._few = self._waiting * 3 // 4
                self._changed.wait(_LOOK_SECONDS)
            self._waiting, self._bytes = self._waiting + 1, self._bytes + size
            self._sizes.put(size)
        return not self._stopped

    def _work(self) -> None:
        try:
            while not self._stopped:
                if self._is_all_here():
                    self._plans.put(_AllHere())
                    break
                if (step := self._plan()) is None:
                    self._plans.put(None)
                    break
                if not self._wait_for_room(self._size(step)):
                    break
                wanted = self._wanted(step)
                for holder, units in wanted:
                    # The next step to be filled must not wait for room, which only its filling
                    # would make.
                    holder.want(units, lambda: not self._stopped and self._waiting > 1)
                with self._changed:
                    self._units[step.index] = wanted
                self._plans.put(step)
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


def release(wanted: Wanted) -> None:
    """Let units go."""
    for holder, units in wanted:
        holder.release(units)
