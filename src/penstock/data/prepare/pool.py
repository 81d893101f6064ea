"""Runs tasks in order, several at once, and collects their messages; the work is done by a crew.

There are two crews: processes of this machine, and tasks of a Ray cluster. Both run the same
functions with the same state, so the result does not depend on the crew.

Worker processes are plain children (`python -m penstock.data.prepare.worker`), not copies of this
process: no fork of a program with threads, and no second run of the user's main script. Each does
one task at a time. A worker that dies is an error that names its task, never an endless wait.
Workers end when their parent does, even by kill -9.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Literal, Protocol, Self, final

from penstock.core.errors import PenstockError

Message = tuple[int, Literal["report", "done", "failed"], Any]
"""Number of the task; the kind of message; and the reported figures, the result, or the error."""

Function = Callable[[Any, Any, Callable[..., None]], Any]
"""A task's function, `(state, argument, report) → result`, which can be imported by name."""

_GIB = str(1 << 30)
WORKER_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": _GIB,
    "MALLOC_TRIM_THRESHOLD_": _GIB,
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
"""Environment that lets a worker keep the memory of one block for the next; a third less CPU time.

Otherwise glibc maps each array of some megabytes, the system clears it page by page, and it is
returned, each time. Arrow's own allocator does the same, whatever the settings of glibc.
"""


class Crew(Protocol):
    """Does tasks, several at once."""

    def has_room(self) -> bool:
        """Whether another task may be started now."""

    def start(self, number: int, name: str, function: Function, argument: object) -> None:
        """Start a task; `name` is for messages."""

    def receive(self) -> Iterable[Message]:
        """Wait for messages of running tasks."""

    def renew(self) -> None:
        """Give later tasks the current state; called while no task is running."""

    def close(self) -> None:
        """Stop running tasks; none of them writes any more when this returns."""


@final
class Pool:
    """Runs functions `(state, argument, report) → result` with a crew, or in this process without
    one.

    Args:
        state: What every task needs; the crew has it too.
        crew: Does the tasks; closed when the pool is left.
    """

    def __init__(self, state: object, crew: Crew | None) -> None:
        self._state, self._crew = state, crew

    def renew(self) -> None:
        """Inform the crew that the state changed; between two runs."""
        if self._crew is not None:
            self._crew.renew()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._crew is not None:
            self._crew.close()

    def run(
        self, function: Function, tasks: Iterable[tuple[str, Any]], report: Callable[..., None]
    ) -> Iterator[Any]:
        """Do all tasks, started in order; yield results as they come.

        Args:
            function: Called with the state, the argument, and a function that sends to `report`.
            tasks: (name for messages, argument), taken when there is room.
            report: Called in this process with what a task reports.

        Raises:
            PenstockError: A task failed; if several did, the error of the first in order.
        """
        if self._crew is None:
            for _, argument in tasks:
                yield function(self._state, argument, report)
            return
        crew, waiting = self._crew, enumerate(tasks)
        running: set[int] = set()
        failed: tuple[int, PenstockError] | None = None
        while True:
            while failed is None and crew.has_room() and (task := next(waiting, None)) is not None:
                number, (name, argument) = task
                crew.start(number, name, function, argument)
                running.add(number)
            if not running or (failed is not None and failed[0] < min(running)):
                break
            for number, kind, value in crew.receive():
                if kind == "report":
                    report(*value)
                    continue
                running.discard(number)
                if kind == "done":
                    yield value
                elif failed is None or number < failed[0]:
                    failed = (number, value)
        if failed is not None:
            raise failed[1]


@final
class _Worker:
    """One child process and its task."""

    def __init__(self, state: bytes, keep_open: tuple[int, ...]) -> None:
        self.connection: Connection
        self.connection, child = Pipe()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {**WORKER_MEMORY, **os.environ, "PYTHONPATH": paths}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.data.prepare.worker", str(child.fileno())],
            stdin=subprocess.PIPE,
            stdout=2,  # prints of a user's transform must not mix with our JSON
            pass_fds=(child.fileno(), *keep_open),
            env=environment,
        )
        child.close()
        self.connection.send_bytes(state)
        self.task: tuple[int, str] | None = None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.connection.close()


@final
class Processes:
    """The crew of child processes, started when they are needed.

    Args:
        state: What every task needs; sent to each worker once, when it starts.
        limit: Maximum number of processes.
        keep_open: File descriptors that workers inherit.
    """

    def __init__(self, state: object, limit: int, keep_open: tuple[int, ...] = ()) -> None:
        self._state, self._limit, self._keep_open = state, limit, keep_open
        self._workers: list[_Worker] = []

    def has_room(self) -> bool:
        """Whether a worker is free, or another may be started."""
        return len(self._workers) < self._limit or any(
            worker.task is None for worker in self._workers
        )

    def start(self, number: int, name: str, function: Function, argument: object) -> None:
        """Give a task to a free worker, or to a new one."""
        worker = next((worker for worker in self._workers if worker.task is None), None)
        if worker is None:
            worker = _Worker(pickle.dumps(self._state), self._keep_open)
            self._workers.append(worker)
        worker.task = (number, name)
        worker.connection.send_bytes(pickle.dumps((function, argument)))

    def receive(self) -> Iterator[Message]:
        """The next messages of the workers, at least one."""
        busy = {worker.connection: worker for worker in self._workers if worker.task is not None}
        for connection in wait(list(busy)):
            worker = busy[connection]  # type: ignore[index]
            number, name = worker.task or (0, "")
            kind, value = _message(worker, name)
            if kind != "report":
                worker.task = None
            yield number, kind, value

    def renew(self) -> None:
        """Let new workers do the later tasks, with the state at that time."""
        self.close()

    def close(self) -> None:
        """Kill the workers."""
        for worker in self._workers:
            worker.end()
        self._workers = []


def _message(worker: _Worker, name: str) -> Any:
    try:
        return pickle.loads(worker.connection.recv_bytes())
    except (EOFError, OSError):
        code = worker.process.wait()
        cause = (
            "killed by signal 9, often for lack of memory"
            if code == -9
            else f"it ended with code {code}"
        )
        raise PenstockError(
            f"{name}: the process that worked on it died ({cause}); finished parts are kept: "
            "run it again, with fewer processes or a smaller part_bytes if memory ran out"
        ) from None
