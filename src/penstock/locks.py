"""One process at a time in a folder, by a lock that the system lets go when its holders end, however they end."""

import os
import time
from contextlib import suppress
from pathlib import Path

from penstock.errors import OutputError
from penstock.system import refuse_windows

refuse_windows()
import fcntl  # noqa: E402  (not on Windows)

LOCK_SECONDS = 3.0
"""How long to wait for what is left of a killed process to end."""


def lock_folder(folder: Path, file: Path, *, doing: str) -> int:
    """Lock a folder by a file in it, which is made where it is missing.

    Args:
        folder: To lock.
        file: The lock's; it keeps the number of the process that took it last.
        doing: What holders do to the folder, for whoever comes second: "preparing".

    Returns:
        A descriptor: the folder is locked until it and all copies of it are closed. A file system without locks gives
        one that locks nothing.

    Raises:
        OutputError: Another process holds it, or the file cannot be made.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OutputError(f"{file}: cannot write: {error.strerror}; choose another folder") from error
        if _take(lock) and _is_there(lock, file):
            break
        message = _held(folder, lock, doing)
        os.close(lock)
        if time.monotonic() > deadline:
            raise OutputError(message)
        time.sleep(0.05)
    with suppress(OSError):
        # The number is for people; a full disk has no room for it.
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _take(lock: int) -> bool:
    """Lock an open file; whether nobody else holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # Some network file systems are mounted without locks; to refuse to work there would help nobody.
        return True
    return True


def _is_there(lock: int, file: Path) -> bool:
    """Whether the file that is locked still has its name: whoever held it before may have removed it at the end."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(file))
    except FileNotFoundError:
        return False


def check_unlocked(folder: Path, file: Path, *, doing: str) -> None:
    """Refuse what `lock_folder` would refuse, and write nothing.

    Raises:
        OutputError: Another process holds the lock.
    """
    try:
        lock = os.open(file, os.O_RDONLY)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(_held(folder, lock, doing)) from None
    except OSError:
        # Mounted without locks.
        pass
    finally:
        os.close(lock)


def _held(folder: Path, lock: int, doing: str) -> str:
    holder = os.pread(lock, 64, 0).decode(errors="replace").strip() or "unknown"
    return f"{folder}: process {holder} is {doing} into it; wait for it, or choose another folder"
