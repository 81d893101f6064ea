"""Which units of a remote dataset are on this machine, shared by all processes that use the same
cache folder.

A file has a byte for each unit: absent, present, or of an earlier start of the machine, and to be
checked. It is mapped, and changed only under locks. Locks are byte ranges of another file, one byte
for each unit ("open file description" locks): shared while a process wants or reads a unit,
exclusive while one brings it or gives it back. The system releases them when a process ends,
however it ends. Each takes about 2 µs.
"""

import ctypes
import errno
import fcntl
import hashlib
import os
import struct
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, final

import numpy as np

from penstock.core.arrays import Array, UInt32, UInt64
from penstock.core.errors import OutputError, PenstockError
from penstock.core.system import too_many_files
from penstock.data.stores.files import make_way, output_errors

ABSENT, PRESENT, UNSURE = range(3)
"""State of a unit. UNSURE: present before the machine was started again, so its bytes may not have
reached the disk.
"""

_LINUX = sys.platform.startswith("linux")
_SET, _SET_WAITING = (37, 38) if _LINUX else (90, 91)
"""F_OFD_SETLK and F_OFD_SETLKW of Linux and of macOS."""
_HEADER = np.dtype([("used", "<i8"), ("boot", "<u8"), ("begun", "<i8"), ("clock", "<i8")])
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_MAC_PUNCH_HOLE = 99


