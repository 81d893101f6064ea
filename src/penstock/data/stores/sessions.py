"""New sessions of S3 for credentials that have ended.

A session keeps the credentials that it found first. When they were refused, and a new session finds
others (a file that was replaced, another environment), it takes the place of the old one, for all
that is read with it.
"""

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

from penstock.data.stores.file_systems import waited

if TYPE_CHECKING:
    from s3fs import S3FileSystem

_log = logging.getLogger("penstock.stores")

REFUSED = {400, 401, 403}
"""HTTP statuses of credentials that have ended or do not exist (any more), or have no right."""
_ENDED = {
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "TokenRefreshRequired",
    "ExpiredTokenException",
    "RequestExpired",
}

_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "ClientAuthenticationError",
    "RefreshError",
}

_renewing = threading.Lock()
_sessions: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
"""File system → number of new sessions that it has had."""


def session_of(files: "S3FileSystem") -> int:
    """The number of a file system's session; it changes when another takes its place."""
    return _sessions.get(files, 0)


def renew_session(files: "S3FileSystem", refused: int) -> bool:
    """Take a new session, if it has other credentials than the one that was refused.

    Args:
        files: A file system of s3fs.
        refused: The number of the session that was refused.

    Returns:
        Whether there is another session now, by whichever thread.
    """
    with _renewing:
        if session_of(files) != refused:
            return True
        # Keys that were given to the file system itself are the same in each session.
        if files.anon or files.key is not None or not waited(files, _has_others, files):
            return False
        files.session = None
        files.connect(refresh=True)
        _sessions[files] = refused + 1
        _log.info("s3: the credentials were refused; a new session has others, and takes its place")
        return True


async def _has_others(files: "S3FileSystem") -> bool:
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


def is_s3(files: "S3FileSystem") -> bool:
    """Whether a file system of fsspec is S3."""
    protocol = files.protocol
    return not {"s3", "s3a"}.isdisjoint({protocol} if isinstance(protocol, str) else protocol)


def is_refusal(cause: BaseException) -> bool:
    """Whether other credentials might help."""
    return (
        isinstance(cause, PermissionError)
        or status_of(cause) in REFUSED
        or type(cause).__name__ in _NO_CREDENTIALS
    )


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status behind an error."""
    while error is not None:
        response = getattr(error, "response", None)
        found = getattr(error, "status", None) or getattr(response, "status_code", None)
        if isinstance(response, dict):
            found = response.get("ResponseMetadata", {}).get("HTTPStatusCode", found)
        if isinstance(found, int):
            return found
        error = error.__cause__
    return None
