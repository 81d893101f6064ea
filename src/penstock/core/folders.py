"""Folders and paths: a path of this machine, a URL or a name on the hub, and one process at a time
in a folder.

Locations of files: a path on this machine, or a URL of a store that fsspec reads.

Locks a folder for one process at a time; the system releases the lock when its holders end, however
they end.
"""

import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock.core.errors import ConfigError, FormatError, MissingExtraError, OutputError
from penstock.core.suggestions import NEAR, closest
from penstock.core.system import refuse_windows
from penstock.core.urls import plain_cause, shown_url, without_secrets

refuse_windows()
import fcntl  # noqa: E402  (not on Windows)

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""One slash, because `Path` turns `s3://bucket` into `s3:/bucket`. A single letter is a drive."""

_HUB_REASONS = {
    "LocalEntryNotFoundError": "the hub cannot be reached, so it may be there or not",
    "OfflineModeIsEnabled": "the hub may not be asked, because HF_HUB_OFFLINE is set",
    "RepositoryNotFoundError": "the hub has nothing by that name, or it is private: log in with `hf auth login`",  # noqa: E501
    "GatedRepoError": (
        "the hub gives it only to those who accepted its terms: do so on its page, and `hf auth "
        "login`"
    ),
    "RevisionNotFoundError": "the hub has it, but not this revision",
    "HFValidationError": "it is no name that the hub can have",
}
"""Errors of huggingface_hub → their meaning for a name that a user gave."""

LOCK_SECONDS = 3.0
"""How long to wait for the remaining processes of a killed one to end."""


def is_url(location: str | os.PathLike[str]) -> bool:
    """Whether a location is a URL, also one that has been through `Path`."""
    return _SCHEME.match(os.fspath(location)) is not None


def normal_url(location: str | os.PathLike[str]) -> str:
    """A URL as users write it, whether or not it has been through `Path`; without a slash at its
    end.
    """
    text = os.fspath(location)
    # The path of a local file begins with a slash of its own.
    slashes = ":///" if text.startswith(("file:", "local:")) else "://"
    return re.sub(":/+", slashes, text, count=1).rstrip("/")


def base_name(location: str | os.PathLike[str]) -> str:
    """The last part of a path, or of a URL without its query."""
    return Path(shown_url(location) if ":" in os.fspath(location) else location).name


def cache_folder(given: str | os.PathLike[str] | None = None) -> Path:
    """Where copies of remote datasets are kept: as given, else `PENSTOCK_CACHE`, else in the user's
    cache folder.

    Raises:
        ConfigError: It is a URL.
    """
    found = given or os.environ.get("PENSTOCK_CACHE")
    if not found:
        home = os.environ.get("XDG_CACHE_HOME")
        if not home and sys.platform == "darwin":
            home = "~/Library/Caches"
        found = Path(home or "~/.cache").expanduser() / "penstock"
    return local_path(found, "the cache of remote datasets")


def may_be_of_hub(name: str) -> bool:
    """Whether a name can be one on the Hugging Face hub: `owner/name`, or `name` alone."""
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and not is_url(name)


def hub_copy(name: str, wanted: Sequence[str], revision: str | None = None) -> Path:
    """The folder in the hub's cache with some files of a repository; fetched where they are not
    there yet.

    Args:
        name: On the hub.
        wanted: Patterns of file names.
        revision: Branch, tag or commit; None: the main branch.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
        FormatError: The hub has nothing by that name, or cannot be reached.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "huggingface") from error
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(wanted)))
    except Exception as error:
        reason = hub_reason(error) or (
            "the hub gives nothing by that name: "
            f"{type(error).__name__}: {(without_secrets(str(error)).splitlines() or [''])[0]}"
        )
        raise FormatError(
            f"{name}: no such file or folder here{_near(name)}, and {reason}"
        ) from plain_cause(error)


def hub_reason(error: BaseException) -> str | None:
    """What an error of huggingface_hub, or one that it caused, means for a name that a user gave;
    None: another error.
    """
    found: BaseException | None = error
    while found is not None and type(found).__name__ not in _HUB_REASONS:
        found = found.__cause__
    return None if found is None else _HUB_REASONS[type(found).__name__]


def _near(name: str) -> str:
    """` (did you mean tok?)`: a file or folder here whose name is spelt much like it."""
    path = Path(name)
    try:
        found = closest(path.name.lower(), sorted(one.name for one in path.parent.iterdir()), NEAR)
    except OSError:
        return ""
    return f" (did you mean {path.parent / found}?)" if found else ""


def local_path(location: str | os.PathLike[str], what: str) -> Path:
    """A location that must be a path on this machine.

    Args:
        location: The user's path.
        what: What it is used for: "a dataset".

    Raises:
        ConfigError: It is a URL.
    """
    if is_url(location):
        raise ConfigError(
            f"{shown_url(normal_url(location))}: is a URL, but {what} must be a local path; "
            "write to a local folder and copy it to the store (`penstock copy` copies "
            "datasets); to read it, copy it here or mount the store"
        )
    return location if isinstance(location, Path) else Path(location)


def lock_folder(folder: Path, file: Path, *, doing: str) -> int:
    """Lock a folder by a file in it, which is created if it is missing.

    Args:
        folder: The folder.
        file: The lock file; it contains the number of the process that locked it last.
        doing: What holders do to the folder, for the message to others: "preparing".

    Returns:
        A file descriptor: the folder is locked until it and all its copies are closed. On a file
        system without locks it locks nothing.

    Raises:
        OutputError: Another process holds the lock, or the file cannot be created.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OutputError(
                f"{file}: cannot write: {error.strerror}; choose another folder"
            ) from error
        if _take(lock) and _is_there(lock, file):
            break
        message = _held(folder, lock, doing)
        os.close(lock)
        if time.monotonic() > deadline:
            raise OutputError(message)
        time.sleep(0.05)
    with suppress(OSError):
        # The number is for people; a full disk has no room for it.
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _take(lock: int) -> bool:
    """Lock an open file; returns False if another process holds the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # Some network file systems are mounted without locks; refusing to work there would not
        # help.
        return True
    return True


def _is_there(lock: int, file: Path) -> bool:
    """Whether the locked file still has its name: its previous holder may have removed it at the
    end.
    """
    try:
        return os.path.samestat(os.fstat(lock), os.stat(file))
    except FileNotFoundError:
        return False


def check_unlocked(folder: Path, file: Path, *, doing: str) -> None:
    """Refuse what `lock_folder` would refuse, without writing anything.

    Raises:
        OutputError: Another process holds the lock.
    """
    try:
        lock = os.open(file, os.O_RDONLY)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(_held(folder, lock, doing)) from None
    except OSError:
        # Mounted without locks.
        pass
    finally:
        os.close(lock)


def _held(folder: Path, lock: int, doing: str) -> str:
    holder = os.pread(lock, 64, 0).decode(errors="replace").strip() or "unknown"
    ranks = ""
    if doing == "preparing" and os.environ.get("WORLD_SIZE", "1") != "1":
        ranks = (
            "; of several ranks, let one prepare before the others read, or prepare before torchrun"
        )
    return (
        f"{folder}: process {holder} is {doing} into it; wait until it ends, or choose another "
        f"folder{ranks}"
    )
