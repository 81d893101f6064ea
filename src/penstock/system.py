"""What operating systems give under different names, or not at all.

penstock runs on Linux and macOS; on Windows, within WSL. What only Linux has is asked for where it is used, and is
either done without or refused with a sentence.
"""

import os
import sys

from penstock.errors import ConfigError


def refuse_windows() -> None:
    """Raise on Windows, where files are mapped, locked and shared among processes in other ways.

    Raises:
        ConfigError: This is Windows.
    """
    if sys.platform == "win32":
        raise ConfigError("penstock runs on Linux and macOS; on Windows, install WSL and run it there")


def usable_processors() -> int:
    """Processors that this process may use, at least one; where the system does not say, all there are."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on macOS
        return os.cpu_count() or 1


def peak_memory_bytes() -> int:
    """The most memory that this process has had so far, in bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
