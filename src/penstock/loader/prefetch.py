"""Working ahead in threads: one plans, some fill, results come in order, errors reach the caller."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

from penstock.errors import StateError


@final
class Prefetch:
    """(plan, result) pairs in order, made ahead.

    A planning thread calls `plan()` until it returns None and hands each plan to a pool that calls `fill(plan)`. At
    most `depth` results wait. An exception in either is raised where its result would have been.
    """

    def __init__(self, plan: Callable[[], Any], fill: Callable[[Any], Any], threads: int, depth: int) -> None:
        self._plan, self._fill = plan, fill
        self._results: queue.Queue[tuple[Any, Future[Any]] | None] = queue.Queue()
        self._room = threading.Semaphore(depth)
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="penstock-fill")
        self._planner = threading.Thread(target=self._run, name="penstock-plan", daemon=True)
        self._planner.start()

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        while (item := self._results.get()) is not None:
            if self._stopping.is_set():
                raise StateError("the loader was moved or iterated anew while this iterator was under way")
            plan, future = item
            result = future.result()
            self._room.release()
            yield plan, result

    def close(self) -> None:
        """Stop both, and wait for what is under way."""
        self._stopping.set()
        self._room.release()
        self._planner.join()
        self._pool.shutdown(wait=True, cancel_futures=True)
        # Whoever asks for another result is told that there is none.
        self._results.put((None, _done(None)))

    def _run(self) -> None:
        while True:
            self._room.acquire()
            if self._stopping.is_set():
                return
            try:
                plan = self._plan()
            except BaseException as error:
                self._results.put((None, _done(error)))
                return
            if plan is None:
                self._results.put(None)
                return
            self._results.put((plan, self._pool.submit(self._fill, plan)))


def _done(error: BaseException | None) -> Future[Any]:
    """A future that is over, with an error or with nothing."""
    future: Future[Any] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future
