"""A sandbox for tests, or a skip that says why there is none."""

import shutil
import subprocess

import pytest

from penstock.core.errors import ConfigError
from penstock.learn.evaluation.sandbox import Limits, Sandbox


def sandbox_or_skip(limits: Limits | None = None, packages: tuple[str, ...] = ()) -> Sandbox:
    """Skips only where bubblewrap is missing or may not make namespaces; a sandbox that does not
    hold is an error.
    """
    try:
        return Sandbox(limits, packages=packages)
    except ConfigError as error:
        bubblewrap = shutil.which("bwrap")
        bare = [
            bubblewrap or "",
            "--unshare-all",
            "--ro-bind",
            "/",
            "/",
            shutil.which("true") or "/bin/true",
        ]
        if bubblewrap and subprocess.run(bare, capture_output=True, check=False).returncode == 0:
            raise
        pytest.skip(str(error))
