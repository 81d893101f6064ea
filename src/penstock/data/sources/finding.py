"""Finds the files that a user names: paths, folders, globs and fsspec URLs.

Files come in the order given; within a folder or glob, sorted by path. Hidden files and folders (a
leading dot) are skipped. Finding nothing is an error, and so is finding one file twice, even under
different names.
"""

import glob
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from penstock.core.errors import ConfigError, RecordError
from penstock.core.urls import Address, shown_url, url_selection, without_secrets
from penstock.data.sources.files import SourceFile, local_file, refuse_file
from penstock.data.stores.remote_files import find_remote


def find_files(spec: str | os.PathLike[str]) -> list[SourceFile]:
    """All files that one path, folder, glob or URL matches, sorted.

    Raises:
        RecordError: There is none, or one is not a readable regular file.
    """
    text = os.fspath(spec)
    found = _find_remote(text) if "://" in text else _find_local(text)
    if not found and "://" not in text and os.path.isdir(os.path.expanduser(text)):
        raise RecordError(f"{text}: the folder holds no file that is not hidden; name another")
    if not found:
        shown = shown_url(text)
        raise RecordError(f"{shown}: no such file, and no file matches it{_hint(shown)}")
    return found


def _find_remote(url: str) -> list[SourceFile]:
    files = []
    for full, size_bytes, stamp in find_remote(url):
        shown = without_secrets(
            shown_url(full), url
        )  # some stores take user info for a part of the path
        address = None if shown == full else Address(full)
        files.append(
            SourceFile(shown, size_bytes, stamp, address=address, selection=url_selection(full))
        )
    return files


def named_apart(files: Sequence[SourceFile]) -> list[SourceFile]:
    """The files, where several URLs differ only in their parameters with a hash of these in their
    names.
    """
    seen: dict[str, set[str]] = {}
    for file in files:
        seen.setdefault(file.path, set()).add(file.selection)
    return [
        replace(file, path=f"{file.path}#{file.selection}", selection="")
        if file.selection and len(seen[file.path]) > 1
        else file
        for file in files
    ]


def refuse_twice(files: Iterable[SourceFile]) -> None:
    """Raise when a file occurs twice, because its text would silently count twice.

    One file can have several names: symbolic links, hard links, and folders that are mounted twice.
    """
    seen: dict[Any, str] = {}
    for file in files:
        key = file.inode or file.key
        if key in seen:
            same = "is" if seen[key] == file.path else f"is the same file as {seen[key]}, so it is"
            signed = (
                " (URLs that differ only in a signature, a token or a key are one file)"
                if file.address
                else ""
            )
            raise ConfigError(
                f"{file.path}: {same} given twice{signed}; name it once (to train on it more "
                "often, raise its share)"
            )
        seen[key] = file.path


def _hint(text: str) -> str:
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text) and not os.path.exists(
        os.path.dirname(text)
    ):
        return (
            "; check the spelling; a dataset of the Hugging Face hub is written "
            f"hf://datasets/{text}"
        )
    if glob.has_magic(text):
        return "; check the spelling, and quote globs so that the shell does not expand them"
    if not any(mark in text for mark in "/."):
        return (
            "; check the spelling; if this is a text and not a path, pass an iterator: iter(texts)"
        )
    return "; check the spelling"


def _find_local(text: str) -> list[SourceFile]:
    path = os.path.expanduser(text)
    if os.path.isdir(path):
        names = _walk(path)
    elif os.path.lexists(path):
        names = [path]
    else:
        root = os.path.dirname(path.partition("*")[0]) or "."
        if "**" in path and os.path.isdir(root):
            _walk(root)  # refuses a link cycle, which glob would follow forever
        matches = glob.glob(path, recursive=True)
        names = sorted(
            {
                name
                for match in matches
                for name in (_walk(match) if os.path.isdir(match) else [match])
            }
        )
        if not matches:
            _refuse_forbidden(path)
    return [local_file(name) for name in names]


def _refuse_forbidden(path: str) -> None:
    """Raise if a path is not absent, but may not be accessed."""
    try:
        os.lstat(path)
    except PermissionError as error:
        refuse_file(path, error)
    except (OSError, ValueError):
        return


def _walk(folder: str) -> list[str]:
    """All files below a folder; links are followed."""
    names: list[str] = []
    above = {folder: frozenset({_identity(folder)})}
    for place, folders, files in os.walk(folder, followlinks=True, onerror=_refuse_walking):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            inner = os.path.join(place, name)
            if _identity(inner) in above[place]:
                raise RecordError(
                    f"{inner}: is a link to a folder that contains it, an endless loop; "
                    "remove the link"
                )
            above[inner] = above[place] | {_identity(inner)}
        names.extend(os.path.join(place, name) for name in files if not name.startswith("."))
        del above[place]
    return sorted(names)


def _identity(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        refuse_file(path, error)
    return status.st_dev, status.st_ino


def _refuse_walking(error: OSError) -> NoReturn:
    refuse_file(str(error.filename), error)
