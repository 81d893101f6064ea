"""Tasks of a Ray cluster as a crew: parts are prepared on any of its nodes, into one folder that all of them see.

The cluster is the one this program is connected to, that of RAY_ADDRESS, or a new one on this machine. Nodes need the
same penstock, the sources, and the output folder under the same path. Each run puts a marker of its own into the
folder, and each task looks for it and holds a lock on it: a node that sees another disk is found at once, and no task
of a killed run writes into a later one. Ray runs a task again when its node is lost; only its progress counts twice.
"""

import contextlib
import fcntl
import os
import pickle
import queue
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

from penstock.errors import MissingExtraError, OutputError, PenstockError
from penstock.prepare.pool import Function, Message

MARKER = "ray-run-"
"""Markers are files of this name in the working folder, and what makes the run unique."""

STORE_BYTES = 256 << 20
"""Ray's shared memory for objects on this machine: a tokenizer and short messages go through it."""

CLOSING_SECONDS = 30.0
"""How long to wait for tasks of a killed or cancelled run to end."""

CONNECT_SECONDS = 10.0
"""How long to wait for the head of a cluster."""

AHEAD = 2
"""Tasks given to Ray for each core, so that none waits, and a cluster that can grow sees that there is more."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a task belongs, wherever it runs."""

    marker: Path
    folder: str
    """The working directory of this program, for relative paths."""

    paths: tuple[str, ...]
    """Where this program imports modules from, for the user's transform."""

    version: str


@final
class RayTasks:
    """The crew of Ray tasks, each with one core.

    Args:
        state: What every task needs; put once into Ray's memory.
        work: Folder for markers, inside the output.
        limit: Tasks at once; None: as many as the cluster has cores.

    Raises:
        MissingExtraError: Ray is not installed.
        PenstockError: The cluster cannot be reached.
    """

    def __init__(self, state: Any, work: Path, limit: int | None) -> None:
        ray = import_ray()
        self._ray, self._limit = ray, limit
        self._running: dict[Any, tuple[int, str]] = {}
        self._place = _Place(
            marker=work.absolute() / f"{MARKER}{uuid.uuid4().hex}",
            folder=os.getcwd(),
            paths=tuple(os.path.abspath(path) for path in sys.path),
            version=version("penstock"),
        )
        self._place.marker.touch()
        self._ours = not ray.is_initialized()
        if self._ours:
            _connect(ray, limit)
        self._state = ray.put(state)
        self._task = ray.remote(num_cpus=1, num_returns="streaming")(_serve)

    def has_room(self) -> bool:
        """Whether another task may be given to Ray."""
        limit = self._limit or AHEAD * max(int(self._ray.cluster_resources().get("CPU", 0)), 1)
        return len(self._running) < limit

    def start(self, number: int, name: str, function: Function, argument: Any) -> None:
        """Give Ray a task."""
        stream = self._task.options(name=name).remote(
            self._place, [self._state], pickle.dumps((name, function, argument))
        )
        self._running[stream] = (number, name)

    def receive(self) -> Iterator[Message]:
        """What the tasks say next, at least one message."""
        ready, _ = self._ray.wait(list(self._running), num_returns=1)
        for stream in ready:
            number, name = self._running[stream]
            try:
                kind, value = self._ray.get(next(stream))
            except self._ray.exceptions.RayError as error:
                words = f"{name}: Ray could not finish it: {_words(error)}; run it again: finished parts are kept"
                kind, value = "failed", PenstockError(words)
            if kind != "report":
                del self._running[stream]
            yield number, kind, value

    def close(self) -> None:
        """End what still runs, and wait until it has let go of the folder; leave the cluster if we joined it."""
        for stream in self._running:
            self._ray.cancel(stream, force=True)
        self._running = {}
        if self._ours:
            self._ray.shutdown()
        with contextlib.suppress(OutputError):  # then the marker stays, and the next run waits for it
            _end_run(self._place.marker)


