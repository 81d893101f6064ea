"""Datasets in object stores: lists, reads and writes their files through fsspec, with retries.

A request that fails for a moment (a server's error, a reset, a body that was cut) is repeated with
growing pauses. One that cannot succeed (no such object, no permission, another object than before)
is an error at once. Each error names the URL. S3 and HTTP are asked for the object that was listed
(`If-Match`), so a replaced object is never read.

Ranges of S3 objects are read by obstore where it is installed: a request costs it a sixth of the
CPU time that s3fs needs. Where it fails, s3fs makes the request again, so errors, and what is odd
about a store, are those of s3fs.

A store that may not be listed (S3 without `s3:ListBucket`) is asked for files by name, as plain
HTTP is.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

from penstock.core.errors import CorruptionError, PenstockError, StoreError
from penstock.core.folders import hub_reason, normal_url
from penstock.core.json_values import JsonObject
from penstock.core.system import too_many_files
from penstock.core.urls import Address, plain_cause, split_query, without_secrets
from penstock.data.stores.daemons import DaemonPool, refuse_at_end
from penstock.data.stores.file_systems import STAMPS, file_system, true_cause, waited
from penstock.data.stores.hub import look_up as of_hub
from penstock.data.stores.s3 import FastReads, read_version
from penstock.data.stores.sessions import (
    REFUSED,
    has_ended,
    is_refusal,
    is_s3,
    renew_session,
    session_of,
    status_of,
)
from penstock.data.stores.silence import watched

_log = logging.getLogger("penstock.shards")

TRIES = 5
"""Of a request."""
PAUSE_SECONDS = 0.2
"""After the first failure; each later pause is twice as long."""
UPLOAD_BYTES = 16 << 20
"""Bytes of one request of an upload to S3; files of twice as much and more are sent in several, ten
at a time.
"""

Result = TypeVar("Result")

_CHANGED, _FORBIDDEN = {409, 412}, {*REFUSED, 405}
_LOOK_UPS = 32
"""Files that are looked up at the same time."""
_MOST_UPLOADS = 10_000
"""Requests that S3 allows for one file."""
_ALONE = {"file", "local", "memory", "http", "https", "hf"}
"""Protocols of places that other machines do not see, or that do not take files from several at
once.
"""


class RefusedError(StoreError):
    """The store refuses a request: the credentials lack a right, have ended, or are missing."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a store, as it was listed."""

    size: int | None
    """Bytes; None: the store does not say."""
    stamp: str
    """Changes with the content, such as an ETag; empty: the store has none."""


