"""One file of a source, here or in a store: whether it has changed, and how it is read."""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar, final

import pyarrow as pa

from penstock.core.errors import RecordError
from penstock.core.urls import Address, shown_url
from penstock.data.sources.compression import COMPRESSIONS, RawFile, Reader, Streams, decompressed
from penstock.data.sources.records import Fields
from penstock.data.sources.signatures import HEAD_BYTES, Signature, recognise
from penstock.data.stores.copies import Copied, copied, open_copied
from penstock.data.stores.remote_files import RemoteFile, Unreadable, read_range

T = TypeVar("T")

ReadRange = Callable[[int, int], bytes]
"""(first byte, amount) → bytes of a file; fewer only at its end."""

Extent = tuple["SourceFile", int, int]
"""Bytes [begin, end) of a local file."""

CHECK_BYTES = 4 << 20

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_OPEN_FILES = re.compile(r"/dev/(fd/|std(in|out|err)$)|/proc/[^/]+/fd/")
"""Paths of files that this process has open; its worker processes do not have them."""


@final
@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file, with what shows whether it has changed."""

    path: str
    """As it is stored and shown: what the user would write, or a URL without user info and
    query.
    """

    size_bytes: int
    stamp: str
    """Modification time, or the object store's equivalent (an ETag)."""

    inode: tuple[int, int] | None = None
    """Device and inode number of a local file: the same for all its names."""

    address: Address | None = None
    """The full URL, only to open it; None: `path`."""

    codec: str | None = None
    """Its compression by its first bytes, where its name says something else; empty: none. None: as
    its name says.
    """

    selection: str = ""
    """A hash of the parameters of its URL that may select its content (`penstock.core.urls`);
    empty: there are none.
    """

    @property
    def full(self) -> str:
        """What opens it; it may hold secrets, so it is never text for people or files."""
        return self.path if self.address is None else self.address.full

    @property
    def key(self) -> str:
        """What identifies it: the same for a URL that was signed again."""
        return f"{self.path} [{self.selection}]" if self.selection else self.path

    @property
    def is_remote(self) -> bool:
        """Whether fsspec reads it."""
        return "://" in self.path

    @property
    def suffixes(self) -> tuple[str, str]:
        """Extensions of format and compression: `(".jsonl", ".gz")`."""
        stem, last = os.path.splitext(shown_url(self.full) if self.address else self.path)
        if last.lower() not in COMPRESSIONS:
            return last.lower(), ""
        return os.path.splitext(stem)[1].lower(), last.lower()

    @property
    def compression(self) -> str | None:
        """Codec; None: not compressed."""
        return COMPRESSIONS.get(self.suffixes[1]) if self.codec is None else self.codec or None

    @property
    def version(self) -> str:
        """Size and stamp: changes when the file does."""
        return f"{self.size_bytes} {self.stamp}"


@dataclass(frozen=True, slots=True)
class FilePart:
    """What the parts of a single file have in common."""

    file: SourceFile

    @property
    def sources(self) -> tuple[SourceFile, ...]:
        """The files that it reads."""
        return (self.file,)

    @property
    def files(self) -> tuple[str, ...]:
        """The names that `files` of its blocks points into."""
        return (self.file.path,)

    @property
    def addresses(self) -> tuple[str, ...]:
        """What opens each of `files`; secret."""
        return (self.file.full,)


def refuse_file(path: str, error: OSError) -> NoReturn:
    """Raise a `RecordError` that says why a path cannot be accessed or opened."""
    if error.errno == errno.ELOOP:
        reason = "is a link that leads back to itself; remove it"
    elif isinstance(error, FileNotFoundError) and os.path.islink(path):
        reason = (
            f"is a link to {os.readlink(path)}, which does not exist; remove the link, or put the "
            "file back"
        )
    elif isinstance(error, FileNotFoundError):
        reason = "is gone; put it back or leave it out, then run it again: finished parts are kept"
    elif isinstance(error, PermissionError):
        reason = "may not be read by this user; change its permissions, or leave it out"
    else:
        reason = (
            f"cannot be read: {error.strerror or error}; fix that, then run it again: finished "
            "parts are kept"
        )
    raise RecordError(f"{path}: {reason}") from error


