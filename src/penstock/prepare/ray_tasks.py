"""Tasks of a Ray cluster as a crew: parts are prepared on any of its nodes, into one folder that all of them see.

The cluster is the one this program is connected to, that of RAY_ADDRESS, or a new one on this machine. Nodes need the
same penstock, the sources, and the output folder under the same path; each task checks that (see `ray_node`). Ray runs
a task again when its node is lost.
"""

import contextlib
import os
import pickle
import socket
import sys
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

from penstock.errors import MissingExtraError, OutputError, PenstockError
from penstock.prepare.pool import Function, Message
from penstock.prepare.ray_node import MARKER, Place, end_run, last_words, serve

STORE_BYTES = 256 << 20
"""Ray's shared memory for objects on this machine: a tokenizer and short messages go through it."""

CONNECT_SECONDS = 10.0
"""How long to wait for the head of a cluster."""

AHEAD = 2
"""Tasks given to Ray for each core, so that none waits, and a cluster that can grow sees that there is more."""


@final
class RayTasks:
    """The crew of Ray tasks, each with one core.

    Args:
        state: What every task needs; put into Ray's memory when the first task starts.
        work: Folder for markers, inside the output.
        limit: Tasks given to Ray at once; None: some more than the cluster has cores.

    Raises:
        MissingExtraError: Ray is not installed.
        PenstockError: The cluster cannot be reached.
    """

    def __init__(self, state: Any, work: Path, limit: int | None) -> None:
        ray = import_ray()
        self._ray, self._limit, self._state = ray, limit, state
        self._shared: Any = None
        self._running: dict[Any, tuple[int, str]] = {}
        self._place = Place(
            marker=work.absolute() / f"{MARKER}{uuid.uuid4().hex}",
            folder=os.getcwd(),
            paths=tuple(os.path.abspath(path) for path in sys.path),
            version=version("penstock"),
        )
        self._place.marker.touch()
        self._ours = not ray.is_initialized()
        if self._ours:
            _connect(ray, limit)
        self._task = ray.remote(num_cpus=1, num_returns="streaming")(serve)

    def has_room(self) -> bool:
        """Whether another task may be given to Ray."""
        limit = self._limit or AHEAD * max(int(self._ray.cluster_resources().get("CPU", 0)), 1)
        return len(self._running) < limit

    def start(self, number: int, name: str, function: Function, argument: Any) -> None:
        """Give Ray a task."""
        if self._shared is None:
            self._shared = self._ray.put(self._state)
        stream = self._task.options(name=name).remote(
            self._place, [self._shared], pickle.dumps((name, function, argument))
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
                words = f"{name}: Ray could not finish it: {last_words(error)}; run it again: finished parts are kept"
                kind, value = "failed", PenstockError(words)
            if kind != "report":
                del self._running[stream]
            yield number, kind, value

    def renew(self) -> None:
        """Give the tasks that follow the state as it is then."""
        self._shared = None

    def close(self) -> None:
        """End what still runs, and wait until it has let go of the folder; leave the cluster if we joined it."""
        for stream in self._running:
            self._ray.cancel(stream, force=True)
        self._running = {}
        if self._ours:
            self._ray.shutdown()
        with contextlib.suppress(OutputError):  # then the marker stays, and the next run waits for it
            end_run(self._place.marker)


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
