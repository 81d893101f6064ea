"""Finds and reads files in object stores and on other machines, through fsspec.

A failure of a store stops the work with an error that names the URL, as `shown_url` shows it. It is
never mistaken for the end of a file, so no text is lost to a network failure. Reading a range costs
one request and returns exactly those bytes.
"""

import glob
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, final

from penstock.core.errors import PenstockError, RecordError
from penstock.core.json_values import JsonObject
from penstock.core.urls import found_below, plain_cause, shown_url
from penstock.data.stores.file_systems import STAMPS, explained, file_system, true_cause
from penstock.data.stores.sessions import is_refusal, is_s3, renew_session, session_of
from penstock.data.stores.silence import watched

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Result = TypeVar("Result")


class Unreadable(Exception):  # noqa: N818  (never seen by users: a reader turns it into a Damage)
    """The rest of a file cannot be read.

    Args:
        reason: In words.
        position: Stored bytes of the file that were read before.
        cut: Only the end is missing, so all that comes before it is right.
    """

    def __init__(self, reason: str, position: int = 0, *, cut: bool = False) -> None:
        super().__init__(reason)
        self.position, self.cut = position, cut


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Turn any exception of a store's library into an error that names the URL and the cure; report
    its silence.
    """
    shown = shown_url(url)
    try:
        with watched(shown, shown):
            yield
    except (PenstockError, Unreadable):
        raise
    except Exception as error:  # each store has an error tree of its own
        raise explained(url, error) from plain_cause(error, url)


def _request(filesystem: "AbstractFileSystem", request: Callable[[], Result]) -> Result:
    """Make a request; again, with a new session, if its credentials were refused and there are
    others by now.
    """
    session = session_of(filesystem)
    try:
        return request()
    except Exception as error:
        if (
            not is_s3(filesystem)
            or not is_refusal(true_cause(error))
            or not renew_session(filesystem, session)
        ):
            raise
        return request()


def find_remote(url: str) -> list[tuple[str, int, str]]:
    """Full URL, bytes and stamp of each file that a URL (a file, folder or glob) matches, sorted by
    name.

    Raises:
        RecordError: The store's package is missing, or the store cannot be read.
    """
    filesystem, path = file_system(url)
    with store_errors(url):
        filesystem.invalidate_cache()  # a file may have changed since this process last looked
        found = _request(filesystem, lambda: _list(filesystem, path))
        names = sorted(
            name for name in found if not name.endswith("/") and not _is_hidden(name, path)
        )
        urls = [found_below(url, filesystem.unstrip_protocol(name)) for name in names]
        pairs = zip(urls, (found[name] for name in names), strict=True)
        return [(full, int(entry["size"]), _stamp(entry)) for full, entry in pairs]


def _list(filesystem: "AbstractFileSystem", path: str) -> dict[str, JsonObject]:
    """What the store reports about each file, by name."""
    try:
        whole = filesystem.info(path)
    except FileNotFoundError as error:
        if true_cause(error) is not error:
            raise
        whole = {"type": "absent"}
    if whole["type"] == "file":
        return {path: whole}
    if whole["type"] == "directory":
        found: dict[str, JsonObject] = filesystem.find(path, detail=True)
        return found
    if not glob.has_magic(shown_url(path)):
        return {}
    return {
        name: entry
        for name, entry in filesystem.glob(path, detail=True).items()
        if entry["type"] == "file"
    }


def _is_hidden(name: str, path: str) -> bool:
    """Whether a folder or file that the user did not name begins with a dot."""
    named = path.split("/")
    return any(part.startswith(".") and part not in named for part in name.split("/"))


def _stamp(entry: JsonObject) -> str:
    return next((str(entry[name]) for name in STAMPS if entry.get(name)), "")


def read_range(url: str, begin: int, amount: int) -> bytes:
    """Bytes [begin, begin + amount) of a file, in one request.

    Raises:
        RecordError: The store cannot be read, or does not support ranges.
        Unreadable: The file has become shorter.
    """
    filesystem, path = file_system(url)
    with store_errors(url):
        data: bytes = _request(
            filesystem, lambda: filesystem.cat_file(path, start=begin, end=begin + amount)
        )
    if len(data) > amount:
        raise RecordError(
            f"{shown_url(url)}: requested {amount} bytes, the store sent {len(data)}, so it "
            "does not support ranges; set part_bytes to at least its size, to read the file "
            "in one piece"
        )
    if len(data) < amount:
        reason = (
            f"it has fewer than {begin + amount:,} bytes now, so it changed since the work began"
        )
        raise Unreadable(reason, begin + len(data))
    return data


@final
class RemoteFile:
    """A file of a store as a Python file object, for Arrow to read.

    Args:
        url: Where it is.
        ahead: Read ahead, for reading front to back; otherwise each read requests exactly its
            bytes.
    """

    def __init__(self, url: str, *, ahead: bool) -> None:
        self._url = url
        self._files, path = file_system(url)
        options = {} if ahead else {"cache_type": "none"}
        with store_errors(url):
            self._file = _request(self._files, lambda: self._files.open(path, "rb", **options))

    def read(self, amount: int = -1) -> bytes:
        """Read up to `amount` bytes; all that are left if it is negative."""
        with store_errors(self._url):
            data: bytes = _request(self._files, lambda: self._file.read(amount))
            return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a position."""
        with store_errors(self._url):
            return int(self._file.seek(offset, whence))

    @property
    def has_ranges(self) -> bool:
        """Whether it can be read elsewhere than front to back; some web servers send only whole
        files.
        """
        try:
            self._file.seek(1)
            self._file.seek(0)
        except Exception:  # each store has an error tree of its own
            return False
        return True

    def tell(self) -> int:
        """The current position."""
        return int(self._file.tell())

    def close(self) -> None:
        """Close it."""
        with store_errors(self._url):
            self._file.close()

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return bool(self._file.closed)
