"""A crew of Ray tasks: parts are prepared on any node of a cluster.

The cluster is the one that this program is connected to, that of RAY_ADDRESS, or a new one on this
machine. Nodes need the same version of penstock, which each task checks, and the sources. Ray runs
a task again if its node is lost.

Each run puts its own marker into the output's working folder. A task looks for the marker. On a
node that sees it, the task writes to the output, and holds a lock on the marker meanwhile, so that
a later run waits until the tasks of a killed run have ended. The locks are `flock`: they are
released however a process ends, but the shared file system must support them. On any other node,
the task works in a temporary folder and sends its files to this program, which writes them to the
output; a part's record comes last. If the output is a store, its shards go there from any node
(`prepare/stored_shards.py`), so what is sent is small.
"""

import contextlib
import fcntl
import os
import pickle
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Protocol, final, runtime_checkable

from penstock.core.errors import MissingExtraError, OutputError, PenstockError, StoreError
from penstock.core.json_values import JsonObject
from penstock.data.prepare.part_record import WORK
from penstock.data.prepare.pool import Function, Message
from penstock.data.stores.files import output_errors

MARKER = "ray-run-"
"""Prefix of marker files in the working folder; a unique id of the run follows."""

CLOSING_SECONDS = 30.0
"""How long to wait for tasks of a killed or cancelled run to end."""

STORE_BYTES = 256 << 20
"""Ray's shared memory for objects on this machine: a tokenizer and short messages go through it."""

CONNECT_SECONDS = 10.0
"""How long to wait for the head of a cluster."""

CHUNK_BYTES = 8 << 20
"""Bytes of a file that a task sends at once."""

WAITING = 16
"""Messages of a task that may wait to be received; then it waits."""

AHEAD = 2
"""Tasks given to Ray per core, so that no core waits, and an elastic cluster sees that there is
more work.
"""

_fetched: dict[object, object] = {}
"""The last state of this worker process: unpickling a tokenizer takes longer than a small part."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The run that a task belongs to, and its environment on any node."""

    marker: Path
    folder: str
    """The working directory of this program, for relative paths."""

    paths: tuple[str, ...]
    """Where this program imports modules from, for the user's transform."""

    version: str


@runtime_checkable
class Movable(Protocol):
    """State of work that can write somewhere else than into the output."""

    def elsewhere(self, folder: Path) -> object:
        """The state with another folder for what is written."""


@runtime_checkable
class NeedsOutput(Protocol):
    """A task that reads the output, so not every node of a cluster can do it."""

    needs_output: bool


def serve(place: Place, state: list[Any], work: bytes) -> Iterator[tuple[str, Any]]:
    """The task: does the work in a thread, and streams its messages."""
    messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_work, args=(place, state[0], work, messages.put), daemon=True).start()
    kind = "report"
    while kind in ("report", "file"):
        kind, value = messages.get()
        yield kind, value


def _work(place: Place, state: Any, work: bytes, send: Callable[[tuple[str, Any]], None]) -> None:
    last: tuple[str, Any]
    try:
        name = "a task"
        with (
            _hold(place) as sees_output,
            contextlib.chdir(place.folder if os.path.isdir(place.folder) else "."),
        ):
            sys.path += [path for path in place.paths if path not in sys.path]
            name, function, argument = pickle.loads(work)
            last = _do(_fetch(state), function, argument, send, place, sees_output)
    except StoreError as error:
        last = (
            "failed",
            StoreError(f"{error} (on node {_node()})"),
        )  # each has credentials of its own
    except PenstockError as error:
        last = "failed", error
    except BaseException as error:  # any error must be sent: nothing else would report it
        last = "failed", PenstockError(f"{name}: failed on node {_node()}: {last_line(error)}")
    # Only now: Ray may begin the next task in this process at once, and the working folder is the
    # whole process's.
    send(last)


def _do(
    state: Any,
    function: Function,
    argument: Any,
    send: Callable[[tuple[str, Any]], None],
    place: Place,
    sees: bool,
) -> tuple[str, Any]:
    """Do the work, here or in a temporary folder; returns the last message."""

    def report(*figures: object) -> None:
        send(("report", figures))

    if sees:
        return "done", function(state, argument, report)
    if not isinstance(state, Movable):
        raise OutputError(
            f"node {_node()}: does not see {place.marker.parent.parent} of this run; the "
            "output must be on a file system that all nodes share, under the same path, with "
            "one preparation at a time"
        )
    if isinstance(argument, NeedsOutput) and argument.needs_output:
        return "unseen", None
    with tempfile.TemporaryDirectory(prefix="penstock-part-") as folder:
        result = function(state.elsewhere(Path(folder)), argument, report)
        for path in sorted(filter(Path.is_file, Path(folder).rglob("*")), key=_late):
            _send_file(path, str(path.relative_to(folder)), send)
    return "done", result


def _late(path: Path) -> tuple[bool, bool, str]:
    """Order of files: those that mark others as finished come after them."""
    is_mark = path.suffix == ".json"
    return is_mark and path.parent.name == WORK, is_mark, str(path)


def _send_file(path: Path, name: str, send: Callable[[tuple[str, Any]], None]) -> None:
    left = path.stat().st_size
    with open(path, "rb") as file:
        while True:
            data = file.read(CHUNK_BYTES)
            left -= len(data)
            send(("file", (name, data, left == 0)))
            if left == 0:
                return


