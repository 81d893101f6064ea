"""Threads that nobody waits for at the end: a tool or a server that never answers keeps neither an
error, nor Ctrl-C, nor the end of the process waiting. Those of `concurrent.futures` do.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, final

Result = TypeVar("Result")


@final
class DaemonThreads:
    """Calls functions in threads, which are started as they are needed.

    Args:
        most: Calls at the same time; further ones wait.
        name: Of the threads.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0

    def submit(
        self, function: Callable[..., Result], *given: object, **named: object
    ) -> Future[Result]:
        """Call a function as soon as a thread is free; the future has what it returned or raised.
        Call this from one thread.
        """
        future: Future[Result] = Future()

        def call() -> None:
            try:
                found = function(*given, **named)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(found)

        self._calls.put(call)
        if not self._idle.acquire(blocking=False) and self._started < self._most:
            name = f"{self._name}-{self._started}"
            threading.Thread(target=self._run, name=name, daemon=True).start()
            self._started += 1
        return future

    def close(self) -> None:
        """End the threads that do nothing, and the others after their calls; waits for none."""
        for _ in range(self._started):
            self._calls.put(None)

    def _run(self) -> None:
        call: Any = self._calls.get()
        while call is not None:
            call()
            del call
            self._idle.release()
            call = self._calls.get()
