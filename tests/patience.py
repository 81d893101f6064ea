"""How tests wait: for events, on a machine of any load."""

import subprocess
import time
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 900
"""For whatever a test waits for. Only what hangs takes this long."""


def wait_for(
    happened: Callable[[], Any],
    process: "subprocess.Popen[Any] | None" = None,
    seconds: float = PATIENCE_SECONDS,
) -> None:
    """Wait until something has happened; `process` must live until then."""
    end = time.monotonic() + seconds
    while not happened():
        assert process is None or process.poll() is None or happened(), (
            f"it ended first: {process.args}"
        )
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)
