"""Runs programs that a model wrote, each in its own sandbox, several at once.

A program is contained by bubblewrap (`bubblewrap.py`: namespaces, an empty read-only root, no
network, none of the host's files, a temporary folder, a seccomp filter), by limits that are set
inside as a user that is not root (`runner.py`), and by a watch on time, memory and output from
outside (`process.py`). Kernel bugs remain: run untrusted models in a virtual machine.

`passed` is reported with a secret, which the program's code finds in no variable, file or
environment, and which is sent only if the program reached its end without an exception. So leaving
early (`sys.exit`, `os._exit`, a signal), printing, or writing to the runner's socket does not pass.

Code under test is given as `solution`. It has its own process, which never holds the tests, their
expected values, or the secret. The tests call its functions over a pipe and read the answers as
plain values (`calls.py`, `values.py`). So the code cannot read the tests, replace what they use,
skip them, or answer with objects that equal everything; `ptrace` and similar calls are filtered,
and there is no `/proc`. Without a sandbox (`unsafe`) it could reach the tests' memory through
`/proc`.

Cost: about 30 ms per program beyond its own time.
"""

import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import final

from penstock.core.errors import ConfigError
from penstock.core.system import usable_processors
from penstock.learn.evaluation.sandbox.bubblewrap import (
    ENVIRONMENT,
    PACKAGES,
    Enclosure,
    binds,
    package_folders,
    seccomp_filter,
)
from penstock.learn.evaluation.sandbox.process import Limits, Outcome, Process, Start, run

_RUNNER = "\n\n".join(
    Path(__file__).with_name(name).read_text(encoding="utf-8")
    for name in ("values.py", "calls.py", "runner.py")
)
_INTERPRETER = ("-S", "-s", "-P", "-c", _RUNNER)
_PROBE_LIMITS = Limits(processes=8)
_PROBE = """
import os, socket, time
assert os.getuid() != 0 and os.getgid() != 0, "it runs as root"
assert os.listdir("/tmp") == [], "its folder is not its own"
assert not os.path.exists("/proc") and not os.path.exists("/etc"), "it sees the host's files"
open("/tmp/mine", "w").write("mine")
for place in ("/file", "/dev/file", "/python/file", "/python/lib/file"):
    try:
        open(place, "w")
    except OSError:
        continue
    raise SystemExit(place + " can be written to")
try:
    socket.socket(socket.AF_INET)
    raise SystemExit("system calls are not filtered")
except PermissionError:
    pass
for _ in range(16):
    try:
        if os.fork() == 0:
            time.sleep(60)
    except BlockingIOError:
        break
else:
    raise SystemExit("processes are not limited")
"""
"""Ends without an error if the sandbox contains a program as it must."""