def local_file(path: str) -> SourceFile:
    """A file on this machine.

    Raises:
        RecordError: It is not a regular file, its name is not UTF-8, or it cannot be accessed.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        raise RecordError(
            f"{path!a}: the name is not UTF-8, so no dataset can hold it; rename the file"
        ) from None
    try:
        status = os.stat(path)
    except OSError as error:
        refuse_file(path, error)
    kind = next((words for check, words in _KINDS if check(status.st_mode)), None)
    if _OPEN_FILES.match(path):
        kind = kind or "a file that this process has open"
    if kind is not None:
        raise RecordError(
            f"{path}: is {kind}, which can be read only once and only by this process; write "
            "it to a file first, and name that: a preparation that resumes, or uses several "
            "processes, reads its input again"
        )
    inode = (status.st_dev, status.st_ino) if status.st_ino else None
    return SourceFile(path, status.st_size, str(status.st_mtime_ns), inode)


def read_head(file: SourceFile, amount: int) -> bytes:
    """The first bytes of a file, fewer if it has fewer, or cannot be read, which its reader
    reports.

    Raises:
        RecordError: The file is gone, or may not be read; or its store cannot be read.
    """
    with suppress(Unreadable, OSError):
        if not file.is_remote:
            with open_ranges(file) as read:
                return read(0, min(amount, file.size_bytes))
        with closing(open_random(file, ahead=False)) as raw:
            data: bytes = raw.read(min(amount, file.size_bytes))
            return data
    return b""


def other_content(file: SourceFile) -> str:
    """What a file is that cannot be read as what its name says, for the end of a message; empty:
    nobody knows.
    """
    found = recognise(read_head(file, HEAD_BYTES))
    return f"; it is {found.name}" if found is not None and found.format is None else ""


@dataclass(frozen=True, slots=True)
class WholeFilePart(FilePart):
    """A whole file as one part."""

    @property
    def name(self) -> str:
        """Name for messages."""
        return self.file.path

    @property
    def identity(self) -> str:
        """Identity of the input (path and range), independent of its bytes."""
        return self.file.key

    @property
    def size_bytes(self) -> int:
        """Raw bytes, for progress."""
        return self.file.size_bytes

    def extents(self) -> tuple[Extent, ...]:
        """The bytes of a local file that determine the result."""
        return whole_file(self.file)


@dataclass(frozen=True, slots=True)
class RangePart(FilePart):
    """The records that begin in bytes [begin, end) of a file; all records of a compressed file."""

    fields: Fields
    begin: int
    end: int

    @property
    def name(self) -> str:
        """Name for messages: the file, and the range if there are several."""
        return (
            f"{self.file.path} [bytes {self.begin}:{self.end}]" if self.is_range else self.file.path
        )

    @property
    def is_range(self) -> bool:
        """Whether other parts read the rest of the file."""
        return self.begin > 0 or self.end < self.file.size_bytes

    @property
    def size_bytes(self) -> int:
        """Raw bytes, for progress."""
        return self.end - self.begin


def whole_file(file: SourceFile) -> tuple[Extent, ...]:
    """All bytes of a local file; empty for a remote file, which could only be compared by
    downloading it.
    """
    return () if file.is_remote else ((file, 0, file.size_bytes),)


def _opened(
    file: SourceFile, function: Callable[..., T], *arguments: object, **options: object
) -> T:
    try:
        return function(file.path, *arguments, **options)
    except OSError as error:
        refuse_file(file.path, error)


def copied_file(file: SourceFile) -> Copied | None:
    """A remote file as it is read through the copies in use; None: there are none."""
    return copied(file.full, file.size_bytes, file.version)


def open_random(file: SourceFile, *, ahead: bool = True) -> Any:
    """Open a file for random access.

    Args:
        file: Local or remote.
        ahead: Read a remote file ahead of what is requested, which suits reading front to back.

    Raises:
        RecordError: The file is gone, or may not be read.
    """
    if file.is_remote:
        kept = copied_file(file)
        raw = (
            open_copied(kept, ahead=ahead)
            if kept is not None
            else RemoteFile(file.full, ahead=ahead)
        )
        return pa.PythonFile(raw, mode="r")
    return _opened(file, pa.OSFile, "rb")


@contextmanager
def open_ranges(file: SourceFile) -> Iterator[ReadRange]:
    """Open a file for reading ranges of it; each range of a remote file costs a request.

    Raises:
        RecordError: The file is gone, or may not be read.
        Unreadable: On reading a range that the disk or the store cannot deliver completely.
    """
    if file.is_remote:
        kept = copied_file(file)
        yield kept.read if kept is not None else partial(read_range, file.full)
        return
    with _opened(file, open, "rb", buffering=0) as stream:
        yield partial(_read_local, stream.fileno())


def shorter(size: int) -> str:
    """The message for a file that has lost some of its `size` bytes."""
    return f"it has become shorter: it had {size:,} bytes when the work began"


def _read_local(descriptor: int, begin: int, amount: int) -> bytes:
    try:
        return os.pread(descriptor, amount, begin)
    except OSError as error:
        raise Unreadable(f"the disk cannot read it: {error.strerror}", begin) from error


@final
class Stream:
    """Decompressed bytes of one file, front to back."""

    def __init__(self, file: SourceFile, raw: RawFile) -> None:
        self._file, self._raw = file, raw
        self._inner: Reader = (
            decompressed(raw, file.compression, file.path) if file.compression else raw
        )
        self._is_sure = not file.is_remote or file.compression is not None

    def read(self, amount: int | None = None) -> bytes:
        """Read up to `amount` bytes, or all that are left if it is None; empty at the end.

        Raises:
            Unreadable: The file was cut, is damaged, or became shorter; bytes that this call had
                read are lost.
        """
        size = self._file.size_bytes
        if self._file.compression and not size:
            raise Unreadable(
                "it is empty, and no compressed file is, not even that of empty content"
            )
        try:
            data = self._inner.read(amount)
            if not self._is_sure:
                data = self._made_sure(data, amount)
        except Unreadable as error:
            raise Unreadable(str(error), self.raw_position(), cut=error.cut) from error
        except OSError as error:
            raise Unreadable(f"the disk cannot read it: {error}", self.raw_position()) from error
        position = self.raw_position()
        if (not data or amount is None) and position < size:
            raise Unreadable(shorter(size), position, cut=True)
        return data

    def _made_sure(self, data: bytes, amount: int | None) -> bytes:
        """The first bytes of a remote file, of which only the name was looked at: decompressed, if
        they show that.
        """
        self._is_sure = True
        found = recognise(data[:HEAD_BYTES])
        if found is None:
            return data
        if found.codec is None:
            raise RecordError(wrong_name(self._file, found))
        self._raw.seek(0)
        self._inner = decompressed(self._raw, found.codec, self._file.path)
        return self._inner.read(amount)

    def raw_position(self) -> int:
        """Bytes of the file read so far, before decompression."""
        waiting = self._inner.waiting if isinstance(self._inner, Streams) else 0
        return min(self._raw.tell() - waiting, self._file.size_bytes)


def wrong_name(file: SourceFile, found: Signature) -> str:
    """The message for a file that is not what its name says."""
    read_whole = f"set part_bytes to at least its size, {file.size_bytes}, to read it in one piece"
    cure = found.cure or (f"set format to {found.format}" if found.format else read_whole)
    return f"{file.path}: is {found.name}, which its name does not say; {cure}"


@contextmanager
def open_stream(file: SourceFile, *, ahead: bool = True) -> Iterator[Stream]:
    """Open a file for reading front to back; it is decompressed as its extension says.

    Args:
        file: Local or remote.
        ahead: Read a remote file ahead of what is requested.
    """
    raw = open_random(file, ahead=ahead)
    try:
        yield Stream(file, raw)
    finally:
        raw.close()


def refuse_wrong_data(file: SourceFile) -> None:
    """Read a compressed file to its end before any of it is used; needed if the work goes on after
    damage.

    A fault is found only after the damaged bytes, in gzip files often only by the checksum at the
    end, so what was read before may be wrong. In a file that was merely cut, all that is there is
    right.

    Raises:
        Unreadable: The data are not those that were compressed; nothing in the file counts as read.
    """
    if file.compression:
        with open_stream(file) as stream:
            try:
                while stream.read(CHECK_BYTES):
                    pass
            except Unreadable as error:
                if not error.cut:
                    raise Unreadable(f"{error}, so none of it is used") from error
