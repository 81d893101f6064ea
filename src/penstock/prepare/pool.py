"""A few processes that each do one task at a time, and say how far they are.

Workers are plain child processes of `python -m penstock.prepare.worker`, not copies of this one: no fork of a program
with threads, and no second run of the user's main script. A worker that dies is an error that names its task, never a
wait without end. Workers end when their parent does, even by kill -9.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Any, Self, final

from penstock.errors import PenstockError

_GIB = str(1 << 30)
WORKER_MEMORY = {"MALLOC_MMAP_THRESHOLD_": _GIB, "MALLOC_TRIM_THRESHOLD_": _GIB}
"""Environment that lets a worker keep the memory of one block for the next; a quarter less CPU time.

Otherwise glibc maps each array of some megabytes, the system clears it page by page, and it is given back, each time.
"""


@final
class _Worker:
    """One child process, and the task it has."""

    def __init__(self, state: bytes, keep_open: tuple[int, ...]) -> None:
        self.connection: Connection
        self.connection, child = Pipe()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {**WORKER_MEMORY, **os.environ, "PYTHONPATH": paths}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.prepare.worker", str(child.fileno())],
            stdin=subprocess.PIPE,
            stdout=2,  # what a user's transform prints must not mix with our JSON
            pass_fds=(child.fileno(), *keep_open),
            env=environment,
        )
        child.close()
        self.connection.send_bytes(state)
        self.task: tuple[int, str] | None = None

    def give(self, number: int, name: str, function: Callable[..., Any], argument: Any) -> None:
        self.task = (number, name)
        self.connection.send_bytes(pickle.dumps((function, argument)))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.connection.close()


@final
class Pool:
    """Runs functions `(state, argument, report) → result` in child processes, or here when there is only one.

    Args:
        state: What every task needs; sent once to each worker.
        processes: How many; 1 runs in this process.
        keep_open: File descriptors that workers inherit.
    """

    def __init__(self, state: Any, processes: int, keep_open: tuple[int, ...] = ()) -> None:
        self._state, self._processes, self._keep_open = state, processes, keep_open
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []

    def run(
        self,
        function: Callable[..., Any],
        tasks: Iterable[tuple[str, Any]],
        report: Callable[..., None],
    ) -> Iterator[Any]:
        """Do all tasks, handed out in order; yield results as they come.

        Args:
            function: Importable; called with the pool's state, the argument, and a function that sends to `report`.
            tasks: (name for messages, argument), taken as workers become free.
            report: Called here with what a task reports.

        Raises:
            PenstockError: A task failed; of several, the error of the first in order. Or a worker died.
        """
        if self._processes == 1:
            for _, argument in tasks:
                yield function(self._state, argument, report)
            return
        waiting = enumerate(tasks)
        failed: tuple[int, BaseException] | None = None
        self._feed(function, waiting)
        while busy := [worker for worker in self._workers if worker.task is not None]:
            if failed is not None and all(worker.task is None or worker.task[0] > failed[0] for worker in busy):
                break
            for connection in wait([worker.connection for worker in busy]):
                worker = next(worker for worker in busy if worker.connection is connection)
                kind, value = self._receive(worker)
                if kind == "report":
                    report(*value)
                    continue
                number = worker.task[0] if worker.task is not None else 0
                worker.task = None
                if kind == "failed":
                    failed = (number, value) if failed is None or number < failed[0] else failed
                    continue
                yield value
                if failed is None:
                    self._feed(function, waiting)
        if failed is not None:
            raise failed[1]

    def _feed(self, function: Callable[..., Any], waiting: Iterator[tuple[int, tuple[str, Any]]]) -> None:
        """Give a task to each free worker, starting workers as long as there are tasks."""
        while True:
            free = next((worker for worker in self._workers if worker.task is None), None)
            if free is None and len(self._workers) >= self._processes:
                return
            task = next(waiting, None)
            if task is None:
                return
            if free is None:
                free = _Worker(pickle.dumps(self._state), self._keep_open)
                self._workers.append(free)
            number, (name, argument) = task
            free.give(number, name, function, argument)

    def _receive(self, worker: _Worker) -> tuple[str, Any]:
        try:
            message: tuple[str, Any] = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            code = worker.process.wait()
            name = worker.task[1] if worker.task is not None else "nothing"
            cause = "killed by signal 9, often for want of memory" if code == -9 else f"it ended with code {code}"
            raise PenstockError(
                f"{name}: the process that worked on it died ({cause}); finished parts are kept: run it again, "
                "with fewer processes or a smaller part_bytes if memory ran out"
            ) from None
        return message
