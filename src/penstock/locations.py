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
            f"{url}: is a URL, but {what} must be a local path: object storage is not supported yet; prepare (or "
            "write) into a local folder and copy it to the store; to read it, copy it here or mount the store"
        )
    return Path(location)
