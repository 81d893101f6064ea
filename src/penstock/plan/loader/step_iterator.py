"""One pass of an iterator over a loader: steps planned and filled, in the caller's thread or ahead
in others.

Worker threads take turns: holding a lock, a worker plans the next step and queues a future of its
result; then it fills the step while the next worker plans. So results come in order, whoever is
faster, and an error comes where its step would have come. At most `depth` steps wait to be taken,
and no more bytes than `most`: a step begins only if it fits next to those that wait and those that
are being filled, each taken for as large as the largest so far.

`stop` never waits, because the garbage collector may call it from one of the workers; `join` does.
"""

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar, final

from penstock.core.errors import StateError
from penstock.data.stores import daemons

Planned = TypeVar("Planned")
Result = TypeVar("Result")

_LOOK_SECONDS = 0.1
"""How often a worker that waits for bytes looks whether it must end."""

_runs: "weakref.WeakSet[StepPipeline[Any, Any]]" = weakref.WeakSet()


@final
class StepPipeline(Generic[Planned, Result]):
    """Plans and results in order; `threads` = 0 makes each when it is asked for.

    Args:
        plan: Gives the next plan, or None at the end; never called by two threads at once.
        fill: Makes the result of a plan; called by several threads at once.
        threads: Workers.
        depth: Results that may wait.
        size: Bytes of a result, at least 1; None: they are not counted.
        most: Maximum bytes of results that wait or are being filled; one is always made.
    """

    def __init__(
        self,
        plan: Callable[[], Planned | None],
        fill: Callable[[Planned], Result],
        threads: int,
        depth: int,
        size: Callable[[Result], int] | None = None,
        most: int = 0,
    ) -> None:
        self._plan, self._fill = plan, fill
        self._size, self._most = size, most
        # Not a lock that the garbage collector could meet: `stop` takes no part in it.
        self._freed = threading.Condition()
        self._held = self._filling = self._largest = 0
        self._turn, self._room = threading.Lock(), threading.Semaphore(depth)
        self._results: queue.SimpleQueue[tuple[Planned | None, Future[Result]] | None] = (
            queue.SimpleQueue()
        )
        self._over, self._stopped, self._process = False, False, os.getpid()
        self._workers = [
            threading.Thread(target=self._work, name=f"penstock-{number}", daemon=True)
            for number in range(threads)
        ]
        _runs.add(self)
        try:
            for worker in self._workers:
                worker.start()
        except BaseException:
            # No more threads, or Ctrl-C: those that run would go on planning without a consumer.
            self._workers = [worker for worker in self._workers if worker.ident is not None]
            self.stop()
            self.join()
            raise

    def next(self) -> tuple[Planned, Result] | None:
        """The next plan and its result; None at the end.

        Raises:
            StateError: The loader was moved meanwhile, or the process forked.
        """
        if self._process != os.getpid():
            raise StateError(
                "this iterator was begun before the process forked; iterate the loader again "
                "in the child"
            )
        self._refuse_if_stopped()
        if not self._workers:
            plan = self._plan()
            return None if plan is None else (plan, self._fill(plan))
        item = self._results.get()
        self._refuse_if_stopped()
        if item is None:
            return None
        plan, future = item
        result = future.result()
        assert plan is not None, "only an error is queued without a plan"
        if self._size is not None:
            with self._freed:
                self._held -= self._size(result)
                self._freed.notify_all()
        self._room.release()
        return plan, result

    def stop(self) -> None:
        """End soon: workers finish what they do."""
        self._stopped = True
        for _ in self._workers:
            self._room.release()
        self._results.put(None)

    def join(self) -> None:
        """Wait until no worker plans or fills."""
        if self._process == os.getpid():
            for worker in self._workers:
                worker.join()

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            raise StateError(
                "the loader was moved or iterated again while this iterator was under way"
            )

    def _work(self) -> None:
        while True:
            self._room.acquire()
            with self._turn:
                self._wait_for_bytes()
                if self._stopped or self._over:
                    return
                future: Future[Result] = Future()
                plan = self._next_plan(future)
                if plan is None:
                    self._over = True
                    # The other workers wait for room to find that it is over.
                    for _ in self._workers:
                        self._room.release()
                    return
                with self._freed:
                    self._filling += 1
            size = 0
            try:
                result = self._fill(plan)
                size = 0 if self._size is None else self._size(result)
                self._count(size)
                future.set_result(result)
                del result
            except BaseException as error:
                self._count(size)
                future.set_exception(error)

    def _wait_for_bytes(self) -> None:
        """Wait until one more result fits."""
        if self._size is None:
            return
        with self._freed:
            while not (self._stopped or self._over) and self._held + self._filling:
                # Until the first is filled, nobody knows how large they are.
                if self._largest and self._held + (self._filling + 1) * self._largest <= self._most:
                    break
                # `stop` does not notify, because it must never wait for a lock.
                self._freed.wait(_LOOK_SECONDS)

    def _count(self, size: int) -> None:
        """A result of this size is no longer being filled, but waits."""
        with self._freed:
            self._filling -= 1
            self._held += size
            self._largest = max(self._largest, size)
            self._freed.notify_all()

    def _next_plan(self, future: "Future[Result]") -> Planned | None:
        """Plan a step and queue the future of its result; None when there is nothing more to
        fill.
        """
        try:
            plan = self._plan()
        except BaseException as error:
            future.set_exception(error)
            self._results.put((None, future))
            return None
        self._results.put(None if plan is None else (plan, future))
        return plan


@atexit.register
def _end_all() -> None:
    """Workers read mapped files; they must be done before the interpreter takes those apart. None
    waits for a store.
    """
    daemons.end()
    for run in list(_runs):
        run.stop()
        run.join()
