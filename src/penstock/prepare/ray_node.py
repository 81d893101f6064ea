"""What a Ray task does on its node, and the markers by which tasks and runs know each other.

Each run puts a marker of its own into the output's working folder. A task looks for it and holds a lock on it while it
works: a node that sees another disk is found at once, and a later run waits until the tasks of a killed one have ended.
The locks are `flock`, so they are let go however a process ends, and a shared file system must know them.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

from penstock.errors import OutputError, PenstockError

MARKER = "ray-run-"
"""Markers are files of this name in the working folder, and what makes the run unique."""

CLOSING_SECONDS = 30.0
"""How long to wait for tasks of a killed or cancelled run to end."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a task belongs, wherever it runs."""

    marker: Path
    folder: str
    """The working directory of this program, for relative paths."""

    paths: tuple[str, ...]
    """Where this program imports modules from, for the user's transform."""

    version: str


def serve(place: Place, state: list[Any], work: bytes) -> Iterator[tuple[str, Any]]:
    """The task: does the work in a thread, and streams what that says."""
    said: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_work, args=(place, state[0], work, said.put), daemon=True).start()
    kind = "report"
    while kind == "report":
        kind, value = said.get()
        yield kind, value


def _work(place: Place, state: Any, work: bytes, say: Callable[[tuple[str, Any]], None]) -> None:
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
        say(("failed", PenstockError(f"{name}: failed on node {_node()}: {last_words(error)}")))


_fetched: dict[Any, Any] = {}
"""The state that this worker process had last: unpickling a tokenizer takes longer than a small part."""


def _fetch(state: Any) -> Any:
    import ray

    if state not in _fetched:
        _fetched.clear()
        _fetched[state] = ray.get(state)
    return _fetched[state]


@contextlib.contextmanager
def _hold(place: Place) -> Iterator[None]:
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


def last_words(error: BaseException) -> str:
    """An error on one line; Ray's own carry tracebacks, which end with the cause."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


def _node() -> str:
    return f"{socket.gethostname()} (process {os.getpid()})"


def end_earlier_runs(work: Path) -> None:
    """Wait until no task of a killed run can write into the folder any more.

    Args:
        work: Folder for markers, inside the output.

    Raises:
        OutputError: Such tasks do not end.
    """
    for marker in work.glob(f"{MARKER}*"):
        end_run(marker)


def end_run(marker: Path) -> None:
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