@final
class Store:
    """The folder of a store that a URL names.

    Args:
        url: Such as `s3://bucket/folder`.

    Raises:
        RecordError: The store's package is not installed.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.address = Address(normal_url(url))
        """What opens it; it may hold secrets."""
        self.url = str(self.address)
        """As it is stored and shown."""
        self._files, root = file_system(self.address.full)
        root, self._query = split_query(root)
        self._root = root.rstrip("/")
        protocol = self._files.protocol
        self._protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self._counting = threading.Lock()
        self._is_s3 = is_s3(self._files)
        self._fast = FastReads.of(self._files) if self._is_s3 else None
        self._may_list = True
        self.requests = self.bytes = 0
        """What was read so far."""

    def where(self, name: str) -> str:
        """The URL of a file."""
        return f"{self.url}/{name}" if name else self.url

    @property
    def lists(self) -> bool:
        """Whether the store says which files it has; plain HTTP cannot, and another one may refuse
        it.
        """
        return self._may_list and not self._protocols & {"http", "https"}

    @property
    def is_shared(self) -> bool:
        """Whether several machines may write files at the same time."""
        return not self._protocols & _ALONE

    def listing(self, guesses: Sequence[str] = ()) -> dict[str, StoredFile]:
        """All files below the folder, by their path in it; those of `guesses` that are there, if it
        does not list.

        Raises:
            StoreError: The store cannot be read, or refuses to list and there are no guesses.
        """
        if self.lists:
            try:
                return self._list()
            except RefusedError:
                if not guesses:
                    raise
                self._may_list = False
                _log.info("%s: may not be listed, so its files are asked for by name", self.url)
        with DaemonPool(_LOOK_UPS) as pool:
            pairs = zip(guesses, pool.map(self.look_up, guesses), strict=True)
            return {name: one for name, one in pairs if one is not None}

    def _list(self) -> dict[str, StoredFile]:

        def find() -> Any:
            self._files.invalidate_cache()
            try:
                return self._files.find(self._root, detail=True)
            except FileNotFoundError as error:
                if true_cause(error) is not error:
                    raise
                return {}

        found = self._try("", find)
        prefix = f"{self._root}/"
        return {
            name.removeprefix(prefix): _stored(entry)
            for name, entry in found.items()
            if name.startswith(prefix) and not name.endswith("/")
        }

    def look_up(self, name: str) -> StoredFile | None:
        """One file; None: there is none, or S3, which may not be listed, does not say.

        Raises:
            StoreError: The store cannot be read.
        """

        def look() -> Any:
            self._files.invalidate_cache()
            try:
                if "hf" in self._protocols:
                    return of_hub(self._files, self._path(name))
                return self._files.info(self._path(name))
            except FileNotFoundError as error:
                if true_cause(error) is not error:
                    raise
                return None

        try:
            entry = self._try(name, look)
        except RefusedError:
            # Who may not list is refused what is not there.
            if self._may_list:
                raise
            return None
        return None if entry is None or entry.get("type") == "directory" else _stored(entry)

    def read(self, name: str) -> bytes:
        """A whole file that is not empty.

        Raises:
            StoreError: The store cannot be read, or there is no such file.
        """
        # From a first byte on, s3fs does not ask for the size before.
        options = {"start": 0} if self._is_s3 else {}
        data: bytes = self._try(name, lambda: self._files.cat_file(self._path(name), **options))
        self._count(len(data))
        return data

    def read_if_there(self, name: str) -> bytes | None:
        """A whole file; None: there is none.

        Raises:
            StoreError: The store cannot be read.
        """
        try:
            return self.read(name)
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def read_range(self, name: str, begin: int, end: int, stamp: str = "") -> bytes:
        """As `read_view`, as bytes of their own."""
        return bytes(self.read_view(name, begin, end, stamp))

    def read_view(self, name: str, begin: int, end: int, stamp: str = "") -> memoryview:
        """Bytes [begin, end) of a file, in one request if nothing fails.

        Args:
            name: The file.
            begin: First byte.
            end: One after the last byte.
            stamp: The stamp that it must have; empty: any.

        Raises:
            StoreError: The store cannot be read, there is no such file, or it does not support
                ranges.
            CorruptionError: The file has another stamp, or ends before.
        """
        if end <= begin:
            return memoryview(b"")

        def read() -> memoryview:
            data = self._request(name, begin, end, stamp)
            if len(data) > end - begin:
                raise StoreError(
                    f"{self.where(name)}: {end - begin} bytes were requested, and {len(data)} "
                    "came: the store does not support ranges; copy the dataset to this "
                    "machine (`penstock copy`)"
                )
            if len(data) < end - begin:
                raise _CutError(f"{len(data)} of {end - begin} bytes from byte {begin} on came")
            return data

        data = self._try(name, read)
        self._count(len(data))
        return data

    def write(self, name: str, local: str | os.PathLike[str]) -> None:
        """Put a local file; readers see it complete or not at all, where the store does so (all but
        local disks).

        Raises:
            StoreError: The store cannot be written.
        """

        def put() -> None:
            if "file" in self._protocols:
                self._files.makedirs(os.path.dirname(self._path(name)), exist_ok=True)
            self._files.put_file(
                os.fspath(local), self._path(name), **self._pieces(os.path.getsize(local))
            )

        self._try(name, put, doing="written")

    def put(self, name: str, local: str | os.PathLike[str]) -> StoredFile:
        """Put a local file as `write` does, and return how the store lists it.

        Raises:
            StoreError: The store cannot be written.
            CorruptionError: It has another size there.
        """
        self.write(name, local)
        found = self.look_up(name)
        if found is None or found.size not in (None, os.path.getsize(local)):
            raise CorruptionError(
                f"{self.where(name)}: has another size than was written; run it again"
            )
        return found

    def remove(self, name: str) -> None:
        """Remove a file, if there is one.

        Raises:
            StoreError: The store cannot be written.
        """
        self._try(
            name,
            lambda: self._files.rm_file(self._path(name)) if self.look_up(name) else None,
            doing="written",
        )

    def _pieces(self, size: int) -> dict[str, Any]:
        """How s3fs sends a file: its own pieces need 500 MB of memory."""
        if not self._is_s3:
            return {}
        return {"chunksize": max(UPLOAD_BYTES, -(-size // _MOST_UPLOADS))}

    def _path(self, name: str) -> str:
        # A signature for a folder is repeated for each of its files.
        return f"{self._root}/{name}{self._query}" if name else f"{self._root}{self._query}"

    def _count(self, size: int) -> None:
        with self._counting:
            self.requests, self.bytes = self.requests + 1, self.bytes + size

    def _request(self, name: str, begin: int, end: int, stamp: str) -> memoryview:
        path = self._path(name)
        if (
            self._fast is not None
            and (data := self._fast.read(path, begin, end, stamp)) is not None
        ):
            return data
        matched = stamp.startswith('"')  # a strong ETag: only such are compared by If-Match
        if matched and self._is_s3:
            return memoryview(
                waited(self._files, read_version, self._files, path, begin, end, stamp)
            )
        if matched and self._protocols & {"http", "https"}:
            return memoryview(
                self._files.cat_file(path, start=begin, end=end, headers={"If-Match": stamp})
            )
        return memoryview(self._files.cat_file(path, start=begin, end=end))

    def _try(self, name: str, request: Callable[[], Result], doing: str = "read") -> Result:
        """Make a request, again if it fails for a moment, or if the credentials have been
        replaced.
        """
        with watched(self.where(name), self.url, writes=doing != "read"):
            return self._try_often(name, request, doing)

    def _try_often(self, name: str, request: Callable[[], Result], doing: str) -> Result:
        attempt, is_renewed = 0, False
        while True:
            refuse_at_end()
            session = session_of(self._files) if self._is_s3 else 0
            try:
                result = request()
            except PenstockError:
                raise
            except Exception as error:  # each store has an error tree of its own
                refuse_at_end()
                cause = true_cause(error)
                if (
                    self._is_s3
                    and not is_renewed
                    and is_refusal(cause)
                    and renew_session(self._files, session)
                ):
                    is_renewed = True
                    continue
                self._refuse(name, cause, error, is_renewed)
                attempt += 1
                if attempt == TRIES:
                    cure = too_many_files(error) or "check the network and the store"
                    raise StoreError(
                        f"{self.where(name)}: cannot be {doing}, {TRIES} times in a row: "
                        f"{self._said(cause)}; {cure}, then run it again: nothing that was "
                        "fetched is lost"
                    ) from self._cause(error)
            else:
                # Nothing is done with what comes when the process ends.
                refuse_at_end()
                return result
            time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))

    def _refuse(
        self, name: str, cause: BaseException, error: BaseException, is_renewed: bool
    ) -> None:
        """Raise for failures that no repetition heals."""
        status = status_of(cause)
        where = self.where(name)
        if "hf" in self._protocols and (said := hub_reason(error)) is not None:
            raise StoreError(
                f"{where}: {said}; check the spelling, then run it again"
            ) from self._cause(error)
        if status in _CHANGED:
            raise CorruptionError(
                f"{where}: was replaced by another object since it was opened; open the "
                "dataset again, and if it was changed on purpose, start a new run"
            ) from self._cause(error)
        if isinstance(cause, FileNotFoundError) or status in (404, 410):
            raise StoreError(
                f"{where}: is not in the store: {self._said(cause)}; check the spelling, or "
                "upload it again"
            ) from self._cause(
                cause if isinstance(cause, FileNotFoundError) else FileNotFoundError(str(cause))
            )
        if is_refusal(cause) or status in _FORBIDDEN:
            raise RefusedError(
                f"{where}: the store refuses: {self._said(cause)}; "
                f"{self._right_cure(name, cause, is_renewed)}"
            ) from self._cause(error)

    def _right_cure(self, name: str, cause: BaseException, is_renewed: bool) -> str:
        """What to do where the store refuses."""
        if has_ended(cause):
            found = (
                "the new ones of a new session are refused, too"
                if is_renewed
                else "a new session finds no others in the environment, the credentials file or "
                "the role"
            )
            return (
                f"renew the credentials ({found}), then run it again: nothing that was fetched is "
                "lost"
            )
        if not self._is_s3:
            return "check the credentials and their rights"
        if not name:
            return "check the credentials and their rights (listing needs s3:ListBucket)"
        return (
            "check the credentials and their rights (reading needs s3:GetObject; without "
            "s3:ListBucket, S3 says so of files that are not there, too)"
        )

    def _said(self, error: BaseException) -> str:
        """An exception of the store's library in a message."""
        return _shown(error, self.address.full)

    def _cause(self, error: BaseException) -> BaseException:
        """An exception of the store's library as the cause of ours."""
        return plain_cause(error, self.address.full)


class _CutError(Exception):
    """A body ended early."""


def _shown(error: BaseException, *locations: str) -> str:
    text = " ".join(without_secrets(str(error), *locations).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _stored(entry: JsonObject) -> StoredFile:
    size = entry.get("size")
    stamp = next((str(entry[name]) for name in STAMPS if entry.get(name)), "")
    return StoredFile(size=None if size is None else int(size), stamp=stamp)