@final
class Sandbox:
    """Runs programs. Threads may share it.

    Args:
        limits: Limits of each program.
        packages: Installed packages that programs may import besides the standard library.
        unsafe: If no sandbox works, run programs as plain processes of this user, with limits only:
            they can read and write this user's files and use the network. A warning is given.

    Raises:
        ConfigError: No sandbox works here and `unsafe` is not set (the message says what was
            tried), or this is not Linux.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        packages: Sequence[str] = ("numpy",),
        unsafe: bool = False,
    ) -> None:
        if sys.platform != "linux":
            raise ConfigError(
                "code that a model wrote runs only on Linux; run these tasks there, or in a "
                "container"
            )
        self.limits = limits or Limits()
        self._packages = tuple(packages)
        self._enclosure, reason = working_enclosure(self._packages)
        if self._enclosure is not None:
            return
        cure = (
            "install bubblewrap (Debian: apt-get install bubblewrap) where this user may create "
            "namespaces"
        )
        if not unsafe:
            raise ConfigError(
                "code that a model wrote runs only in a sandbox, but none works here: "
                f"{reason}; {cure}, or set `unsafe` on a machine that you can afford to lose"
            )
        warnings.warn(
            f"code that a model wrote runs WITHOUT a sandbox, with your rights: {reason}; {cure}",
            stacklevel=2,
        )

    @property
    def is_safe(self) -> bool:
        """Whether programs run in a sandbox; False only if `unsafe` is set and no sandbox works."""
        return self._enclosure is not None

    def run(self, program: str, solution: str | None = None) -> Outcome:
        """Run one Python program until it ends or exceeds a limit.

        Args:
            program: The program.
            solution: Code that the program tests. It runs in its own process, with the same limits;
                the program calls its functions as `function_of_solution(name)(…)`. None: there is
                none.
        """
        if self._enclosure is None:
            return _run_openly(program, solution, self.limits, self._packages)
        return _run_enclosed(self._enclosure, program, solution, self.limits)

    def run_all(
        self,
        programs: Sequence[str],
        solutions: Sequence[str] | None = None,
        *,
        workers: int | None = None,
    ) -> Iterator[Outcome]:
        """Run programs, several at once; yields their outcomes in order.

        Args:
            programs: The programs.
            solutions: The code that each program tests; None: there is none.
            workers: Number of programs at once; None: the number of cores that this process may
                use.
        """
        with ThreadPoolExecutor(workers or usable_processors()) as pool:
            try:
                yield from pool.map(self.run, programs, solutions or [None] * len(programs))
            finally:
                pool.shutdown(cancel_futures=True)


@cache
def working_enclosure(packages: tuple[str, ...]) -> tuple[Enclosure | None, str]:
    """An enclosure that passes the probe on this machine, or None and the reason."""
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        return None, "there is no bwrap on the path"
    reasons, places = [], binds(packages)
    for way in ("drop", "namespace") if os.geteuid() == 0 else ("namespace",):
        enclosure = Enclosure(bubblewrap=bubblewrap, way=way, binds=places)
        probed = _run_enclosed(enclosure, _PROBE, None, _PROBE_LIMITS)
        if probed.passed:
            return enclosure, ""
        found = " ".join(f"{probed.detail} {probed.output}".split())
        reasons.append(f"bwrap, way {way!r}: {found}")
    return None, "; ".join(reasons)


def _run_enclosed(
    enclosure: Enclosure, program: str, solution: str | None, limits: Limits
) -> Outcome:
    rules = os.memfd_create(
        "penstock-seccomp"
    )  # bubblewrap reads the file to its end, so each program needs its own
    try:
        os.write(rules, seccomp_filter())
        os.lseek(rules, 0, os.SEEK_SET)
        start = Start(
            command=lambda arguments: enclosure.command(
                disk_bytes=limits.disk_bytes,
                filter_descriptor=rules,
                program=(*_INTERPRETER, *arguments),
            ),
            user=enclosure.user(),
            # In a user namespace, bubblewrap's own process is counted too, and so is that of the
            # tests.
            processes=limits.processes
            + (enclosure.way == "namespace") * (1 if solution is None else 2),
            paths=(PACKAGES,),
            environment=ENVIRONMENT,
            descriptors=(rules,),
        )
        return run(start, program, solution, limits)
    finally:
        os.close(rules)


def _run_openly(
    program: str, solution: str | None, limits: Limits, packages: tuple[str, ...]
) -> Outcome:
    """Run a program without a sandbox: with limits, a temporary folder, and a kill of its process
    group.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        start = Start(
            command=lambda arguments: (sys.executable, *_INTERPRETER, *arguments),
            processes=-1,  # the limit counts all processes of the user, so good programs would fail
            paths=sorted({str(path.parent) for name in packages for path in package_folders(name)}),
            environment={**ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
            folder=folder,
            kill=_kill_group,
        )
        return run(start, program, solution, limits)


def _kill_group(process: Process) -> None:
    if process.returncode is None:  # not yet waited for, so its process id is not reused
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
