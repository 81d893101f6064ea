"""A few processes of this machine that each do one task at a time.

Workers are plain child processes of `python -m penstock.prepare.worker`, not copies of this one: no fork of a program
with threads, and no second run of the user's main script. A worker that dies is an error that names its task, never a
wait without end. Workers end when their parent does, even by kill -9.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, final

from penstock.errors import PenstockError
from penstock.prepare.pool import Function, Message

_GIB = str(1 << 30)
WORKER_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": _GIB,
    "MALLOC_TRIM_THRESHOLD_": _GIB,
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
"""Environment that lets a worker keep the memory of one block for the next; a third less CPU time.

Otherwise glibc maps each array of some megabytes, the system clears it page by page, and it is given back, each time;
and Arrow has an allocator of its own that does so whatever glibc is told.
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

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.connection.close()


@final
class Processes:
    """The crew of child processes, started as they are needed.

    Args:
        state: What every task needs; sent once to each worker, as it is when that starts.
        limit: How many at most.
        keep_open: File descriptors that workers inherit.
    """

    def __init__(self, state: Any, limit: int, keep_open: tuple[int, ...] = ()) -> None:
        self._state, self._limit, self._keep_open = state, limit, keep_open
        self._workers: list[_Worker] = []

    def has_room(self) -> bool:
        """Whether a worker is free, or another may be started."""
        return len(self._workers) < self._limit or any(worker.task is None for worker in self._workers)

    def start(self, number: int, name: str, function: Function, argument: Any) -> None:
        """Give a task to a free worker, or to a new one."""
        worker = next((worker for worker in self._workers if worker.task is None), None)
        if worker is None:
            worker = _Worker(pickle.dumps(self._state), self._keep_open)
            self._workers.append(worker)
        worker.task = (number, name)
        worker.connection.send_bytes(pickle.dumps((function, argument)))

    def receive(self) -> Iterator[Message]:
        """What the workers say next, at least one message."""
        busy = {worker.connection: worker for worker in self._workers if worker.task is not None}
        for connection in wait(list(busy)):
            worker = busy[connection]  # type: ignore[index]
            number, name = worker.task or (0, "")
            kind, value = _message(worker, name)
            if kind != "report":
                worker.task = None
            yield number, kind, value

    def renew(self) -> None:
        """Let new workers do the tasks that follow, with the state as it is then."""
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
        cause = "killed by signal 9, often for want of memory" if code == -9 else f"it ended with code {code}"
        raise PenstockError(
            f"{name}: the process that worked on it died ({cause}); finished parts are kept: run it again, "
            "with fewer processes or a smaller part_bytes if memory ran out"
        ) from None
