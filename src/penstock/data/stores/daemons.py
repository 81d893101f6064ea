"""Threads that wait for stores, and never keep the process from ending: a store may not answer at
all.

The threads of `concurrent.futures` are joined when the interpreter ends, so one request without an
answer would keep a process alive after Ctrl-C. Those of a `DaemonPool` are left where they wait.
Whoever waits for their results looks now and then whether the process ends (`result_of`,
`refuse_at_end`), and so does a request that was answered after all: nothing touches mapped files
any more once the interpreter takes them apart.
"""

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, Self, TypeVar, final

from penstock.core.errors import StoreError

Result = TypeVar("Result")

LOOK_SECONDS = 0.1
"""How often those who wait look whether the process ends."""
END_SECONDS = 2.0
"""How long the end of the process waits for requests that are under way."""
_IDLE_SECONDS = 5.0
"""After so long without work, a thread ends."""

_ending = threading.Event()
_pools: "weakref.WeakSet[DaemonPool]" = weakref.WeakSet()


@final
class DaemonPool:
    """Up to `most` daemon threads; as a context manager, it waits for what was begun, but not after
    Ctrl-C. In a forked process it is empty: threads do not survive a fork.

    Args:
        most: Threads at the same time.
        name: Theirs.
    """

    def __init__(self, most: int, name: str = "penstock-store") -> None:
        self._most, self._name = most, name
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._begun, self._done = threading.Condition(self._lock), threading.Condition(self._lock)
        self._tasks: deque[tuple[Future[Any], Callable[..., object], tuple[object, ...]]] = deque()
        self._threads = self._idle = self._made = 0
        self._closed = False

    def submit(self, function: Callable[..., Result], /, *arguments: object) -> "Future[Result]":
        """Call a function in one of the threads.

        Raises:
            RuntimeError: The process ends, or has no more threads.
        """
        future: Future[Result] = Future()
        with self._lock:
            if _ending.is_set() or self._closed:
                raise RuntimeError("the process ends, or the pool was left")
            self._tasks.append((future, function, arguments))
            if len(self._tasks) > self._idle and self._threads < self._most:
                self._begin_thread()
            self._begun.notify()
        return future

    def map(self, function: Callable[[Any], Result], items: Iterable[object]) -> Iterator[Result]:
        """Results of a function for each item, in order; all begin now."""
        futures = [self.submit(function, item) for item in items]
        return (result_of(future) for future in futures)

    def cancel(self) -> None:
        """Forget what has not begun."""
        with self._lock:
            left, self._tasks = list(self._tasks), deque()
        for future, *_ in left:
            future.cancel()

    def join(self, deadline: float | None = None) -> None:
        """Wait until nothing runs or waits; until `time.monotonic()` is `deadline`, or (None) the
        process ends.
        """
        with self._lock:
            while self._threads > self._idle or self._tasks:
                if _ending.is_set() if deadline is None else time.monotonic() >= deadline:
                    break
                self._done.wait(LOOK_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is not None:
            self.cancel()
        if error is None or isinstance(error, Exception):
            self.join()
        with self._lock:
            self._closed = True
            self._begun.notify_all()

    def _begin_thread(self) -> None:
        self._threads, self._made = self._threads + 1, self._made + 1
        try:
            threading.Thread(
                target=self._work, name=f"{self._name}-{self._made}", daemon=True
            ).start()
        except RuntimeError:
            self._threads -= 1
            if not self._threads:
                self._tasks.pop()
                raise

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._tasks:
                    if self._closed:
                        self._threads -= 1
                        return
                    self._idle += 1
                    self._done.notify_all()
                    came = self._begun.wait(_IDLE_SECONDS)
                    self._idle -= 1
                    if not self._tasks and not came:
                        self._threads -= 1
                        return
                future, function, arguments = self._tasks.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)
            # Nothing of the last task is kept while the thread waits for the next.
            del future, function, arguments


def result_of(future: "Future[Result]") -> Result:
    """The result of a future, which Ctrl-C and the end of the process interrupt."""
    wait_for(future)
    return future.result()


def wait_for(future: "Future[Any]") -> None:
    """Wait until a future is done, however it ends.

    Raises:
        StoreError: The process ends.
    """
    while not future.done():
        refuse_at_end()
        with suppress(TimeoutError, CancelledError):
            future.exception(LOOK_SECONDS)


def refuse_at_end() -> None:
    """To be called by whoever waits for a store, or has waited for it.

    Raises:
        StoreError: The process ends.
    """
    if _ending.is_set():
        raise StoreError("the process ends, so no store is read any more")


def end() -> None:
    """From now on, nothing waits for a store, because the process ends."""
    _ending.set()
    for pool in list(_pools):
        pool.cancel()


@atexit.register
def _end_all() -> None:
    """Requests that are under way have a moment to be answered; a thread that waits longer is
    left.
    """
    end()
    deadline = time.monotonic() + END_SECONDS
    for pool in list(_pools):
        pool.join(deadline)


def _begin_again() -> None:
    for pool in list(_pools):
        pool._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)