@final
class Incoming:
    """Writes the files that a task sends; each gets its name when it is complete and on the disk.

    Args:
        output: The preparation's folder.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._file: IO[bytes] | None = None

    def add(self, name: str, data: bytes, is_last: bool) -> None:
        """Write the next bytes of a file."""
        path = self._output / name
        partial = path.with_name(f"{path.name}.partial")
        with output_errors(path):
            if self._file is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(partial, "wb")  # noqa: SIM115  (closed below, or by abandon)
            self._file.write(data)
            if is_last:
                self._file.flush()
                os.fsync(self._file.fileno())
                self.abandon()
                os.replace(partial, path)

    def abandon(self) -> None:
        """Close an incomplete file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _fetch(state: Any) -> Any:
    import ray

    if state not in _fetched:
        _fetched.clear()
        _fetched[state] = ray.get(state)
    return _fetched[state]


@contextlib.contextmanager
def _hold(place: Place) -> Iterator[bool]:
    """Check that this node fits the run, and keep later runs waiting meanwhile; whether it sees the
    output.
    """
    if (found := version("penstock")) != place.version:
        raise PenstockError(
            f"node {_node()}: has penstock {found}, expected: {place.version}, the version "
            "that started the run"
        )
    try:
        marker = os.open(place.marker, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        yield False
        return
    except OSError as error:
        raise OutputError(
            f"node {_node()}: cannot write to {place.marker.parent.parent} "
            f"({error.strerror}); let the user that Ray runs as write there, or unmount it "
            "there: then parts are sent instead"
        ) from None
    try:
        fcntl.flock(marker, fcntl.LOCK_SH)
        if not place.marker.exists():
            raise OutputError(f"node {_node()}: the run of this task has ended")
        yield True
    finally:
        os.close(marker)


def last_line(error: BaseException) -> str:
    """An error on one line; Ray's errors contain tracebacks, which end with the cause."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


def _node() -> str:
    return f"{socket.gethostname()} (process {os.getpid()})"


def end_earlier_runs(work: Path) -> None:
    """Wait until no task of a killed run can write to the folder any more.

    Args:
        work: Folder for markers, inside the output.

    Raises:
        OutputError: Such tasks do not end.
    """
    for marker in work.glob(f"{MARKER}*"):
        end_run(marker)


def end_run(marker: Path) -> None:
    """Remove a marker once no task holds it, so that none can begin."""
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
                        f"{marker.parent.parent}: Ray tasks of an earlier run still write to "
                        "it; stop that job (`ray list tasks` shows it), then run it again"
                    ) from None
                time.sleep(0.05)
        marker.unlink(missing_ok=True)
    finally:
        os.close(handle)


@final
class RayTasks:
    """The crew of Ray tasks, each with one core.

    Args:
        state: What every task needs; put into Ray's memory when the first task starts.
        work: Folder for markers, inside the output.
        limit: Maximum tasks given to Ray at once; None: `AHEAD` per core of the cluster.

    Raises:
        MissingExtraError: Ray is not installed.
        PenstockError: The cluster cannot be reached.
    """

    def __init__(self, state: Any, work: Path, limit: int | None) -> None:
        ray = import_ray()
        self._ray, self._limit, self._state = ray, limit, state
        self._shared: Any = None
        self._running: dict[Any, tuple[int, str, Function, Any]] = {}
        self._incoming: dict[Any, Incoming] = {}
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
        self._task = ray.remote(
            num_cpus=1, num_returns="streaming", _generator_backpressure_num_objects=WAITING
        )(serve)

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
        self._running[stream] = (number, name, function, argument)

    def receive(self) -> Iterator[Message]:
        """The next message of a task."""
        (stream,), _ = self._ray.wait(list(self._running), num_returns=1)
        number, name, function, argument = self._running[stream]
        try:
            kind, value = self._ray.get(next(stream))
            if kind == "file":
                self._incoming.setdefault(stream, Incoming(self._state.output)).add(*value)
                return
            if kind == "unseen":
                # Its node does not have the files that it needs; they are here.
                kind, value = "done", function(self._state, argument, lambda *_: None)
        except self._ray.exceptions.RayError as error:
            text = (
                f"{name}: Ray could not finish it: {last_line(error)}; run it again: finished "
                "parts are kept"
            )
            kind, value = "failed", PenstockError(text)
        except PenstockError as error:
            kind, value = "failed", error
        if kind != "report":
            if (incoming := self._incoming.pop(stream, None)) is not None:
                incoming.abandon()
            with _interrupts_later():
                del self._running[stream], stream
        yield number, kind, value

    def renew(self) -> None:
        """Give later tasks the state at that time."""
        self._shared = None

    def close(self) -> None:
        """Cancel running tasks and wait until they have released the folder; shut Ray down if we
        started it.
        """
        for stream in self._running:
            self._ray.cancel(stream, force=True)
        self._running = {}
        for incoming in self._incoming.values():
            incoming.abandon()
        if self._ours:
            self._ray.shutdown()
        with contextlib.suppress(
            OutputError
        ):  # the marker stays then, and the next run waits for it
            end_run(self._place.marker)


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Hold back Ctrl-C meanwhile: Python ignores one that arrives in a destructor, and Ray's
    streams have one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


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
            f"RAY_ADDRESS is {address}: Ray Client cannot stream messages of tasks; run this "
            "on a node of the cluster, with RAY_ADDRESS=auto (`ray job submit` does both)"
        )
    here: JsonObject = {
        "num_cpus": limit,
        "include_dashboard": False,
        "object_store_memory": STORE_BYTES,
    }
    host, colon, port = address.rpartition(":")
    try:
        if colon and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        # Prints of a transform stay in Ray's logs: they must not mix with our JSON.
        ray.init(
            address,
            log_to_driver=False,
            logging_level="ERROR",
            **(here if address == "local" else {}),
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise PenstockError(
            f"Ray at {address!r} cannot be reached: {error}; set RAY_ADDRESS, or unset it"
        ) from error
