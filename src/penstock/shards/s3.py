"""What S3 needs beyond fsspec: ranges read by obstore, requests for one version of an object, and new sessions.

A session keeps the credentials that it found first. When they were refused, and a new session finds others (a file that
was replaced, another environment), it takes the place of the old one, for all datasets that are read with it.
"""

import logging
import os
import threading
import weakref
from datetime import UTC, datetime, timedelta
from typing import Any, final

from penstock.core.daemons import DaemonPool, result_of
from penstock.core.urls import without_secrets

_log = logging.getLogger("penstock.shards")

REFUSED = {400, 401, 403}
"""HTTP statuses of credentials that have ended or do not exist (any more), or have no right."""
_ENDED = {"ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "TokenRefreshRequired", "ExpiredTokenException"}

_renewing = threading.Lock()
_sessions: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
"""File system → number of new sessions that it has had."""


def session_of(files: Any) -> int:
    """The number of a file system's session; it changes when another takes its place."""
    return _sessions.get(files, 0)


def renew_session(files: Any, refused: int) -> bool:
    """Take a new session, if it has other credentials than the one that was refused.

    Args:
        files: A file system of s3fs.
        refused: The number of the session that was refused.

    Returns:
        Whether there is another session now, by whichever thread.
    """
    import fsspec

    with _renewing:
        if session_of(files) != refused:
            return True
        # Keys that were given to the file system itself are the same in each session.
        if files.anon or files.key is not None or not fsspec.asyn.sync(files.loop, _has_others, files):
            return False
        files.session = None
        files.connect(refresh=True)
        _sessions[files] = refused + 1
        _log.info("s3: the credentials were refused; a new session has others, and takes its place")
        return True


async def _has_others(files: Any) -> bool:
    """Whether a new session would have other credentials."""
    import aiobotocore.session

    before = None if files.session is None else await _keys(files.session)
    found = await _keys(aiobotocore.session.AioSession(**files.kwargs))
    return found is not None and found != before


async def _keys(session: Any) -> tuple[Any, ...] | None:
    found = await session.get_credentials()
    if found is None:
        return None
    frozen = await found.get_frozen_credentials()
    return frozen.access_key, frozen.secret_key, frozen.token


def has_ended(error: BaseException | None) -> bool:
    """Whether an error says that credentials have ended, or do not exist."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict) and response.get("Error", {}).get("Code") in _ENDED:
            return True
        error = error.__cause__
    return False


@final
class FastReads:
    """Reads of S3 by obstore, with the address and the credentials of a file system of s3fs."""

    _MOST_FAILURES = 4
    """In a row, before it is given up."""

    def __init__(self, files: Any) -> None:
        self._files, self._process, self._failures = files, os.getpid(), 0
        self._stores: dict[str, Any] = {}
        self._session = session_of(files)
        self._main_pool: DaemonPool | None = None

    @classmethod
    def of(cls, files: Any) -> "FastReads | None":
        """None: obstore is not installed, or the file system has settings that it does not know."""
        if not set(files.storage_options) <= {"endpoint_url", "key", "secret", "token"}:
            return None
        try:
            import obstore  # noqa: F401
        except ImportError:
            return None
        return cls(files)

    def read(self, path: str, begin: int, end: int, stamp: str) -> memoryview | None:
        """Bytes [begin, end) of an object with this stamp (empty: any); None: s3fs must read them."""
        if self._session != session_of(self._files):
            self._session, self._stores, self._failures = session_of(self._files), {}, 0
        # Its threads do not survive a fork.
        if self._failures >= self._MOST_FAILURES or self._process != os.getpid():
            return None
        bucket, _, key = path.partition("/")
        try:
            data = self._get(bucket, key, begin, end, stamp)
        except Exception as error:  # whatever it is, s3fs finds it too, or is not concerned
            self._failures += 1
            if self._failures == self._MOST_FAILURES:
                said = f"{type(error).__name__}: {without_secrets(str(error))[:300]}"
                _log.info("s3://%s: read by s3fs from now on, because obstore failed: %s", bucket, said)
            return None
        self._failures = 0
        return data

    def _get(self, bucket: str, key: str, begin: int, end: int, stamp: str) -> memoryview:
        import obstore

        options: dict[str, Any] = {"range": (begin, end)}
        if stamp.startswith('"'):
            options["if_match"] = stamp
        if bucket not in self._stores:
            self._stores[bucket] = self._open(bucket)
        store = self._stores[bucket]

        def get() -> memoryview:
            return memoryview(obstore.get(store, key, options=options).bytes())

        if threading.current_thread() is not threading.main_thread():
            return get()
        # It would keep the main thread from seeing Ctrl-C.
        self._main_pool = self._main_pool or DaemonPool(1, "penstock-main")
        return result_of(self._main_pool.submit(get))

    def _open(self, bucket: str) -> Any:
        import fsspec
        from obstore.store import S3Store

        client = fsspec.asyn.sync(self._files.loop, self._files.set_session)
        address = str(client.meta.endpoint_url)
        own = {} if ".amazonaws.com" in address else {"endpoint": address}
        return S3Store(
            bucket,
            region=client.meta.region_name or "us-east-1",
            credential_provider=self._credentials,
            client_options={"allow_http": address.startswith("http://"), "timeout": "60s"},
            # Repeated by `Store`, which counts and pauses.
            retry_config={"max_retries": 0},
            **own,
        )

    def _credentials(self) -> dict[str, Any]:
        import fsspec

        async def find() -> Any:
            found = await self._files.session.get_credentials()
            return await found.get_frozen_credentials()

        found = fsspec.asyn.sync(self._files.loop, find)
        # Asked for again in a while: those of roles end, and the session of s3fs renews them.
        until = datetime.now(UTC) + timedelta(minutes=5)
        names = {"access_key_id": found.access_key, "secret_access_key": found.secret_key, "token": found.token}
        return {**names, "expires_at": until}


async def read_version(files: Any, path: str, begin: int, end: int, stamp: str) -> bytes:
    """As `cat_file` of s3fs, which has no `IfMatch`."""
    bucket, key, _ = files.split_path(path)
    response = await files._call_s3(
        "get_object", Bucket=bucket, Key=key, Range=f"bytes={begin}-{end - 1}", IfMatch=stamp
    )
    async with response["Body"] as body:
        data: bytes = await body.read()
    return data
