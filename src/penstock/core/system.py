"""Differences between operating systems, and a message about files that are cut while they are
mapped.

penstock runs on Linux and macOS; on Windows, within WSL. Features that only Linux has are looked up
where they are used, and are either not needed or refused with a message.

The system ends a process that reads a mapping past its file's end. The signal, SIGBUS, cannot be
turned into an exception, but before the process ends by it, `explain_cut_files` reports which file
was cut. This costs nothing until a fault occurs; then it checks the size of every mapped file.
"""

import ctypes
import errno
import faulthandler
import gc
import os
import resource
import signal
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Protocol

from penstock.core.errors import ConfigError

USUAL_MAPPINGS = 65_530
"""Mappings that Linux allows a process by default."""

mapped: "weakref.WeakSet[MappedFile]" = weakref.WeakSet()
"""All files that are currently mapped; code that maps a file adds it."""
handlers: list[object] = []
"""The handler that `explain_cut_files` installed, if it has; kept alive here."""


def refuse_windows() -> None:
    """Raise a `ConfigError` on Windows, where files are mapped, locked and shared among processes
    differently.
    """
    if sys.platform == "win32":
        raise ConfigError(
            "penstock runs on Linux and macOS; on Windows, install WSL and run it there"
        )


def usable_processors() -> int:
    """Number of processors that this process may use, at least one; all of them if the system does
    not say.
    """
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on macOS
        return os.cpu_count() or 1


def peak_memory_bytes() -> int:
    """The most memory that this process has had so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def writing_cure(error: OSError, *, otherwise: str = "make room or choose another folder") -> str:
    """What to do where a file or folder could not be written.

    Args:
        error: The reason.
        otherwise: For reasons without a cure of their own.
    """
    if cure := too_many_files(error):
        return cure
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room or choose another folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder that you may write to, or change its permissions"
    return otherwise


def too_many_files(error: BaseException | None) -> str:
    """The cure, if an error or its cause says that too many files are open; empty: it does not."""
    while error is not None:
        code = getattr(error, "errno", None)
        if code in (errno.EMFILE, errno.ENFILE) or "Too many open files" in str(error):
            limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            if code == errno.ENFILE or limit == resource.RLIM_INFINITY:
                return "close files, or raise the system's limit of open files (sysctl fs.file-max)"
            above = (
                f"up to {most:,}"
                if most not in (limit, resource.RLIM_INFINITY)
                else "as root above that"
            )
            return f"raise the limit of open files, which is {limit:,} (ulimit -n, {above})"
        error = error.__cause__ or error.__context__
    return ""


@cache
def mapping_limit() -> int:
    """How many mappings a process may have when this is first asked; the usual number of Linux
    where the system does not say.
    """
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_bytes())
    except (OSError, ValueError):  # not on macOS
        return USUAL_MAPPINGS


def mappings_cure() -> str:
    """Why no more files can be mapped, and what to do."""
    mapping_limit.cache_clear()  # it may have been raised
    limit = mapping_limit()
    return (
        f"the system refuses one more mapping; a process may have {limit:,} "
        f"(vm.max_map_count), and {len(mapped):,} files are mapped here; raise it (sysctl -w "
        f"vm.max_map_count={4 * limit}), or prepare again into fewer shards; if far fewer are "
        "mapped, the limit is that of this process's memory (ulimit -v)"
    )


def limit_cure(error: OSError) -> str:
    """The cure, if a file cannot be read or mapped because of a limit of this machine; empty: that
    is not why.
    """
    return mappings_cure() if error.errno == errno.ENOMEM else too_many_files(error)


class MappedFile(Protocol):
    """A file that is mapped."""

    size: int
    """Bytes that are mapped."""

    @property
    def path(self) -> Path | str:
        """Its place."""


def explain_cut_files(*, traces: bool = True) -> None:
    """Report on standard error which mapped file was cut, before this process ends by SIGBUS.

    Called when the first file is mapped. A handler that another library installed (`faulthandler`,
    PyTorch's workers) gets the signal afterwards, as without this; where the program itself handles
    or ignores SIGBUS, it is left alone.

    Args:
        traces: Also enable Python's `faulthandler`, unless it is, which then shows where each
            thread was. The command line does; your own program may.
    """
    if not hasattr(signal, "SIGBUS"):
        return
    if traces and not faulthandler.is_enabled():
        faulthandler.enable(file=2)
    if handlers or signal.getsignal(signal.SIGBUS) not in (signal.SIG_DFL, None):
        return
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)

    def explain(number: int) -> None:
        # Runs in the thread that read the mapping, at that instruction: in a kernel or in NumPy,
        # never during memory allocation. So Python may run here. The previous handler gets the
        # signal again afterwards.
        try:
            for line in cut_files():
                os.write(2, f"penstock: {line}\n".encode("utf-8", "backslashreplace"))
        finally:
            libc.signal(number, before)
            getattr(libc, "raise")(number)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(explain)
    before = libc.signal(signal.SIGBUS, ctypes.cast(handler, ctypes.c_void_p))
    handlers.append(handler)


def cut_files() -> list[str]:
    """A message about each mapped file that is shorter now than when it was mapped."""
    found = []
    for file in list(mapped):
        try:
            size = os.stat(file.path).st_size
        except OSError:
            continue  # a removed file keeps its bytes as long as it is mapped
        if size < file.size:
            found.append(
                f"{file.path}: has {size} bytes, but had {file.size} when it was opened: it "
                "was cut, or overwritten in place, while it was in use; restore a copy "
                "(`penstock verify` checks a dataset), then start again"
            )
    return found


@contextmanager
def without_collector() -> Iterator[None]:
    """Make many objects, none of which is in a cycle, without Python looking for cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def give_back_memory() -> None:
    """Give memory that was freed back to the system, after much was used for a moment.

    glibc keeps what lies between blocks in use: for a vocabulary of 262,000 tokens, 70 MB. It takes
    10 ms; other systems' allocators have no such call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
