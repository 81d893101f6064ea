"""Copies datasets between folders and object stores; a copy that was interrupted goes on.

Every file with a checksum is checked on its way, and the manifest is written last, so a copy with a
manifest is complete. In a store, a note next to the files says which ones are there already; in a
folder, their checksums do.
"""

import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from penstock.core.errors import ConfigError, CorruptionError, FormatError, OutputError
from penstock.core.folders import is_url, local_path
from penstock.core.terminal import Progress
from penstock.data.shards.cards import may_replace, write_card
from penstock.data.shards.format.images import PROCESSOR_FILES, PROCESSOR_FOLDER
from penstock.data.shards.format.manifest import (
    MANIFEST,
    TOKENIZER_FILES,
    TOKENIZER_FOLDER,
    Manifest,
)
from penstock.data.stores.daemons import DaemonPool, result_of
from penstock.data.stores.files import (
    check_regular,
    checksum,
    map_file,
    output_errors,
    sync,
    write_file,
)
from penstock.data.stores.hub import CARD, is_whole, make_repository
from penstock.data.stores.store import RefusedError, Store, StoredFile
from penstock.data.stores.transfer import fetch_file, temporary_folder

SPLITS = ("", "train/", "validation/")
"""Where a folder may hold datasets."""
_FOLDERS = {"train", "validation", TOKENIZER_FOLDER, PROCESSOR_FOLDER}
"""Folders that are copied."""
REPORTS = ("report.json", "prepare.json", "parts.json", "rejected.jsonl", "hashes.bin")
"""Files of a preparation, with which a later one in the same place goes on."""
NOTE = "copying.json"
NOTE_SECONDS = 5.0
"""How often it is written: a copy that is killed does at most so much again."""
_TOGETHER = 4

