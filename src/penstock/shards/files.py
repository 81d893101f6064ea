"""Files of a dataset: mapped without holding them open, written whole or not at all, checked.

A mapping keeps no file descriptor, so a dataset of thousands of shards opens under the usual limit of 1,024 files.
"""

import ctypes
import errno
import json
import math
import mmap
import os
import shutil
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.compiled import address_of
from penstock.cut_files import mapped
from penstock.errors import CorruptionError, OutputError
from penstock.locations import local_path
from penstock.shards import _kernels as k

Array = np.ndarray[Any, np.dtype[Any]]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


@final
class Mapping:
    """The bytes of a file, read-only; `numpy.asarray` of it is uint8 [size] and keeps it mapped.

    Args:
        path: The file; an empty one is a mapping of no bytes.

    Raises:
        OSError: It cannot be opened, or is no regular file: opening a pipe would wait for somebody to write to it.
    """

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            self.path, self.size, self._address = path, status.st_size, 0
            if self.size:
                found = _libc.mmap(None, self.size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
                if found is None or found == _FAILED:
                    raise OSError(ctypes.get_errno(), f"cannot map {path}")
                self._address = found
                weakref.finalize(self, _libc.munmap, found, self.size)
        finally:
            os.close(handle)
        mapped.add(self)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self._address, True)}


def map_file(path: Path) -> Array:
    """Bytes of a file as uint8 [size], read-only; the file stays mapped as long as an array on it lives."""
    found = Mapping(path)
    return np.asarray(found) if found.size else np.empty(0, np.uint8)


def map_numbers(path: Path, dtype: str, shape: tuple[int, ...]) -> Array:
    """Map a file of plain little-endian numbers.

    Raises:
        CorruptionError: The file's size is not that of `shape`, or it is no regular file.
    """
    due = math.prod(shape) * np.dtype(dtype).itemsize
    check_size(path, due)
    data = map_file(path)
    if len(data) != due:
        raise _wrong_size(path, len(data), due)
    return data.view(dtype).reshape(shape)


def check_size(path: Path, due: int) -> None:
    """Check that a regular file exists and has `due` bytes.

    Raises:
        CorruptionError: It is missing, cut, too long, or a link.
    """
    size = check_regular(path, f"; it should have {due} bytes").st_size
    if size != due:
        raise _wrong_size(path, size, due)


def check_regular(path: Path, expected: str = "") -> os.stat_result:
    """Check that what lies at a path is a regular file: a link may lead out of the folder that a stranger gave.

    Raises:
        CorruptionError: It is missing or something else.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise CorruptionError(f"{path}: the file is missing{expected}; copy it again, or prepare again") from None
    except OSError as error:
        raise CorruptionError(f"{path}: cannot be read: {error.strerror or error}; copy it again") from None
    if not stat.S_ISREG(status.st_mode):
        what = "a link, which may lead outside the folder" if stat.S_ISLNK(status.st_mode) else "no regular file"
        raise CorruptionError(f"{path}: is {what}; copy the dataset with the files themselves (cp -rL)")
    return status


def is_plain_name(name: str) -> bool:
    """Whether a name that a file gave is that of a file in the same folder, and can be printed."""
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name and name.isprintable()


def _wrong_size(path: Path, size: int, due: int) -> CorruptionError:
    return CorruptionError(f"{path}: {size} bytes, should be {due}; copy it again, or prepare again")


def checksum(data: Array) -> int:
    """Checksum of an array's bytes (see `_kernels.bytes_checksum`)."""
    data = np.ascontiguousarray(data)
    return int(k.bytes_checksum(np.uint64(address_of(data)), np.uint64(data.nbytes)))


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Turn a failure to write into an error that says where and what to do."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(
            f"{path}: cannot write: {error.strerror or error}; make room or choose another folder, then run it again: "
            "finished parts are kept"
        ) from error


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Make a folder for output; what was written there is removed again when the writing fails.

    Raises:
        OutputError: It holds something, or cannot be made.
        ConfigError: It is a URL.
    """
    folder = local_path(path, "an output folder")
    with output_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OutputError(f"{folder}: holds something already; choose a new or empty folder")
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
    """Give files that a library wrote the permissions of any new file; safetensors hides its own from other users."""
    for path in paths:
        other = path.with_name(f"{path.name}.mode")
        other.touch()
        path.chmod(other.stat().st_mode)
        other.unlink()


def write_text(path: Path, content: str) -> None:
    """`write_file` of text; what is not UTF-8 (lone surrogates) is written escaped."""
    write_file(path, content.encode("utf-8", "backslashreplace"))


def write_file(path: Path, data: bytes | Array) -> None:
    """Write a file whole: under another name, forced to the disk, then renamed."""
    partial = path.with_name(path.name + ".partial")
    with output_errors(path):
        with open(partial, "wb") as file:
            file.write(data if isinstance(data, bytes) else np.ascontiguousarray(data).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)


def write_json(path: Path, value: Any) -> None:
    """`write_file` of JSON, the same bytes for the same value."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def release_pages(path: Path) -> None:
    """Let the system use a synced file's memory for something else; who reads it next gets it from the disk.

    A hint: what is mapped stays, and a system or file system that does not take it is left alone.
    """
    with suppress(OSError, AttributeError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
