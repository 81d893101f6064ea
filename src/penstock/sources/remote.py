"""Files in object stores and on other machines, through fsspec: found, told apart, read at any place.

What goes wrong in a store stops the work with an error that names the URL. It is never taken for the end of a file, so
no text is lost to a network that failed. Reading a range costs one request, and gives those bytes and no others.
"""

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from penstock.errors import PenstockError, RecordError
from penstock.sources.damage import Unreadable

STAMPS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")
"""What stores call the figure that changes with the content, best first.

fsspec's own `ukey` hashes all that a store says of a file, which is more in a listing than for one file.
"""


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Turn whatever a store's library raises into an error that names the URL and the cure."""
    try:
        yield
    except (PenstockError, Unreadable):
        raise
    except Exception as error:  # each store has an error tree of its own
        cause = _cause(error)
        if isinstance(cause, FileNotFoundError):
            reason = f"is not in the store: {cause}; look for a typing error, then run it again"
        else:
            reason = (
                f"the store cannot be read: {type(cause).__name__}: {cause}; look at the address, the credentials and "
                "the network, then run it again"
            )
        raise RecordError(f"{url}: {reason}: finished parts are kept") from error


def _cause(error: BaseException) -> BaseException:
    """What really went wrong: some stores call it a missing file when they could not ask, or were refused."""
    cause: BaseException | None = error
    while isinstance(error, FileNotFoundError) and (cause := cause.__cause__ if cause else None) is not None:
        response = getattr(cause, "response", None)
        status = getattr(cause, "status", None) or getattr(response, "status_code", None)
        refused = isinstance(status, int) and status not in (404, 410)
        if refused or (isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError) and status is None):
            return cause
    return error


def find_remote(url: str) -> list[tuple[str, int, str]]:
    """URL, bytes and stamp of each file that a URL stands for, of a file, a folder or a glob; sorted by name.

    Raises:
        RecordError: The store's package is missing, or the store cannot be read.
    """
    filesystem, path = _filesystem(url)
    filesystem.invalidate_cache()  # a file may have changed since this process last looked
    with store_errors(url):
        found = _list(filesystem, path)
        names = sorted(name for name in found if not name.endswith("/") and not _is_hidden(name, path))
        return [(filesystem.unstrip_protocol(name), int(found[name]["size"]), _stamp(found[name])) for name in names]


def _list(filesystem: Any, path: str) -> dict[str, dict[str, Any]]:
    """What the store says of each file, by name."""
    try:
        whole = filesystem.info(path)
    except FileNotFoundError as error:
        if _cause(error) is not error:
            raise
        whole = {"type": "absent"}
    if whole["type"] == "file":
        return {path: whole}
    if whole["type"] == "directory":
        found: dict[str, dict[str, Any]] = filesystem.find(path, detail=True)
        return found
    if not glob.has_magic(path):
        return {}
    return {name: told for name, told in filesystem.glob(path, detail=True).items() if told["type"] == "file"}


def _is_hidden(name: str, path: str) -> bool:
    """Whether a folder or file that the user did not name begins with a dot."""
    named = path.split("/")
    return any(part.startswith(".") and part not in named for part in name.split("/"))


def _stamp(told: dict[str, Any]) -> str:
    return next((str(told[name]) for name in STAMPS if told.get(name)), "")


def _filesystem(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        extra = "huggingface" if url.startswith("hf://") else "cloud"
        raise RecordError(f"{url}: {error}; stores need their package: pip install 'penstock[{extra}]'") from error
    return filesystem, path


def read_range(url: str, begin: int, amount: int) -> bytes:
    """Bytes [begin, begin + amount) of a file, in one request.

    Raises:
        RecordError: The store cannot be read, or gives no ranges.
        Unreadable: The file has become shorter.
    """
    filesystem, path = _filesystem(url)
    with store_errors(url):
        data: bytes = filesystem.cat_file(path, start=begin, end=begin + amount)
    if len(data) > amount:
        raise RecordError(
            f"{url}: asked for {amount} bytes, the store sent {len(data)}, so it gives no ranges of a file; "
            "read the file in one piece: --part-bytes of at least its size"
        )
    if len(data) < amount:
        reason = f"it has fewer than {begin + amount:,} bytes now, so it changed since the work began"
        raise Unreadable(reason, begin + len(data))
    return data


@final
class RemoteFile:
    """A file of a store for Arrow to read from.

    Args:
        url: Where it is.
        ahead: Read ahead of what is asked, for reading front to back; otherwise a read is a request of just its bytes.
    """

    def __init__(self, url: str, *, ahead: bool) -> None:
        self._url = url
        filesystem, path = _filesystem(url)
        with store_errors(url):
            self._file: Any = filesystem.open(path, "rb", **({} if ahead else {"cache_type": "none"}))

    def read(self, amount: int = -1) -> bytes:
        """Up to `amount` bytes, all that are left when it is negative."""
        with store_errors(self._url):
            data: bytes = self._file.read(amount)
            return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place."""
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """The place."""
        return int(self._file.tell())

    def close(self) -> None:
        """Close it."""
        self._file.close()

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return bool(self._file.closed)
