"""Runs programs that a model wrote, each in a sandbox of its own, several at once.

What holds a program: bubblewrap (`bubblewrap.py`: namespaces, an empty read-only root, no network, none of the host's
files, a throw-away folder), limits set inside it as a user that is not root (`runner.py`), a seccomp filter
(`seccomp.py`), and a watch from outside over time, memory and output (`running.py`). Defects of the kernel are what is
left: run strangers' models in a virtual machine.

What a verdict is worth: `passed` is reported with a secret that the program's code finds in no variable, file or
environment, and that is sent only when the program came to its end without an exception. So leaving early (`sys.exit`,
`os._exit`, a signal), printing, or writing to the runner's socket does not pass.

Code under test is given as `solution`: it has a process of its own, which never holds the tests, what they expect, or
the secret. The tests call its functions over a pipe and read the answers as plain values (`calls.py`, `values.py`). So
the code cannot look at the tests, replace what they use, jump over them, or answer with objects that equal everything;
`ptrace` and the like are filtered, and there is no `/proc`. Without a sandbox (`unsafe`) it could reach the tests'
memory through `/proc`.

Cost: about 30 ms a program beyond its own time.
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

from penstock.errors import ConfigError
from penstock.evaluation.sandbox.bubblewrap import ENVIRONMENT, PACKAGES, Enclosure, binds, package_folders
from penstock.evaluation.sandbox.limits import Limits, Outcome
from penstock.evaluation.sandbox.running import Process, Start, run
from penstock.evaluation.sandbox.seccomp import seccomp_filter
from penstock.system import usable_processors

_RUNNER = "\n\n".join(
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("values.py", "calls.py", "runner.py")
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
"""Ends without an error where a sandbox holds what it must."""


@final
class Sandbox:
    """Runs programs. Safe to share among threads.

    Args:
        limits: What each program may use.
        packages: Installed packages that programs may import besides the standard library.
        unsafe: Where no sandbox works, run programs as plain processes of this user, with limits alone: they can read
            and write this user's files and use the network. A warning says so.

    Raises:
        ConfigError: No sandbox works here, and `unsafe` was not asked for; the message says what was tried. Or this is
            not Linux.
    """

    def __init__(
        self, limits: Limits | None = None, *, packages: Sequence[str] = ("numpy",), unsafe: bool = False
    ) -> None:
        if sys.platform != "linux":
            raise ConfigError("code that a model wrote runs on Linux only: run these tasks there, or in a container")
        self.limits = limits or Limits()
        self._packages = tuple(packages)
        self._enclosure, reason = working_enclosure(self._packages)
        if self._enclosure is not None:
            return
        cure = "install bubblewrap (Debian: apt-get install bubblewrap) where this user may make namespaces"
        if not unsafe:
            raise ConfigError(
                f"code that a model wrote runs only in a sandbox, and none works here: {reason}; {cure}, "
                "or ask for `unsafe` on a machine that you can lose"
            )
        warnings.warn(
            f"code that a model wrote runs WITHOUT a sandbox, with your rights: {reason}; {cure}", stacklevel=2
        )

    @property
    def is_safe(self) -> bool:
        """Whether programs are enclosed; False only where `unsafe` was asked for and no sandbox works."""
        return self._enclosure is not None

    def run(self, program: str, solution: str | None = None) -> Outcome:
        """Run one Python program to its end, or to the end of its limits.

        Args:
            program: The program.
            solution: Code that the program tests. It runs in a process of its own, with the same limits; the program
                calls its functions as `function_of_solution(name)(…)`. None: there is none.
        """
        if self._enclosure is None:
            return _run_openly(program, solution, self.limits, self._packages)
        return _run_enclosed(self._enclosure, program, solution, self.limits)

    def run_all(
        self, programs: Sequence[str], solutions: Sequence[str] | None = None, *, workers: int | None = None
    ) -> Iterator[Outcome]:
        """Run programs, several at once; their outcomes in order.

        Args:
            programs: What to run.
            solutions: The code that each of them tests; None: none tests any.
            workers: How many run at once; by default as many as this process may use cores.
        """
        with ThreadPoolExecutor(workers or usable_processors()) as pool:
            try:
                yield from pool.map(self.run, programs, solutions or [None] * len(programs))
            finally:
                pool.shutdown(cancel_futures=True)


@cache
def working_enclosure(packages: tuple[str, ...]) -> tuple[Enclosure | None, str]:
    """The way to enclose programs that holds on this machine, or None and what is wrong."""
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        return None, "there is no bwrap on the path"
    reasons, places = [], binds(packages)
    for way in ("drop", "namespace") if os.geteuid() == 0 else ("namespace",):
        enclosure = Enclosure(bubblewrap=bubblewrap, way=way, binds=places)
        probed = _run_enclosed(enclosure, _PROBE, None, _PROBE_LIMITS)
        if probed.passed:
            return enclosure, ""
        words = " ".join(f"{probed.detail} {probed.output}".split())
        reasons.append(f"bwrap, way {way!r}: {words}")
    return None, "; ".join(reasons)


def _run_enclosed(enclosure: Enclosure, program: str, solution: str | None, limits: Limits) -> Outcome:
    rules = os.memfd_create("penstock-seccomp")  # bubblewrap reads it to its end, so each program needs its own
    try:
        os.write(rules, seccomp_filter())
        os.lseek(rules, 0, os.SEEK_SET)
        start = Start(
            command=lambda arguments: enclosure.command(
                disk_bytes=limits.disk_bytes, filter_descriptor=rules, program=(*_INTERPRETER, *arguments)
            ),
            user=enclosure.user(),
            # In a user namespace bubblewrap's own process there is counted too, and that of the tests.
            processes=limits.processes + (enclosure.way == "namespace") * (1 if solution is None else 2),
            paths=(PACKAGES,),
            environment=ENVIRONMENT,
            descriptors=(rules,),
        )
        return run(start, program, solution, limits)
    finally:
        os.close(rules)


def _run_openly(program: str, solution: str | None, limits: Limits, packages: tuple[str, ...]) -> Outcome:
    """Run a program with no sandbox: limits, a folder of its own, and an end of its process group."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        start = Start(
            command=lambda arguments: (sys.executable, *_INTERPRETER, *arguments),
            processes=-1,  # it counts all processes of the user, and would fail good programs
            paths=sorted({str(path.parent) for name in packages for path in package_folders(name)}),
            environment={**ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
            folder=folder,
            kill=_kill_group,
        )
        return run(start, program, solution, limits)


def _kill_group(process: Process) -> None:
    if process.returncode is None:  # not waited for yet, so its number is still its own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
