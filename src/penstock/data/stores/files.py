"""Files of this machine: mapped without holding them open, written atomically, checked.

A mapping keeps no file descriptor, so a dataset of thousands of shards opens under the usual limit
of 1,024 files.
"""

import ctypes
import errno
import json
import math
import mmap
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar, final

import numpy as np
from numpy.typing import DTypeLike

from penstock.core.arrays import Array
from penstock.core.compiled import address_of
from penstock.core.errors import ConfigError, CorruptionError, OutputError, PenstockError
from penstock.core.folders import local_path
from penstock.core.json_values import JsonValue
from penstock.core.system import explain_cut_files, handlers, limit_cure, mapped, writing_cure
from penstock.data.stores._kernels import continue_checksum

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
FAILED = ctypes.c_void_p(-1).value
_READING = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC

STRETCH_BYTES = 4 << 20
"""Bytes of a file of which the checksum is made at once; a multiple of the kernel's blocks."""
PIECES_HELD = 64
"""Pieces that are read of a mapped file before its pages are let go."""

T = TypeVar("T")


@final
class Mapping:
    """The bytes of a file, read-only; `numpy.asarray` of it is uint8 [size] and keeps it mapped.

    Args:
        path: The file; an empty one is a mapping of no bytes.
        expected: Its bytes, if it must not be a link either.

    Raises:
        OSError: It cannot be opened, or is not a regular file: opening a pipe would wait for a
            writer.
        CorruptionError: It is not a regular file of the expected bytes.
    """

    def __init__(self, path: Path | str, expected: int | None = None) -> None:
        self._address, self.path = 0, path
        if expected is None:
            handle = os.open(path, _READING)
        else:
            handle, self.size = _open_regular(path, expected)
        try:
            if expected is None:
                status = os.fstat(handle)
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EINVAL, "not a regular file", str(path))
                self.size = status.st_size
            if self.size:
                found = libc.mmap(None, self.size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
                if found is None or found == FAILED:
                    raise OSError(ctypes.get_errno(), "cannot be mapped", str(path))
                self._address = found
        finally:
            os.close(handle)
        if not handlers:
            explain_cut_files(traces=False)
        mapped.add(self)

    def __del__(self, unmap: Callable[[int, int], int] = libc.munmap) -> None:
        # Not `weakref.finalize`, which takes as long as to map a file.
        if self._address:
            unmap(self._address, self.size)

    def let_go(self) -> None:
        """Let the system take the pages back; what is read again comes from its cache, or the
        disk.
        """
        libc.madvise(self._address, self.size, mmap.MADV_DONTNEED)

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.size,),
            "data": (self._address, True),
        }


def map_file(path: Path | str, expected: int | None = None) -> Array:
    """Bytes of a file as uint8 [size], read-only; the file stays mapped as long as an array on it
    exists. Arguments and errors are those of `Mapping`.
    """
    found = Mapping(path, expected)
    return np.asarray(found) if found.size else np.empty(0, np.uint8)


def mapped_at(data: Array) -> int:
    """The address of what `map_file` gave."""
    base: object = data.base
    return base._address if isinstance(base, Mapping) else address_of(data)


def map_numbers(
    path: Path | str, dtype: DTypeLike, shape: tuple[int, ...], *, may_read: bool = False
) -> Array:
    """Map a file of plain little-endian numbers, or of records of such.

    Args:
        path: The file.
        dtype: Of its numbers.
        shape: Of the array.
        may_read: A file of at most a page may be read instead, since it does not change any more: a
            process has a limited number of mappings.

    Raises:
        CorruptionError: The file's size is not that of `shape`, or it is not a regular file.
    """
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if may_read and expected <= mmap.PAGESIZE:
        data: Array = np.frombuffer(_read_bytes(path, expected), np.uint8)
    else:
        data = map_file(path, expected)
    if len(data) != expected:
        raise _wrong_size(path, len(data), expected)
    numbers: Array = data.view(dtype).reshape(shape)
    return numbers


def _open_regular(path: Path | str, expected: int | None) -> tuple[int, int]:
    """A descriptor of a regular file, and its bytes: `expected`, if that is given.

    One look at the open file in place of one at its path before: a folder of a stranger may be
    opened thousands of times.

    Raises:
        OSError: It cannot be opened.
        CorruptionError: It is missing, a link, something else, or has another size.
    """
    try:
        handle = os.open(path, _READING | os.O_NOFOLLOW)
    except OSError:
        if expected is None:
            check_regular(path)
        else:
            check_size(path, expected)
        raise
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or expected not in (None, status.st_size):
        os.close(handle)
        if expected is None:
            check_regular(path)
        else:
            check_size(path, expected)
            raise _wrong_size(path, status.st_size, expected)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return handle, status.st_size


def _read_bytes(path: Path | str, expected: int | None = None) -> bytes:
    """Bytes of a regular file; errors are those of `_open_regular`.

    More or fewer than it has only if it changes meanwhile.
    """
    handle, expected = _open_regular(path, expected)
    try:
        data = os.read(handle, expected + 1)
        # A file system may give less than was asked for.
        while len(data) < expected and (more := os.read(handle, expected + 1 - len(data))):
            data += more
        return data
    finally:
        os.close(handle)


