"""One pass of an iterator over a loader: steps planned and filled, in the caller's thread or ahead in others.

Worker threads take turns: holding a lock, a worker plans the next step and queues a future of its result; then it fills
the step while the next worker plans. So results come in order, whoever is faster, and an error comes where its step
would have come. At most `depth` steps wait to be taken.

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

Planned = TypeVar("Planned")
Result = TypeVar("Result")

_runs: "weakref.WeakSet[StepPipeline[Any, Any]]" = weakref.WeakSet()


@final
class StepPipeline(Generic[Planned, Result]):
    """Plans and results in order; `threads` = 0 makes each when it is asked for.

    Args:
        plan: Gives the next plan, or None at the end; never called by two threads at once.
        fill: Makes the result of a plan; called by several threads at once.
        threads: Workers.
        depth: Results that may wait.
    """

    def __init__(
        self, plan: Callable[[], Planned | None], fill: Callable[[Planned], Result], threads: int, depth: int
    ) -> None:
        self._plan, self._fill = plan, fill
        self._turn, self._room = threading.Lock(), threading.Semaphore(depth)
        self._results: queue.SimpleQueue[tuple[Planned | None, Future[Result]] | None] = queue.SimpleQueue()
        self._over, self._stopped, self._process = False, False, os.getpid()
        self._workers = [
            threading.Thread(target=self._work, name=f"penstock-{number}", daemon=True) for number in range(threads)
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
            raise StateError("this iterator was begun before the process forked; iterate the loader again in the child")
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
            raise StateError("the loader was moved or iterated again while this iterator was under way")

    def _work(self) -> None:
        while True:
            self._room.acquire()
            with self._turn:
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
            try:
                future.set_result(self._fill(plan))
            except BaseException as error:
                future.set_exception(error)

    def _next_plan(self, future: "Future[Result]") -> Planned | None:
        """Plan a step and queue the future of its result; None when there is nothing more to fill."""
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
    """Workers read mapped files; they must be done before the interpreter takes those apart."""
    for run in list(_runs):
        run.stop()
        run.join()
