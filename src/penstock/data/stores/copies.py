"""Keeps local copies of what is read from remote files, so that a preparation requests each byte
once.

Lines are counted before they are read, the encoder is checked on a sample, and several parts need a
Parquet footer: all that would read bytes again. Copies are kept in memory until there is a folder
for them, then in sparse files, which the processes of a preparation share. A lock on each stretch
keeps two of them from requesting the same bytes.

Guarantees: what is read is what the store sent. If the disk cannot hold a copy, the bytes are read
without one.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, final

from penstock.core.urls import url_key
from penstock.data.stores.remote_files import RemoteFile, Unreadable, read_range

GRANULE = 1 << 14
"""Bytes that are copied together."""

AHEAD_BYTES = 4 << 20
"""Bytes of a request where a file is read front to back."""

MOST_AT_ONCE = 64 << 20
"""Most bytes of one read of a copy."""

BEGINNING = 16
"""Granules at the beginning of a file that are never forgotten."""

_ENDINGS = (".data", ".there")

MEMORY_GRANULES = 4096
"""Most granules that are kept in memory."""

_USED: "ContextVar[Copies | None]" = ContextVar("copies", default=None)


class _Store(Protocol):
    """Where the granules of one file are."""

    def present(self, first: int, last: int) -> bytes:
        """For each granule in [first, last), 1 if it is there, else 0."""

    def put(self, first: int, data: bytes) -> None:
        """Keep granules, from number `first` on."""

    def get(self, first: int, last: int) -> bytes:
        """Granules [first, last), which are there."""


@final
class _Memory:
    def __init__(self, granules: dict[int, bytes]) -> None:
        self.granules = granules

    def present(self, first: int, last: int) -> bytes:
        return bytes(number in self.granules for number in range(first, last))

    def put(self, first: int, data: bytes) -> None:
        for at in range(0, len(data), GRANULE):
            self.granules[first + at // GRANULE] = data[at : at + GRANULE]

    def get(self, first: int, last: int) -> bytes:
        return b"".join(self.granules[number] for number in range(first, last))


@final
class _Disk:
    """A sparse file, and one with a byte for each of its granules."""

    def __init__(self, data: int, there: int) -> None:
        self._data, self.there = data, there

    def present(self, first: int, last: int) -> bytes:
        return os.pread(self.there, last - first, first).ljust(last - first, b"\0")

    def put(self, first: int, data: bytes) -> None:
        if os.pwrite(self._data, data, first * GRANULE) < len(data):
            raise OSError("the disk is full")
        os.pwrite(self.there, b"\1" * -(-len(data) // GRANULE), first)

    def get(self, first: int, last: int) -> bytes:
        return os.pread(self._data, (last - first) * GRANULE, first * GRANULE)


@final
class Copies:
    """Copies of remote files.

    Args:
        folder: Where they are; None: in memory, as far as a few megabytes go.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._memory: dict[str, dict[int, bytes]] = {}

    @contextmanager
    def used(self) -> Iterator["Copies"]:
        """Read remote files through these copies."""
        token = _USED.set(self)
        try:
            yield self
        finally:
            _USED.reset(token)

    def move_to(self, folder: Path) -> None:
        """Keep them in a folder from now on."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for name, granules in self._memory.items():
            with suppress(OSError), self._disk(name) as store:
                for number, data in granules.items():
                    store.put(number, data)
        self._memory.clear()

    def forget(self, name: str) -> None:
        """Give back the disk space of a file's copy, but for its beginning, which shows its
        layout.
        """
        if self._folder is not None:
            for ending, size in zip(_ENDINGS, (BEGINNING * GRANULE, BEGINNING), strict=True):
                with suppress(OSError):
                    os.truncate(self._folder / f"{name}{ending}", size)

    def read(self, file: "Copied", begin: int, amount: int, least: int = 0) -> bytes:
        """Bytes [begin, begin + amount) of a file; requests at least `least` bytes where it
        requests any.

        Raises:
            RecordError: The store cannot be read, or does not support ranges.
            Unreadable: The file has become shorter.
        """
        if amount <= 0:
            return b""
        first, last = begin // GRANULE, -(-(begin + amount) // GRANULE)
        until = min(
            -(-max(begin + least, begin + amount) // GRANULE), -(-file.size_bytes // GRANULE)
        )
        at = begin - first * GRANULE
        with (
            suppress(OSError),
            self._store(file.name) as store,
            self._locked(store, first, max(until, last)),
        ):
            _complete(store, file, first, max(until, last))
            if len(data := store.get(first, last)[at : at + amount]) == amount:
                return data
        return read_range(file.url, begin, amount)

    @contextmanager
    def _store(self, name: str) -> Iterator[_Store]:
        if self._folder is not None:
            with self._disk(name) as store:
                yield store
            return
        kept = self._memory.setdefault(name, {})
        yield _Memory(kept)
        if sum(map(len, self._memory.values())) > MEMORY_GRANULES:
            self._memory.clear()

    @contextmanager
    def _disk(self, name: str) -> Iterator[_Disk]:
        assert self._folder is not None
        flags = os.O_RDWR | os.O_CREAT
        with ExitStack() as stack:
            opened = [
                os.open(self._folder / f"{name}{ending}", flags, 0o600) for ending in _ENDINGS
            ]
            for descriptor in opened:
                stack.callback(os.close, descriptor)
            yield _Disk(*opened)

    @contextmanager
    def _locked(self, store: _Store, first: int, last: int) -> Iterator[None]:
        """Keep other processes from requesting granules [first, last); closing the file unlocks
        them.
        """
        if isinstance(store, _Disk):
            with suppress(
                OSError
            ):  # a file system without locks: at worst bytes are requested twice
                fcntl.lockf(store.there, fcntl.LOCK_EX, last - first, first)
        yield


def _complete(store: _Store, file: "Copied", first: int, last: int) -> None:
    """Request those of granules [first, last) that are missing, with one request for each run of
    them.
    """
    present = store.present(first, last)
    at = present.find(0)
    while at >= 0:
        end = present.find(1, at)
        end = len(present) if end < 0 else end
        begin = (first + at) * GRANULE
        store.put(
            first + at,
            read_range(file.url, begin, min((first + end) * GRANULE, file.size_bytes) - begin),
        )
        at = present.find(0, end)


@final
@dataclass(frozen=True, slots=True)
class Copied:
    """A remote file that is read through copies."""

    url: str = field(repr=False)
    """The full URL."""
    size_bytes: int
    version: str
    copies: Copies

    @property
    def name(self) -> str:
        """Name of its copy: another version of the file has another, a URL that was signed again
        has the same.
        """
        return hashlib.blake2b(
            f"{url_key(self.url)}\n{self.version}".encode(), digest_size=16
        ).hexdigest()

    def read(self, begin: int, amount: int) -> bytes:
        """Bytes [begin, begin + amount)."""
        return self.copies.read(self, begin, amount)


def copied(url: str, size_bytes: int, version: str) -> Copied | None:
    """A remote file as it is read through the copies in use; None: there are none."""
    copies = _USED.get()
    return None if copies is None else Copied(url, size_bytes, version, copies)


@final
class CopiedFile:
    """A remote file as a Python file object, read through copies.

    Args:
        file: The file.
        raw: The same without copies, used if the file has become shorter.
        ahead: Read ahead, for reading front to back.
    """

    def __init__(self, file: Copied, raw: RemoteFile, *, ahead: bool) -> None:
        self._file, self._raw, self._least = file, raw, AHEAD_BYTES if ahead else 0
        self._at = 0

    def read(self, amount: int = -1) -> bytes:
        """Read up to `amount` bytes; all that are left if it is negative."""
        left = max(self._file.size_bytes - self._at, 0)
        missing = left if amount < 0 else min(amount, left)
        pieces: list[bytes] = []
        while missing > 0:
            pieces.append(self._piece(min(missing, MOST_AT_ONCE)))
            missing -= len(pieces[-1])
            if not pieces[-1]:
                break
        return b"".join(pieces)

    def _piece(self, amount: int) -> bytes:
        try:
            data = self._file.copies.read(self._file, self._at, amount, self._least)
        except Unreadable:
            self._raw.seek(self._at)
            data = self._raw.read(amount)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a position."""
        self._at = max(offset + (0, self._at, self._file.size_bytes)[whence], 0)
        return self._at

    def tell(self) -> int:
        """The current position."""
        return self._at

    def close(self) -> None:
        """Close it."""
        self._raw.close()

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._raw.closed


def open_copied(file: Copied, *, ahead: bool) -> Any:
    """A file object for Arrow; without copies if the store can only be read front to back."""
    raw = RemoteFile(file.url, ahead=ahead)
    return CopiedFile(file, raw, ahead=ahead) if raw.has_ranges else raw