def check_size(path: Path | str, expected: int) -> None:
    """Check that a regular file exists and has `expected` bytes.

    Raises:
        CorruptionError: It is missing, cut, too long, or a link.
    """
    size = check_regular(path, f"; expected {expected} bytes").st_size
    if size != expected:
        raise _wrong_size(path, size, expected)


def check_regular(path: Path | str, expected: str = "") -> os.stat_result:
    """Check that a path is a regular file: a link may lead out of a folder that came from a
    stranger.

    Raises:
        CorruptionError: It is missing or something else.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        raise CorruptionError(
            f"{path}: the file is missing{expected}; copy it again, or prepare again"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        what = (
            "a link, which may lead outside the folder"
            if stat.S_ISLNK(status.st_mode)
            else "not a regular file"
        )
        raise CorruptionError(
            f"{path}: is {what}; copy the dataset with the files themselves (cp -rL)"
        )
    return status


def unreadable(path: Path | str, error: OSError, what: str = "") -> PenstockError:
    """What is wrong where a file cannot be read or mapped: the file, or a limit of this machine."""
    reason = error.strerror or str(error)
    if cure := limit_cure(error):
        return ConfigError(f"{path}: cannot be opened{what}: {reason}; {cure}")
    return CorruptionError(f"{path}: cannot be read: {reason}; copy it again, or prepare again")


def make_way(path: Path) -> None:
    """Remove what is not a plain file from the place of one: a folder, a link, a pipe."""
    if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def is_plain_name(name: str) -> bool:
    """Whether a name found in a file is a printable name of a file in the same folder."""
    return (
        name not in ("", ".", "..") and "/" not in name and "\\" not in name and name.isprintable()
    )


def _wrong_size(path: Path | str, size: int, expected: int) -> CorruptionError:
    return CorruptionError(
        f"{path}: {size} bytes, expected {expected}; copy it again, or prepare again"
    )


def checksum(data: Array) -> int:
    """Checksum of an array's bytes (see `_kernels.bytes_checksum`).

    Of a mapped file, a stretch at a time is in memory.
    """
    data = np.ascontiguousarray(data)
    key, address, size = np.uint64(data.nbytes), address_of(data), data.nbytes
    for begin in range(0, size, STRETCH_BYTES):
        amount = np.uint64(min(STRETCH_BYTES, size - begin))
        key = np.uint64(continue_checksum(key, np.uint64(address + begin), amount))
        _let_go(data)
    return int(key)


def reading(data: Array, pieces: Iterable[T]) -> Iterator[T]:
    """Pieces that are read from a mapped file, front to back; its pages do not stay in memory.

    Args:
        data: The result of `map_file`; pages of another array stay.
        pieces: What is read, such as something of each batch of a shard.
    """
    for number, piece in enumerate(pieces, start=1):
        yield piece
        if number % PIECES_HELD == 0:
            _let_go(data)


def _let_go(data: Array) -> None:
    base: object = data.base
    if isinstance(base, Mapping):
        base.let_go()


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Turn a failure to write into an error with the path and the cure."""
    try:
        yield
    except PenstockError:
        raise
    except OSError as error:
        raise OutputError(
            f"{path}: cannot write: {error.strerror or error}; {writing_cure(error)}, then run it "
            "again: finished parts are kept"
        ) from error


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Make a folder for output; its content is removed again if writing fails.

    Raises:
        OutputError: It is not empty, or cannot be made.
        ConfigError: It is a URL.
    """
    folder = local_path(path, "an output folder")
    with output_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OutputError(f"{folder}: is not empty; choose a new or empty folder")
    try:
        yield folder
    except BaseException:
        for left in folder.iterdir():
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
        raise


def usual_mode(*paths: Path) -> None:
    """Give files written by a library the permissions of a new file; safetensors hides its files
    from other users.
    """
    for path in paths:
        other = path.with_name(f"{path.name}.mode")
        other.touch()
        path.chmod(other.stat().st_mode)
        other.unlink()


def write_text(path: Path, content: str) -> None:
    """`write_file` for text; what UTF-8 cannot encode (lone surrogates) is escaped."""
    write_file(path, content.encode("utf-8", "backslashreplace"))


def write_file(path: Path, data: bytes | Array) -> None:
    """Write a file atomically: under another name, forced to the disk, then renamed."""
    partial = path.with_name(path.name + ".partial")
    with output_errors(path):
        with open(partial, "wb") as file:
            file.write(data if isinstance(data, bytes) else np.ascontiguousarray(data).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)


def write_json(path: Path, value: object) -> None:
    """`write_file` for JSON; the same bytes for the same value."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def sync(path: Path) -> None:
    """Force a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def release_pages(path: Path) -> None:
    """Let the system reuse the cache memory of a synced file; the next reader gets it from the
    disk.

    This is a hint: mapped pages stay, and systems or file systems that do not support it ignore it.
    """
    with suppress(OSError, AttributeError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def read_json(path: Path | str, cure: str = "copy it again, or prepare again") -> JsonValue:
    """The value of a JSON file that must be a regular file.

    Args:
        path: The file.
        cure: What to do if it is damaged, for the message.

    Raises:
        CorruptionError: It is missing, a link, or not JSON.
        ConfigError: A limit of this machine keeps it from being read.
    """
    try:
        return json.loads(_read_bytes(path))
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise CorruptionError(f"{path}: damaged: not JSON: {reason}; {cure}") from None
