"""Processes of this machine that are forked from one that has imported torch.

Each runs a program from its first line, as `python` would, with its own arguments, environment,
folder and outputs; only what takes five to ten seconds, the imports of torch and transformers, is
there already. penstock itself is imported by each. What is tested may not be the start itself, or
which modules are imported.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from makers.processes import child_environment
from patience import PATIENCE_SECONDS


class Forked:
    """`python WORDS` in a folder, with as much of `subprocess.Popen` as tests use.

    Args:
        words: A script, `-m` and a module, or `-c` and code; then its arguments.
        environment: Its whole environment.
        folder: Where it runs.
        outputs: Files for its standard output and standard error.
    """

    def __init__(
        self,
        words: Sequence[Any],
        environment: Mapping[str, str],
        folder: Path,
        outputs: Sequence[Path],
    ) -> None:
        self.args = [str(word) for word in words]
        self._outputs = [str(path) for path in outputs]
        self._process = fork(_become, self.args, dict(environment), str(folder), self._outputs)
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; minus the signal that ended it; None while it runs."""
        code = self._process.exitcode
        return None if code is None else int(code)

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = PATIENCE_SECONDS) -> tuple[str, str]:
        """Wait for its end; standard output and standard error."""
        self._process.join(timeout)
        assert self.returncode is not None, f"it did not end: {self.args}"
        out, err = (
            Path(path).read_text(encoding="utf-8", errors="replace") for path in self._outputs
        )
        return out, err

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.returncode is None:
            self.kill()
            self._process.join()


def fork(function: Callable[..., None], *arguments: Any) -> Any:
    """A started process of `multiprocessing` that calls a function of a module."""
    process = _context().Process(target=function, args=arguments)
    process.start()
    return process


def start_python(*words: Any, folder: Path, env: Mapping[str, str] | None = None) -> Forked:
    """Start `python WORDS` in a folder, where its outputs are kept, too."""
    outputs = [folder / f"forked.{kind}" for kind in ("out", "err")]
    return Forked(words, env or child_environment(), folder, outputs)


def run_python(
    *words: Any,
    check: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run `python WORDS`, as `makers.processes.run_python` does from nothing."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, kind) for kind in ("out", "err")]
        with Forked(words, env or child_environment(), cwd or Path(), outputs) as process:
            out, err = process.communicate()
    assert not check or process.returncode == 0, err
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_code(code: str, *arguments: Any, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run indented Python code in a process of its own."""
    return run_python("-c", textwrap.dedent(code), *arguments, **options)


def run_penstock(*words: Any, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run `penstock` with these words in a process of its own."""
    return run_python("-m", "penstock", *words, **options)


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["makers.preloaded"])
    # It reads them as it starts: torch the number of threads, Python where modules are.
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "PYTHONPATH"):
            patch.setenv(name, child_environment()[name])
        multiprocessing.forkserver.ensure_running()
    return context


def _become(
    words: Sequence[str], environment: Mapping[str, str], folder: str, outputs: Sequence[str]
) -> None:
    """Be `python WORDS` in this folder."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in enumerate(outputs, 1):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[:] = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
