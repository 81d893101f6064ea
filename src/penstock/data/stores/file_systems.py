"""Opens the file system of a URL through fsspec, and says what its failures mean."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from penstock.core.errors import RecordError
from penstock.core.folders import hub_reason
from penstock.core.urls import fsspec_arguments, plain_cause, shown_url, without_secrets

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Result = TypeVar("Result")

STAMPS = (
    *("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created"),
    *("blob_id", "commit_hash"),  # of the Hub
)
"""Names that stores give to the value that changes with the content, best first.

fsspec's own `ukey` hashes everything that a store reports about a file; a listing reports more than
a single look-up.
"""


def explained(url: str, error: Exception) -> RecordError:
    """What a failure of a store means for the one who reads from it, with the cure."""
    cause = true_cause(error)
    said = without_secrets(str(cause), url)
    if url.startswith("hf:") and (of_hub := hub_reason(error)) is not None:
        reason = f"{of_hub}; check the spelling, then run it again"
    elif isinstance(cause, FileNotFoundError):
        reason = f"is not in the store: {said}; check the spelling, then run it again"
    else:
        reason = (
            f"the store cannot be read: {type(cause).__name__}: {said}; check the address, "
            "the credentials and the network, then run it again"
        )
    return RecordError(f"{shown_url(url)}: {reason}: finished parts are kept")


def true_cause(error: BaseException) -> BaseException:
    """The true cause: some stores report a missing file when the request failed or was refused."""
    cause: BaseException | None = error
    while (
        isinstance(error, FileNotFoundError)
        and (cause := cause.__cause__ if cause else None) is not None
    ):
        response = getattr(cause, "response", None)
        status = getattr(cause, "status", None) or getattr(response, "status_code", None)
        refused = isinstance(status, int) and status not in (404, 410)
        if refused or (
            isinstance(cause, OSError)
            and not isinstance(cause, FileNotFoundError)
            and status is None
        ):
            return cause
    return error


def file_system(url: str) -> "tuple[AbstractFileSystem, str]":
    """The file system of a URL, and the path in it.

    Raises:
        RecordError: The store's package is missing.
    """
    # Imported here, for it takes a tenth of a second, which nobody without a store should wait for.
    import fsspec

    plain, options = fsspec_arguments(url)

    try:
        filesystem, path = fsspec.core.url_to_fs(plain, **options)
    except (ImportError, ValueError) as error:
        extra = "huggingface" if url.startswith("hf://") else "cloud"
        raise RecordError(
            f"{shown_url(url)}: {without_secrets(str(error), url)}; install the store's package: "
            f"pip install 'penstock[{extra}]'"
        ) from plain_cause(error, url)
    except Exception as error:  # some connect at once
        raise explained(url, error) from plain_cause(error, url)
    return filesystem, path


def waited(
    files: "AbstractFileSystem", function: Callable[..., Awaitable[Result]], *arguments: object
) -> Result:
    """The result of a coroutine that runs in the loop of an asynchronous file system."""
    import fsspec

    found: Result = fsspec.asyn.sync(files.loop, function, *arguments)
    return found
