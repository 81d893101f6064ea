"""Starts one program, watches it, and says what became of it.

The watcher keeps little of what the program writes, looks at the memory of all its processes every 50 ms, and kills
the lot when time or memory is up. When `run` returns, no process, folder or descriptor of it is left.
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
from dataclasses import dataclass, field
from typing import final

from penstock.evaluation.sandbox.limits import Limits, Outcome, Verdict

_LOOK_EVERY = 0.05
_READ = 1 << 18
_REPORT_BYTES = 4096
_SECRET_BYTES = 32  # the runner knows it too
_SECONDS_TO_DIE = 5.0
_PAGE = os.sysconf("SC_PAGE_SIZE")

Process = subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a program's interpreter is started."""

    command: Callable[[Sequence[str]], Sequence[str]]
    """The command line, given the runner's arguments."""
    user: int = -1
    """The user that the runner becomes, an even number; a solution becomes the next one. −1: none."""
    processes: int
    """The limit on processes that the runner sets; −1: none."""
    paths: Sequence[str] = ()
    """Folders that the runner adds to `sys.path`."""
    environment: Mapping[str, str]
    descriptors: Sequence[int] = ()
    """Descriptors that the command needs."""
    folder: str | None = None
    """The working directory of the command."""
    kill: Callable[[Process], None] = subprocess.Popen.kill
    """Ends the program and all its processes."""


def run(start: Start, program: str, solution: str | None, limits: Limits) -> Outcome:
    """Run one program, and the solution that it calls, to its end or to the end of its limits."""
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
    """The runner's arguments, in the order that it documents."""
    numbers = (
        *(channel, start.user, limits.cpu_seconds, limits.memory_bytes, start.processes),
        *(limits.disk_bytes, limits.files, *sizes),
    )
    return [*map(str, numbers), *start.paths]


def _send(channel: socket.socket, data: bytes, seconds: float) -> None:
    """Send the sources and the secret; a runner that is gone is found by the watch."""
    channel.settimeout(seconds)
    with suppress(OSError):
        channel.sendall(data)


@final
@dataclass(slots=True)
class _Watch:
    """What is seen of a running program."""

    limits: Limits
    begun: float
    kill: Callable[[], None]
    report: bytearray = field(default_factory=bytearray)
    output: bytearray = field(default_factory=bytearray)
    stopped: tuple[Verdict, str] | None = None

    def see(self, process: Process, channel: socket.socket) -> "_Watch":
        """Read until all processes of the program are gone; end them where they go too far."""
        assert process.stdout is not None
        handle = os.pidfd_open(process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ, (self.output, self.limits.output_bytes))
                selector.register(channel, selectors.EVENT_READ, (self.report, _REPORT_BYTES))
                selector.register(handle, selectors.EVENT_READ, None)
                self._loop(selector, process.pid)
        finally:
            os.close(handle)
        return self

    def _loop(self, selector: selectors.BaseSelector, pid: int) -> None:
        deadline, look, ending = self.begun + self.limits.wall_seconds, self.begun + _LOOK_EVERY, False
        while selector.get_map():
            now = time.monotonic()
            if not ending:
                if now >= deadline:
                    self.stopped = ("timeout", f"more than {self.limits.wall_seconds:g} s by the clock")
                elif now >= look:
                    look = now + _LOOK_EVERY
                    if _resident_bytes(pid) > self.limits.memory_bytes:
                        self.stopped = ("memory", f"more than {self.limits.memory_bytes} bytes in use")
                if self.stopped is not None:
                    ending, deadline = True, now + _SECONDS_TO_DIE
                    self.kill()
            elif now >= deadline:
                return  # something that outlived its sandbox holds the pipe: only without a sandbox
            for key, _ in selector.select(max((deadline if ending else min(deadline, look)) - now, 0.0)):
                if key.data is not None:
                    _take(selector, key)
                    continue
                selector.unregister(key.fileobj)
                if not ending:  # the first process has ended; what it left behind ends with it
                    ending, deadline = True, now + _SECONDS_TO_DIE
                    self.kill()


def _take(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """Read what has come on one descriptor; keep as much as there is room for."""
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
    """Memory in use by a process and all below it; pages that they share are counted once each."""
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
            continue  # gone meanwhile
    return total


def _judge(seen: _Watch, secret: bytes, status: int) -> tuple[Verdict, str]:
    """Verdict and detail; `status` is above 128 or below 0 for a signal."""
    if seen.stopped is not None:
        return seen.stopped
    kind, words = bytes(seen.report[:1]), bytes(seen.report[1:])
    if kind == b"P" and words == secret:
        return "passed", ""
    if kind == b"M":
        return "memory", "MemoryError"
    if kind == b"F":
        return "failed", words.decode("utf-8", "replace")
    number = -status if status < 0 else status - 128
    if number == signal.SIGXCPU:
        return "timeout", "more CPU time than is allowed"
    if number in set(signal.Signals):
        return "crashed", signal.Signals(number).name
    return "failed", f"it ended itself with status {status} before its end was reached"
