"""Other processes, and the command line in this one."""

import os
import socket
import subprocess
import sys
import textwrap
from typing import Any

import typer
from typer.testing import CliRunner

from patience import PATIENCE_SECONDS


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment, its import path and one thread."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets for one of the processes of this machine."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_PORT": port,
    }
    return child_environment(
        MASTER_ADDR="127.0.0.1", **{name: str(value) for name, value in place.items()}
    )


def jax_environment(devices: int) -> dict[str, str]:
    """For a process that finds so many devices on the CPU."""
    return child_environment(
        JAX_PLATFORMS="cpu", XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_python(
    *words: Any, check: bool = False, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run Python with these arguments, in a process that imports what this one can."""
    options = {"env": child_environment(), "timeout": PATIENCE_SECONDS, **options}
    found = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, check=False, **options
    )
    assert not check or found.returncode == 0, found.stderr
    return found


def run_code(code: str, *arguments: Any, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run indented Python code in a process of its own."""
    return run_python("-c", textwrap.dedent(code), *arguments, **options)


def run_penstock(*words: Any, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run `penstock` with these words in a process of its own."""
    return run_python("-m", "penstock", *words, **options)


def call_penstock(*words: Any, app: Any = None, **options: Any) -> Any:
    """Run `penstock`, or one of its apps, in this process; what it raises is raised here, an exit
    is returned.
    """
    from penstock.use.cli import build_app

    line = [str(word) for word in words]
    found = CliRunner().invoke(app or build_app(line), line, **options)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


def app_of(verb: Any) -> typer.Typer:
    """The command of one verb alone."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(verb)
    return app