def import_ray() -> Any:
    """Ray itself.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray") from None
    return ray


def end_earlier_runs(work: Path) -> None:
    """Wait until no task of a killed run can write into the folder any more.

    Args:
        work: Folder for markers, inside the output.

    Raises:
        OutputError: Such tasks do not end.
    """
    for marker in work.glob(f"{MARKER}*"):
        _end_run(marker)


def _end_run(marker: Path) -> None:
    """Remove a marker when no task holds it, so that none can begin."""
    handle = os.open(marker, os.O_RDWR)
    deadline = time.monotonic() + CLOSING_SECONDS
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OutputError(
                        f"{marker.parent.parent}: Ray tasks of an earlier run still write into it; stop that job "
                        "(ray list tasks shows it), then run it again"
                    ) from None
                time.sleep(0.05)
        marker.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _connect(ray: Any, limit: int | None) -> None:
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://"):
        raise PenstockError(
            f"RAY_ADDRESS is {address}: Ray Client cannot stream what tasks say; run this on a node of the cluster, "
            "with RAY_ADDRESS=auto (ray job submit does both)"
        )
    here: dict[str, Any] = {"num_cpus": limit, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    host, colon, port = address.rpartition(":")
    try:
        if colon and port.isdecimal():  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        # What a transform prints stays in Ray's logs: it must not mix with our JSON.
        ray.init(address, log_to_driver=False, logging_level="ERROR", **(here if address == "local" else {}))
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise PenstockError(f"Ray at {address!r} cannot be reached: {error}; set RAY_ADDRESS, or unset it") from error


def _serve(place: _Place, state: list[Any], work: bytes) -> Iterator[tuple[str, Any]]:
    """The task: does the work in a thread, and streams what that says."""
    said: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_work, args=(place, state[0], work, said.put), daemon=True).start()
    kind = "report"
    while kind == "report":
        kind, value = said.get()
        yield kind, value


def _work(place: _Place, state: Any, work: bytes, say: Callable[[tuple[str, Any]], None]) -> None:
    try:
        name = "a task"
        with _hold(place), contextlib.chdir(place.folder if os.path.isdir(place.folder) else "."):
            sys.path += [path for path in place.paths if path not in sys.path]
            name, function, argument = pickle.loads(work)
            result = function(_fetch(state), argument, lambda *figures: say(("report", figures)))
        say(("done", result))
    except PenstockError as error:
        say(("failed", error))
    except BaseException as error:  # whatever it is, this thread is the last to know of it
        say(("failed", PenstockError(f"{name}: failed on node {_node()}: {_words(error)}")))


_fetched: dict[Any, Any] = {}
"""The state that this worker process had last: unpickling a tokenizer takes longer than a small part."""


def _fetch(state: Any) -> Any:
    import ray

    if state not in _fetched:
        _fetched.clear()
        _fetched[state] = ray.get(state)
    return _fetched[state]


@contextlib.contextmanager
def _hold(place: _Place) -> Iterator[None]:
    """Check that this node is where the work belongs, and keep a later run waiting meanwhile."""
    if version("penstock") != place.version:
        found = version("penstock")
        raise PenstockError(f"node {_node()}: has penstock {found}, due: {place.version}, as where the run began")
    try:
        marker = os.open(place.marker, os.O_RDWR)
    except OSError as error:
        raise OutputError(
            f"node {_node()}: does not see {place.marker.parent.parent} of this run ({error.strerror}); the output "
            "must be on a file system that all nodes share, under the same path, with one preparation at a time"
        ) from None
    try:
        fcntl.flock(marker, fcntl.LOCK_SH)
        if not place.marker.exists():
            raise OutputError(f"node {_node()}: the run of this task has ended")
        yield
    finally:
        os.close(marker)


def _words(error: BaseException) -> str:
    """An error on one line; Ray's own carry tracebacks, which end with the cause."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


def _node() -> str:
    return f"{socket.gethostname()} (process {os.getpid()})"
