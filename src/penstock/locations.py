"""Where files are: a path of this machine, or a URL of a store that fsspec reads."""

import os
import re
from pathlib import Path

from penstock.errors import ConfigError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""One slash: `Path` makes `s3:/bucket` of `s3://bucket`. A single letter is a drive."""


def is_url(location: str | os.PathLike[str]) -> bool:
    """Whether a location is a URL, also one that has been through `Path`."""
    return _SCHEME.match(os.fspath(location)) is not None


def local_path(location: str | os.PathLike[str], what: str) -> Path:
    """A location that must be a path of this machine.

    Args:
        location: What the user gave.
        what: What it is for: "a dataset".

    Raises:
        ConfigError: It is a URL.
    """
    if is_url(location):
        url = re.sub(":/+", "://", os.fspath(location), count=1)
        raise ConfigError(
            f"{url}: {what} must lie on a local or mounted file system, object storage is not supported yet; "
            "prepare into a local folder and copy that to the store, and copy or mount it from there to read it"
        )
    return Path(location)
