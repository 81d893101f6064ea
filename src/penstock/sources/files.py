"""Finds the files that a user means: paths, folders, globs and fsspec URLs, in an order that does not change.

Files come in the order of what was given; inside a folder or glob, sorted by path. Hidden files and folders (a leading
dot) are passed over. Nothing found is an error, and so is a file found twice.
"""

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import pyarrow as pa

from penstock.errors import ConfigError, RecordError
from penstock.sources.remote import RemoteFile, find_remote, read_range

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Extension → the codec that pyarrow knows it by."""

ReadRange = Callable[[int, int], bytes]
"""(first byte, amount) → bytes of a file; fewer only where it ends."""


@final
@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file, and what tells whether it has changed."""

    path: str
    """As the user would write it; a URL when it is remote."""

    size_bytes: int
    stamp: str
    """Modification time, or what the object store has instead (an ETag)."""

    @property
    def is_remote(self) -> bool:
        """Whether fsspec reads it."""
        return "://" in self.path

    @property
    def suffixes(self) -> tuple[str, str]:
        """Extension without compression, and that of the compression: `(".jsonl", ".gz")`."""
        stem, last = os.path.splitext(self.path)
        if last.lower() not in COMPRESSIONS:
            return last.lower(), ""
        return os.path.splitext(stem)[1].lower(), last.lower()

    @property
    def compression(self) -> str | None:
        """Codec, None when it is plain."""
        return COMPRESSIONS.get(self.suffixes[1])

    @property
    def identity(self) -> str:
        """Changes when the file does."""
        return f"{self.path} {self.size_bytes} {self.stamp}"


def find_files(spec: str | os.PathLike[str]) -> list[SourceFile]:
    """All files that one path, folder, glob or URL stands for, sorted.

    Raises:
        RecordError: There is none.
    """
    text = os.fspath(spec)
    found = [SourceFile(*found) for found in find_remote(text)] if "://" in text else _find_local(text)
    if not found:
        raise RecordError(f"{text}: no such file, and no file matches it{_hint(text)}")
    return found


def refuse_twice(files: Iterable[SourceFile]) -> None:
    """Raise when a file is there twice, because its text would silently count double."""
    seen: set[str] = set()
    for file in files:
        key = file.path if file.is_remote else os.path.realpath(file.path)
        if key in seen:
            raise ConfigError(f"{file.path} is given twice; name it once (to train on it more often, raise its share)")
        seen.add(key)


def _hint(text: str) -> str:
    if not any(mark in text for mark in "*/."):
        return "; look for a typing error; if this is a text and not a path, hand over an iterator: iter(texts)"
    return "; quote globs so that the shell leaves them alone, and look for a typing error"


def _find_local(text: str) -> list[SourceFile]:
    path = os.path.expanduser(text)
    if os.path.isdir(path):
        names = _walk(path)
    elif os.path.exists(path):
        names = [path]
    else:
        matches = glob.glob(path, recursive=True)
        names = sorted({name for match in matches for name in (_walk(match) if os.path.isdir(match) else [match])})
    return [local_file(name) for name in names]


def _walk(folder: str) -> list[str]:
    names: list[str] = []
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names.extend(os.path.join(place, name) for name in files if not name.startswith("."))
    return sorted(names)


def local_file(path: str) -> SourceFile:
    """A file on this machine."""
    status = os.stat(path)
    return SourceFile(path, status.st_size, str(status.st_mtime_ns))


def open_random(file: SourceFile, *, ahead: bool = True) -> Any:
    """The file for reading at any place.

    Args:
        file: Local or remote.
        ahead: Of a remote file, read more than is asked for, as suits reading it front to back.
    """
    if file.is_remote:
        return pa.PythonFile(RemoteFile(file.path, ahead=ahead), mode="r")
    return pa.OSFile(file.path, "rb")


@contextmanager
def open_ranges(file: SourceFile) -> Iterator[ReadRange]:
    """Open a file for reading ranges of it; of a remote one each costs a request."""
    if file.is_remote:
        yield partial(read_range, file.path)
        return
    with open(file.path, "rb", buffering=0) as stream:
        descriptor = stream.fileno()
        yield lambda begin, amount: os.pread(descriptor, amount, begin)


@final
class Stream:
    """Decompressed bytes of one file, front to back."""

    def __init__(self, file: SourceFile, raw: Any) -> None:
        self._raw = raw
        self._inner = pa.CompressedInputStream(raw, file.compression) if file.compression else raw
        self._empty = file.compression is not None and file.size_bytes == 0

    def read(self, amount: int | None = None) -> bytes:
        """Up to `amount` bytes; empty at the end.

        Raises:
            OSError: The compressed stream was cut, or is damaged.
        """
        if self._empty:
            raise OSError("it has no bytes at all, and even nothing, compressed, has some")
        data: bytes = self._inner.read(amount)
        return data

    def raw_position(self) -> int:
        """Bytes of the file read so far, compressed as they are."""
        return int(self._raw.tell())


@contextmanager
def open_stream(file: SourceFile) -> Iterator[Stream]:
    """Open a file for reading front to back, decompressing what its extension says is compressed."""
    raw = open_random(file)
    try:
        yield Stream(file, raw)
    finally:
        raw.close()
