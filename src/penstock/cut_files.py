"""Says which file was cut while it was in use: the system ends a process that reads a mapping past its file's end.

The signal for that, SIGBUS, cannot be turned into an exception, so the process still ends by it; but first it says what
happened. Nothing is watched meanwhile: a fault costs a look at the size of every mapped file, and all else nothing.
"""

import ctypes
import faulthandler
import os
import signal
import weakref
from pathlib import Path
from typing import Any, Protocol


class MappedFile(Protocol):
    """A file that is mapped."""

    path: Path
    size: int
    """Bytes that are mapped."""


mapped: "weakref.WeakSet[MappedFile]" = weakref.WeakSet()
"""All files that are mapped now; whoever maps one adds it."""
_installed: list[Any] = []
"""Keeps the handler alive."""


def explain_cut_files() -> None:
    """Make this process say on standard error which mapped file was cut, before it ends by SIGBUS.

    Switches Python's `faulthandler` on, which then shows where each thread was. The command line calls this; a program
    of your own may.
    """
    if _installed or not hasattr(signal, "SIGBUS"):
        return
    faulthandler.enable(file=2)
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)

    def explain(number: int) -> None:
        # Runs in the thread that read the mapping, at that very instruction: in a kernel or in NumPy, never while
        # memory is allocated. So Python may run here. The handler from before gets the signal again afterwards.
        try:
            for line in cut_files():
                os.write(2, f"penstock: {line}\n".encode("utf-8", "backslashreplace"))
        finally:
            libc.signal(number, before)
            getattr(libc, "raise")(number)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(explain)
    before = libc.signal(signal.SIGBUS, ctypes.cast(handler, ctypes.c_void_p))
    _installed.append(handler)


def cut_files() -> list[str]:
    """What to say of each mapped file that is shorter now than when it was mapped."""
    found = []
    for file in list(mapped):
        try:
            size = os.stat(file.path).st_size
        except OSError:
            continue  # a file that is removed keeps its bytes as long as it is mapped
        if size < file.size:
            found.append(
                f"{file.path}: has {size} bytes, had {file.size} when it was opened: it was cut, or overwritten in "
                "place, while it was in use; restore a copy (`penstock verify` checks a dataset), then start again"
            )
    return found
