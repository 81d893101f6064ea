"""One program in the sandbox: its limits, its start, and its outcome.

While it runs, its output is read and limited, and the memory of all its processes is measured every
50 ms. If it exceeds its time or memory, all its processes are killed. When `run` returns, no
process, folder or descriptor is left.
"""

import os
import secrets
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Literal, final

from penstock.core.errors import ConfigError

Verdict = Literal["passed", "failed", "timeout", "memory", "crashed"]
"""`passed`: ran to its end; `failed`: an exception, or it ended early; `timeout`: wall or CPU time;
`memory`: out of memory; `crashed`: a signal ended it.
"""
_LOOK_EVERY = 0.05
_READ = 1 << 18
_REPORT_BYTES = 4096
_SECRET_BYTES = 32  # the runner has the same number
_SECONDS_TO_DIE = 5.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
Process = subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program."""

    wall_seconds: float = 10.0
    """From the start of its sandbox to its end."""
    cpu_seconds: int = 10
    """CPU time of each of its processes."""
    memory_bytes: int = 1 << 30
    """Address space of each of its processes, and memory in use by all together, measured 20 times
    a second.
    """
    output_bytes: int = 64 << 10
    """Bytes of standard output and error together that are kept; the rest is read and dropped."""
    processes: int = 16
    """Processes and threads at any time, including the first."""
    disk_bytes: int = 16 << 20
    """Size of its temporary folder, which is in memory, and of any file in it. Empty files and
    folders are not counted: the kernel's memory for them, about 1 KB each, is limited only by time.
    """
    files: int = 64
    """File descriptors of each process."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if not getattr(self, limit.name) > 0:
                raise ConfigError(
                    f"sandbox: {limit.name} must be above 0, got {getattr(self, limit.name)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one program ended."""

    verdict: Verdict
    detail: str = ""
    """Why it did not pass: the exception and its line, the signal, the limit. The program may have
    written it.
    """
    output: str = ""
    """Its standard output and error, cut at `Limits.output_bytes`."""
    seconds: float = 0.0
    """From the start of its sandbox to its end."""

    @property
    def passed(self) -> bool:
        """Whether the program ran to its end."""
        return self.verdict == "passed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a program's interpreter is started."""

    command: Callable[[Sequence[str]], Sequence[str]]
    """From the runner's arguments to the command line."""
    user: int = -1
    """The user that the runner becomes, an even number; a solution becomes the next one. −1: no
    change.
    """
    processes: int
    """The limit on processes that the runner sets; −1: none."""
    paths: Sequence[str] = ()
    """Folders that the runner adds to `sys.path`."""
    environment: Mapping[str, str]
    descriptors: Sequence[int] = ()
    """File descriptors that the command inherits."""
    folder: str | None = None
    """The working directory of the command."""
    kill: Callable[[Process], None] = subprocess.Popen.kill
    """Ends the program and all its processes."""


def run(start: Start, program: str, solution: str | None, limits: Limits) -> Outcome:
    """Run one program, and the solution that it calls, until it ends or exceeds a limit."""
    begun, secret = time.monotonic(), secrets.token_bytes(_SECRET_BYTES)
    sources = [text.encode("utf-8", "replace") for text in (solution or "", program)]
    sizes = (-1 if solution is None else len(sources[0]), len(sources[1]))
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                start.command(_arguments(start, limits, theirs.fileno(), sizes)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(*start.descriptors, theirs.fileno()),
                env=dict(start.environment),
                cwd=start.folder,
                start_new_session=True,
            )
        with process:
            try:
                _send(ours, b"".join(sources) + secret, limits.wall_seconds)
                seen = _Watch(limits, begun, lambda: start.kill(process)).see(process, ours)
            finally:
                start.kill(process)
    verdict, detail = _judge(seen, secret, process.returncode)
    return Outcome(
        verdict=verdict,
        detail=detail,
        output=seen.output.decode("utf-8", "replace"),
        seconds=time.monotonic() - begun,
    )


def _arguments(start: Start, limits: Limits, channel: int, sizes: tuple[int, int]) -> list[str]:
    """The runner's arguments, in the order that `runner.py` documents."""
    numbers = (
        *(channel, start.user, limits.cpu_seconds, limits.memory_bytes, start.processes),
        *(limits.disk_bytes, limits.files, *sizes),
    )
    return [*map(str, numbers), *start.paths]


def _send(channel: socket.socket, data: bytes, seconds: float) -> None:
    """Send the sources and the secret; `_Watch` notices a runner that has ended."""
    channel.settimeout(seconds)
    with suppress(OSError):
        channel.sendall(data)


@final
@dataclass(slots=True)
class _Watch:
    """Watches a running program and collects its report and output."""

    limits: Limits
    begun: float
    kill: Callable[[], None]
    report: bytearray = field(default_factory=bytearray)
    output: bytearray = field(default_factory=bytearray)
    stopped: tuple[Verdict, str] | None = None

    def see(self, process: Process, channel: socket.socket) -> "_Watch":
        """Read until all processes of the program have ended; kill them if they exceed a limit."""
        assert process.stdout is not None
        handle = os.pidfd_open(process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(
                    process.stdout, selectors.EVENT_READ, (self.output, self.limits.output_bytes)
                )
                selector.register(channel, selectors.EVENT_READ, (self.report, _REPORT_BYTES))
                selector.register(handle, selectors.EVENT_READ, None)
                self._loop(selector, process.pid)
        finally:
            os.close(handle)
        return self

    def _loop(self, selector: selectors.BaseSelector, pid: int) -> None:
        deadline, look, ending = (
            self.begun + self.limits.wall_seconds,
            self.begun + _LOOK_EVERY,
            False,
        )
        while selector.get_map():
            now = time.monotonic()
            if not ending:
                if now >= deadline:
                    self.stopped = (
                        "timeout",
                        f"more than {self.limits.wall_seconds:g} s of wall time",
                    )
                elif now >= look:
                    look = now + _LOOK_EVERY
                    if _resident_bytes(pid) > self.limits.memory_bytes:
                        self.stopped = (
                            "memory",
                            f"more than {self.limits.memory_bytes} bytes in use",
                        )
                if self.stopped is not None:
                    ending, deadline = True, now + _SECONDS_TO_DIE
                    self.kill()
            elif now >= deadline:
                # A process that survived the kill holds the pipe: only possible without a sandbox.
                return
            for key, _ in selector.select(
                max((deadline if ending else min(deadline, look)) - now, 0.0)
            ):
                if key.data is not None:
                    _take(selector, key)
                    continue
                selector.unregister(key.fileobj)
                if not ending:  # the first process has ended; its other processes are killed
                    ending, deadline = True, now + _SECONDS_TO_DIE
                    self.kill()


def _take(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """Read available bytes from one descriptor; keep them up to its limit."""
    kept, most = key.data
    try:
        data = os.read(key.fd, _READ)
    except ConnectionResetError:
        data = b""
    if data:
        kept += data[: most - len(kept)]
    else:
        selector.unregister(key.fileobj)


def _resident_bytes(pid: int) -> int:
    """Memory in use by a process and its descendants; shared pages are counted in each."""
    total, waiting = 0, [pid]
    while waiting:
        process = waiting.pop()
        try:
            with open(f"/proc/{process}/statm") as file:
                total += int(file.read().split()[1]) * _PAGE
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    waiting += map(int, file.read().split())
        except OSError:
            continue  # ended in the meantime
    return total


def _judge(seen: _Watch, secret: bytes, status: int) -> tuple[Verdict, str]:
    """Verdict and detail; `status` is above 128 or below 0 for a signal."""
    if seen.stopped is not None:
        return seen.stopped
    kind, content = bytes(seen.report[:1]), bytes(seen.report[1:])
    if kind == b"P" and content == secret:
        return "passed", ""
    if kind == b"M":
        return "memory", "MemoryError"
    if kind == b"F":
        return "failed", content.decode("utf-8", "replace")
    number = -status if status < 0 else status - 128
    if number == signal.SIGXCPU:
        return "timeout", "more CPU time than allowed"
    if number in set(signal.Signals):
        return "crashed", signal.Signals(number).name
    return "failed", f"it ended early, with status {status}"
