"""What datasets in S3 need beyond fsspec: ranges read by obstore, and requests for one version of
an object.
"""

import logging
import os
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, final

from penstock.core.urls import without_secrets
from penstock.data.stores.daemons import DaemonPool, result_of
from penstock.data.stores.file_systems import waited
from penstock.data.stores.sessions import session_of

if TYPE_CHECKING:
    from obstore.store import S3Store
    from s3fs import S3FileSystem

_log = logging.getLogger("penstock.shards")


@final
class FastReads:
    """Reads of S3 by obstore, with the address and the credentials of a file system of s3fs."""

    _MOST_FAILURES = 4
    """In a row, before it is given up."""

    def __init__(self, files: "S3FileSystem") -> None:
        self._files, self._process, self._failures = files, os.getpid(), 0
        self._stores: dict[str, S3Store] = {}
        self._session = session_of(files)
        self._main_pool: DaemonPool | None = None

    @classmethod
    def of(cls, files: "S3FileSystem") -> "FastReads | None":
        """None: obstore is not installed, or the file system has settings that it does not know."""
        if not set(files.storage_options) <= {"endpoint_url", "key", "secret", "token"}:
            return None
        try:
            import obstore  # noqa: F401
        except ImportError:
            return None
        return cls(files)

    def read(self, path: str, begin: int, end: int, stamp: str) -> memoryview | None:
        """Bytes [begin, end) of an object with this stamp (empty: any); None: s3fs must read
        them.
        """
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
                _log.info(
                    "s3://%s: read by s3fs from now on, because obstore failed: %s", bucket, said
                )
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

    def _open(self, bucket: str) -> "S3Store":
        from obstore.store import S3Store

        client = waited(self._files, self._files.set_session)
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
        async def find() -> Any:
            found = await self._files.session.get_credentials()
            return await found.get_frozen_credentials()

        found = waited(self._files, find)
        # Asked for again in a while: those of roles end, and the session of s3fs renews them.
        until = datetime.now(UTC) + timedelta(minutes=5)
        names = {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
        }
        return {**names, "expires_at": until}


async def read_version(files: "S3FileSystem", path: str, begin: int, end: int, stamp: str) -> bytes:
    """As `cat_file` of s3fs, which has no `IfMatch`."""
    bucket, key, _ = files.split_path(path)
    response = await files._call_s3(
        "get_object", Bucket=bucket, Key=key, Range=f"bytes={begin}-{end - 1}", IfMatch=stamp
    )
    async with response["Body"] as body:
        data: bytes = await body.read()
    return data