@final
class UnitRecord:
    """The states, last uses and locks of the units of a cache folder.

    Args:
        folder: Holds the files `units` and `locks`; they are made if they are missing.
        units: Number of units.

    Raises:
        OutputError: They cannot be written, or the file system has no such locks.
    """

    def __init__(self, folder: Path, units: int) -> None:
        self._folder, self._units = folder, units
        path = folder / "units"
        with output_errors(path):
            for file in (path, folder / "locks"):
                make_way(file)
            self._locks = os.open(folder / "locks", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            weakref.finalize(self, os.close, self._locks)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(handle, _HEADER.itemsize + 5 * units)
            finally:
                os.close(handle)
            # A plain view: each index into a memmap makes another memmap, which costs more than the
            # reading.
            data = np.memmap(path, np.uint8, "r+").view(np.ndarray)
        self.header = data[: _HEADER.itemsize].view(_HEADER)
        self.uses: Annotated[UInt32, "units"] = data[_HEADER.itemsize :][: 4 * units].view(
            np.uint32
        )
        """[units] when each was used last; larger is later."""
        self.states: Array = data[_HEADER.itemsize + 4 * units :]
        """uint8 [units]."""

    def join(self, size_of: Any, most: int = 0) -> None:
        """Begin to use the record; the first of several processes corrects what a killed one may
        have left wrong.

        Args:
            size_of: Bytes of a unit (int → int).
            most: Bytes that all units may take; more, or states that there are not, mean that the
                file is damaged.
        """
        alone = self._units + 1
        if self._lock(alone, fcntl.F_WRLCK):
            boot = _boot()
            if int(self.header["boot"][0]) != boot:
                self.states[self.states == PRESENT] = UNSURE
            is_damaged = not 0 <= self.used <= most or bool((self.states > UNSURE).any())
            if is_damaged:
                self.states[self.states > ABSENT] = UNSURE
            if self.header["begun"][0] or is_damaged:
                self.header["used"] = sum(map(size_of, np.flatnonzero(self.states).tolist()))
            self.header["begun"], self.header["boot"] = 0, boot
        self._lock(alone, fcntl.F_RDLCK, wait=True)

    @property
    def used(self) -> int:
        """Bytes of all units that are present, or on their way."""
        return int(self.header["used"][0])

    def account(self, size: int, begun: int = 0, limit: int | None = None) -> bool:
        """Add to `used`, and to the number of units that are being brought. One thread of a process
        at a time.

        Args:
            size: Bytes.
            begun: Units.
            limit: Maximum of `used`: if this would exceed it, nothing is added.

        Returns:
            Whether it was added.
        """
        self._lock(self._units, fcntl.F_WRLCK, wait=True)
        fits = limit is None or self.used + size <= limit
        if fits:
            self.header["used"] += size
            self.header["begun"] += begun
        self._lock(self._units, fcntl.F_UNLCK)
        return fits

    def touch(self, units: Array) -> None:
        """Note that units were used now."""
        clock = int(self.header["clock"][0]) + 1
        self.header["clock"] = clock
        self.uses[units] = clock & 0xFFFFFFFF

    def share(self, unit: int) -> None:
        """Lock a unit with others; waits while another process brings it or gives it back."""
        self._lock(unit, fcntl.F_RDLCK, wait=True)

    def own(self, unit: int) -> bool:
        """Lock a unit alone, at once; whether that was possible."""
        return self._lock(unit, fcntl.F_WRLCK)

    def own_all(self, begin: int, end: int) -> bool:
        """Lock units [begin, end) alone, at once and in one call; whether that was possible."""
        return self._lock(begin, fcntl.F_WRLCK, count=end - begin)

    def free(self, unit: int) -> None:
        """Unlock a unit."""
        self._lock(unit, fcntl.F_UNLCK)

    def share_now(self, unit: int) -> bool:
        """Lock a unit with others, at once; whether that was possible."""
        return self._lock(unit, fcntl.F_RDLCK)

    def share_all(self, begin: int, end: int) -> bool:
        """Lock units [begin, end) with others, at once and in one call; whether that was
        possible.
        """
        return self._lock(begin, fcntl.F_RDLCK, count=end - begin)

    def free_all(self, units: Array) -> None:
        """Unlock some units, with a call for each range of them."""
        if len(units):
            for part in np.split(units, np.flatnonzero(np.diff(units) != 1) + 1):
                self._lock(int(part[0]), fcntl.F_UNLCK, count=len(part))

    def _lock(self, at: int, kind: int, wait: bool = False, count: int = 1) -> bool:
        if _LINUX:
            request = struct.pack("hhqqi4x", kind, os.SEEK_SET, at, count, 0)
        else:
            request = struct.pack("qqihh", at, count, 0, kind, os.SEEK_SET)
        try:
            fcntl.fcntl(self._locks, _SET_WAITING if wait else _SET, request)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise OutputError(
                f"{self._folder}: cannot be locked: {error.strerror}; put the cache of remote "
                "datasets on a local disk (PENSTOCK_CACHE)"
            ) from error
        return True


def map_sums(folder: Path, units: int) -> Annotated[UInt64, "units"]:
    """[units] checksums of units as they were fetched, shared by all processes; 0: none. The file
    is sparse.

    Raises:
        OutputError: It cannot be written.
    """
    path = folder / "sums"
    if not units:
        return np.empty(0, np.uint64)
    with output_errors(path):
        make_way(path)
        with open(path, "ab") as file:
            file.truncate(8 * units)
        return np.memmap(path, np.uint64, "r+", shape=(units,)).view(np.ndarray)


def _boot() -> int:
    """A number that changes when the machine is started again; 0 where the system does not say."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return 0
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


@contextmanager
def cache_errors(url: str, folder: Path) -> Iterator[None]:
    """Tell what to do where a file of the cache of a dataset cannot be written.

    Raises:
        OutputError: Names the dataset's URL, and the folder.
    """
    try:
        yield
    except (OSError, OutputError) as error:
        cause = error.__cause__ if isinstance(error, OutputError) else error
        if not isinstance(cause, OSError) or isinstance(cause, PenstockError):
            raise
        what, cure = cache_cure(cause, folder)
        raise OutputError(
            f"{url}: its cache in {folder} cannot be written: {what}; {cure}"
        ) from cause


def cache_cure(error: OSError, folder: Path) -> tuple[str, str]:
    """What is wrong with a cache, and what to do."""
    what, other = (
        error.strerror or str(error),
        "another folder (cache=, or the environment's PENSTOCK_CACHE)",
    )
    if cure := too_many_files(error):
        return what, cure
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full", f"make room, set cache_bytes, or choose {other}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{what}{_owned(folder)}", f"choose {other}"
    if error.errno in (errno.ENOENT, errno.ESTALE):
        return (
            "a file of it was removed while it was in use",
            "run it again: what is missing is fetched again",
        )
    return what, f"make room, set cache_bytes, or choose {other}"


def _owned(folder: Path) -> str:
    """Whose a folder is, if it is another user's."""
    there = next((one for one in (folder, *folder.parents) if one.exists()), None)
    if there is None or there.stat().st_uid == os.geteuid():
        return ""
    try:
        return f" ({there} is owned by {there.owner()})"
    except (KeyError, OSError):
        return f" ({there} is owned by user {there.stat().st_uid})"


def write_at(handle: int, begin: int, data: Any) -> None:
    """Write bytes from byte `begin` of an open file on."""
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, begin)
        view, begin = view[written:], begin + written


def punch(path: str | os.PathLike[str], begin: int, end: int) -> bool:
    """Give back the disk space of bytes [begin, end) of a file, which read as zeros from then on.

    Returns:
        Whether the system and the file system do that.
    """
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if _LINUX:
            return _fallocate(handle, begin, end - begin)
        fcntl.fcntl(handle, _MAC_PUNCH_HOLE, struct.pack("IIqq", 0, 0, begin, end - begin))
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY):
            return False
        raise
    finally:
        os.close(handle)
    return True


def _fallocate(handle: int, begin: int, size: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(handle, _PUNCH_HOLE | _KEEP_SIZE, begin, size) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code))
