"""A folder that is on the disk whole or not at all, and a manifest that tells whether its files are still the same.

It is written under a hidden name beside its own. Every file and folder is forced to the disk (fsync), then the manifest
with size and SHA-256 of each file, then the folder gets its name (an atomic rename), then that name is forced to the
disk. Whatever the moment of a kill or a power cut, a visible folder with a manifest is complete; a folder to be
deleted loses its visible name first. An older folder of the same name is set aside as `NAME.old` until the new one has
the name, so there is no moment without one.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import OutputError

MANIFEST = "manifest.json"
OLD = ".old"
_PARTIAL, _DELETED = ".partial", ".deleted"


@contextmanager
def output_errors(folder: Path) -> Iterator[None]:
    """Turn a failure to write below `folder` into an error that says what became of what was there."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(_message(folder, error.strerror or str(error))) from error
    except Exception as error:
        # safetensors reports a full disk by an exception of its own, which is no OSError.
        if type(error).__name__ != "SafetensorError":
            raise
        raise OutputError(_message(folder, str(error))) from error


def _message(folder: Path, reason: str) -> str:
    return (
        f"{folder}: the checkpoint cannot be written: {reason}; earlier checkpoints are untouched; make room or choose "
        "another folder, then resume"
    )


def begin(target: Path) -> Path:
    """An empty hidden folder beside `target`, to be filled; what killed processes left there is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.iterdir():
        if left.name.startswith(".") and left.suffix in (_PARTIAL, _DELETED):
            shutil.rmtree(left)
    partial = target.with_name(f".{target.name}{_PARTIAL}")
    partial.mkdir()
    return partial


def finish(partial: Path, target: Path, facts: dict[str, Any]) -> None:
    """Force the files of `partial` to the disk, add the manifest, and give it its name.

    Args:
        partial: What `begin` gave, filled.
        target: Its name.
        facts: What else the manifest tells.
    """
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(partial.rglob("*")):
        if path.is_file():
            files[path.relative_to(partial).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest(path)}
        _sync(path)
    manifest = partial / MANIFEST
    manifest.write_text(json.dumps({**facts, "files": files}, indent=1) + "\n", encoding="utf-8")
    _sync(manifest)
    _sync(partial)
    old = target.with_name(target.name + OLD)
    if target.exists():
        remove(old)
        os.rename(target, old)
    os.rename(partial, target)
    _sync(target.parent)
    remove(old)


def remove(folder: Path) -> None:
    """Delete a folder, if there; it is never visible in part."""
    if folder.exists():
        hidden = folder.with_name(f".{folder.name}{_DELETED}")
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(folder, hidden)
        shutil.rmtree(hidden)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest; None where there is none that can be read."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        told = [(name, due["bytes"], due["sha256"]) for name, due in manifest["files"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return None if any("\0" in name for name, _, _ in told) else manifest


def damage(folder: Path, *, contents: bool = True) -> str | None:
    """What is wrong with a folder that `finish` made, a sentence; None where all is well.

    Args:
        folder: Where it is.
        contents: Whether to read all files and compare their checksums (about 1 GB a second), not only their sizes.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{MANIFEST} is missing or cannot be read, so it was never complete"
    for name, due in manifest["files"].items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != due["bytes"]:
                return f"{name} has {size} bytes, {due['bytes']} were written"
            if contents and digest(path) != due["sha256"]:
                return f"the bytes of {name} differ from their checksum"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