_log = logging.getLogger("penstock.shards")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file to be copied."""

    name: str
    size: int | None
    """Bytes; None: not known."""
    checksum: int | None
    """None: it has none."""


def copy_dataset(
    source: str | Path,
    output: str | Path,
    *,
    progress: bool = False,
    check: bool = True,
    stored: Mapping[str, StoredFile] = MappingProxyType({}),
) -> int:
    """Copy a dataset, or a folder with the datasets `train` and `validation`, from anywhere to
    anywhere.

    ```python
    copy_dataset("data/web", "s3://bucket/web")
    copy_dataset("s3://bucket/web", "data/web")
    ```

    If it was interrupted, the same call goes on: files that are there already are not copied again.

    On the Hub (`hf://datasets/OWNER/NAME`), a repository that is not there is made, private, and
    gets a card; a card that somebody wrote stays.

    Args:
        source: A dataset's folder, or its URL.
        output: A new folder, or a URL; or one with an interrupted copy of the same dataset.
        progress: Show a bar.
        check: Refuse files that differ from their checksums; else only those of another size.
        stored: Files that are in the target already, and need not be in the source, by name.

    Returns:
        Bytes that were copied.

    Raises:
        FormatError: The source is not a dataset, or is unfinished.
        CorruptionError: A file is missing, is a link, or differs from its checksum; names it.
        OutputError: The target holds another dataset, or cannot be written.
        StoreError: A store cannot be read or written.
        ConfigError: Source and target are the same.
    """
    origin, goal = _place(source), _place(output)
    if origin.where("") == goal.where(""):
        raise ConfigError(f"{goal.where('')}: source and target are the same")
    manifests = _manifests(origin)
    goal.begin()
    listed = {**origin.listing(manifests), **stored}
    is_finished = True
    for name, content in manifests.items():
        found = goal.read_if_there(name)
        if found is not None and found != content:
            raise OutputError(
                f"{goal.where(name)}: another dataset is there; choose another place, or remove it"
            )
        is_finished &= found is not None
    files = [
        one
        for name, content in manifests.items()
        for one in _files_of(origin, name, content, listed)
    ]
    files += [
        _File(name=name, size=listed[name].size, checksum=None)
        for name in listed
        if _is_report(name, manifests)
    ]
    files = [one for one in files if one.name not in stored]
    digest = hashlib.blake2b(b"".join(manifests.values()), digest_size=16).hexdigest()
    with Progress(
        "copying", total=sum(one.size or 0 for one in files), unit="B", enabled=progress
    ) as bar:
        copied = _copy_files(origin, goal, files, digest, bar, check, is_finished)
    copied += _write_card(origin, goal, manifests)
    if copied or not is_finished:
        for name, content in sorted(manifests.items(), reverse=True):
            goal.write_bytes(name, content)
            copied += len(content)
        goal.remove(NOTE)
    return copied


def _write_card(origin: "_Place", goal: "_Place", manifests: Mapping[str, bytes]) -> int:
    """Write the card of datasets that fill a repository of the Hub, and return its bytes."""
    if not is_whole(goal.where("")):
        return 0
    card, found = (
        write_card(goal.where(""), manifests, origin.read_if_there),
        goal.read_if_there(CARD),
    )
    if found == card:
        return 0
    if not may_replace(found):
        _log.warning("%s: somebody wrote this card, so it stays as it is", goal.where(CARD))
        return 0
    goal.write_bytes(CARD, card)
    return len(card)


def _copy_files(
    origin: "_Place",
    goal: "_Place",
    files: list[_File],
    digest: str,
    bar: Progress,
    check: bool,
    is_finished: bool,
) -> int:
    done = goal.complete(files, digest, is_finished)
    lock, copied = threading.Lock(), 0

    def copy(one: _File) -> None:
        nonlocal copied
        if one.name not in done:
            with origin.local(one) as path:
                if check and one.checksum is not None and checksum(map_file(path)) != one.checksum:
                    raise CorruptionError(
                        f"{origin.where(one.name)}: differs from its checksum; prepare it again"
                    )
                size = path.stat().st_size
                goal.write(one, path, digest)
            with lock:
                copied += size
        with lock:
            bar.advance(one.size or 0)

    try:
        # After a failure, what has not begun is left.
        with DaemonPool(_TOGETHER) as pool:
            for result in [pool.submit(copy, one) for one in files]:
                result_of(result)
    except Exception:  # after Ctrl-C, no store is waited for
        goal.note()
        raise
    return copied


def _manifests(origin: "_Place") -> dict[str, bytes]:
    """The manifests of a place, by name."""
    here, refused = {}, None
    for name in (f"{split}{MANIFEST}" for split in SPLITS):
        try:
            if (content := origin.read_if_there(name)) is not None:
                here[name] = content
        except (
            RefusedError
        ) as error:  # S3 without the right to list says so of files that are not there
            refused = refused or error
    if not here and refused is not None:
        raise refused
    if not here:
        raise FormatError(
            f"{origin.where('')}: not a dataset: no {MANIFEST}; give a folder or URL that "
            "`penstock prepare` finished"
        )
    return here


def _files_of(
    origin: "_Place", name: str, content: bytes, listed: Mapping[str, StoredFile]
) -> Iterator[_File]:
    """The files of one dataset, but its manifest."""
    prefix = name.removesuffix(MANIFEST)
    manifest = Manifest.parse(content, origin.where(prefix.rstrip("/")))
    for shard in manifest.shards:
        here = listed.get(f"{prefix}{shard.file}")
        if here is None or here.size not in (None, shard.bytes):
            found = (
                "is missing" if here is None else f"has {here.size} bytes, expected {shard.bytes}"
            )
            raise CorruptionError(
                f"{origin.where(prefix + shard.file)}: the file {found}; prepare it again"
            )
        yield _File(name=f"{prefix}{shard.file}", size=shard.bytes, checksum=shard.checksum)
    for file, expected in manifest.checksums.items():
        here = listed.get(f"{prefix}{file}")
        if here is None:
            raise CorruptionError(
                f"{origin.where(prefix + file)}: the file is missing; prepare it again"
            )
        yield _File(name=f"{prefix}{file}", size=here.size, checksum=expected)
    for folder in (TOKENIZER_FOLDER, PROCESSOR_FOLDER):
        for file, here in listed.items():
            if file.rpartition("/")[0] == f"{prefix}{folder}":
                yield _File(name=file, size=here.size, checksum=None)


def _is_report(name: str, manifests: Mapping[str, bytes]) -> bool:
    """Whether a file describes the preparation of a dataset; these have no checksums."""
    prefixes = {"", *(manifest.removesuffix(MANIFEST) for manifest in manifests)}
    return name in {f"{prefix}{file}" for prefix in prefixes for file in REPORTS}


@final
class _Folder:
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> None:
        """Nothing is made before the first file."""

    def where(self, name: str) -> str:
        return str(self._path / name) if name else str(self._path.resolve())

    def listing(self, manifests: Mapping[str, bytes]) -> dict[str, StoredFile]:
        found = {}
        for file in self._path.rglob("*"):
            # Files in a linked folder are not listed, and would be left out. A linked file is
            # refused when it is copied: others may lie here.
            if file.name in _FOLDERS and file.is_symlink():
                check_regular(file)
            if file.is_file():
                name = str(file.relative_to(self._path))
                found[name] = StoredFile(size=file.stat().st_size, stamp="")
        return found

    def read_if_there(self, name: str) -> bytes | None:
        file = self._path / name
        if not file.is_file():
            return None
        check_regular(file)
        return file.read_bytes()

    @contextmanager
    def local(self, one: _File) -> Iterator[Path]:
        path = self._path / one.name
        if not path.is_file() or (one.size is not None and path.stat().st_size != one.size):
            raise CorruptionError(
                f"{path}: is missing, or not of {one.size} bytes; prepare it again"
            )
        check_regular(path)
        yield path

    def complete(self, files: list[_File], digest: str, is_finished: bool) -> set[str]:
        return {
            one.name
            for one in files
            if one.checksum is not None
            and (self._path / one.name).is_file()
            and checksum(map_file(self._path / one.name)) == one.checksum
        }

    def write(self, one: _File, path: Path, digest: str) -> None:
        target = self._path / one.name
        partial = target.with_name(f"{target.name}.partial")
        with output_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, partial)
            sync(partial)
            os.replace(partial, target)

    def note(self) -> None:
        """Checksums tell what is there."""

    def write_bytes(self, name: str, content: bytes) -> None:
        write_file(self._path / name, content)

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


@final
class _Remote:
    """A folder of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._noted: dict[str, list[Any]] = {}
        self._digest, self._written = "", time.monotonic()
        self._lock = threading.Lock()

    def begin(self) -> None:
        make_repository(self._store.url)

    def where(self, name: str) -> str:
        return self._store.where(name)

    def listing(self, manifests: Mapping[str, bytes]) -> dict[str, StoredFile]:
        guesses = []
        for name, content in manifests.items():
            prefix = name.removesuffix(MANIFEST)
            manifest = Manifest.parse(content, self.where(prefix))
            guesses += [
                f"{prefix}{file}"
                for file in (*manifest.checksums, *(one.file for one in manifest.shards))
            ]
            guesses += [f"{prefix}{TOKENIZER_FOLDER}/{file}" for file in TOKENIZER_FILES]
            guesses += [
                f"{prefix}{PROCESSOR_FOLDER}/{file}"
                for file in PROCESSOR_FILES
                if manifest.has_images
            ]
            guesses += [f"{prefix}{file}" for file in REPORTS]
        guesses += [file for file in REPORTS if file not in guesses]
        return self._store.listing(guesses)

    def read_if_there(self, name: str) -> bytes | None:
        return self._store.read_if_there(name)

    @contextmanager
    def local(self, one: _File) -> Iterator[Path]:
        with temporary_folder() as folder:
            path = folder / "file"
            fetch_file(self._store, one.name, one.size, path)
            yield path

    def complete(self, files: list[_File], digest: str, is_finished: bool) -> set[str]:
        """What the note of an interrupted copy lists, if it is still there as it was written; if
        the copy was finished, all files of the right size.
        """
        if is_finished:
            listed = self._store.listing([one.name for one in files])
            return {
                one.name
                for one in files
                if one.name in listed and listed[one.name].size == one.size
            }
        note = self._store.read_if_there(NOTE)
        try:
            value = json.loads(note or b"{}")
        except ValueError:
            value = {}
        if not isinstance(value, dict) or value.get("dataset") != digest:
            return set()
        listed, noted = self._store.listing([one.name for one in files]), value.get("files", {})
        self._noted = {
            one.name: noted[one.name]
            for one in files
            if one.name in listed
            and noted.get(one.name) == [listed[one.name].size, listed[one.name].stamp]
        }
        return set(self._noted)

    def write(self, one: _File, path: Path, digest: str) -> None:
        found = self._store.put(one.name, path)
        with self._lock:
            self._noted[one.name] = [found.size, found.stamp]
            self._digest = digest
            if time.monotonic() > self._written + NOTE_SECONDS:
                self._write_note()

    def note(self) -> None:
        """Write the note, if it lacks something."""
        with self._lock:
            if self._digest:
                self._write_note()

    def _write_note(self) -> None:
        self.write_bytes(NOTE, json.dumps({"dataset": self._digest, "files": self._noted}).encode())
        self._digest, self._written = "", time.monotonic()

    def write_bytes(self, name: str, content: bytes) -> None:
        with temporary_folder() as folder:
            (folder / "file").write_bytes(content)
            self._store.write(name, folder / "file")

    def remove(self, name: str) -> None:
        self._store.remove(name)


_Place = _Folder | _Remote


def _place(location: str | Path) -> _Place:
    return (
        _Remote(Store(location)) if is_url(location) else _Folder(local_path(location, "a dataset"))
    )
