"""Opens a dataset in an object store: tables come first and are kept, shards become sparse files.

Two round trips: the manifest and the list of files; then lengths, batch table, files and tokenizer,
in parallel. Nothing else is read until a document is needed (`residency`). The tables are kept in a
cache folder of this URL and manifest, so an opening after the first takes one round trip, and what
was fetched of the shards is not fetched again. A file of the store that is not the one that was
opened before is an error.

Each opening checks what the cache holds: tables and other small files against the manifest's
checksums, or against those of what was fetched; shards by their size. What is damaged or missing is
fetched again, once.

The lengths take 8 bytes a document on this machine. Those of a dataset with checksums of ranges are
sparse files, too, and come before they are read (`length_ranges`); others are fetched as a whole at
the first opening.
"""

import errno
import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from penstock.core.errors import CorruptionError, FormatError
from penstock.core.folders import base_name, cache_folder
from penstock.core.json_files import seal_of
from penstock.core.json_values import JsonObject
from penstock.core.urls import url_key
from penstock.data.shards.format.images import (
    ASSETS,
    PROCESSOR_FILES,
    PROCESSOR_FOLDER,
    assets_path,
)
from penstock.data.shards.format.manifest import (
    MANIFEST,
    TOKENIZER_FILES,
    TOKENIZER_FOLDER,
    Manifest,
)
from penstock.data.shards.remote.length_ranges import lazy_tables
from penstock.data.stores.daemons import DaemonPool, result_of
from penstock.data.stores.files import (
    check_size,
    checksum,
    make_way,
    map_file,
    read_json,
    write_file,
    write_json,
)
from penstock.data.stores.store import Store, StoredFile
from penstock.data.stores.transfer import fetch_file
from penstock.data.stores.unit_record import cache_errors

_log = logging.getLogger("penstock.shards")

_NOTE = "store.json"
_READERS = 16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFolder:
    """What is on this machine of a remote dataset."""

    store: Store
    kept: Path
    """Its folder in the cache."""
    folder: Path
    """The one below it that looks like a dataset."""
    stamps: dict[str, str]
    """File that is read by ranges → the stamp that it must have in the store."""
    lost: tuple[str, ...]
    """Shards that were damaged or missing here: what they held has to come again."""


def fetch_tables(url: str | os.PathLike[str], cache: str | os.PathLike[str] | None) -> RemoteFolder:
    """Have a folder with everything of a remote dataset but the bytes of its shards, which are
    sparse files.

    Args:
        url: The dataset's folder in a store.
        cache: Where copies are kept; None: `penstock.core.folders.cache_folder`.

    Raises:
        StoreError: The store cannot be read.
        FormatError: There is no dataset.
        CorruptionError: A file is missing, or is not what the manifest or the cache says.
        OutputError: The cache cannot be written.
    """
    store = Store(url)
    with DaemonPool(2) as pool:
        listing = pool.submit(
            store.listing, [f"{TOKENIZER_FOLDER}/{name}" for name in TOKENIZER_FILES]
        )
        reading = pool.submit(store.read_if_there, MANIFEST)
        content, listed = result_of(reading), result_of(listing)
    if content is None:
        raise FormatError(_not_a_dataset(store, listed))
    manifest = Manifest.parse(content, store.url)
    if not store.lists:
        processor = [
            f"{PROCESSOR_FOLDER}/{name}" for name in PROCESSOR_FILES if manifest.has_images
        ]
        listed |= store.listing(
            [*manifest.checksums, *(shard.file for shard in manifest.shards), *processor]
        )
    _check_listed(store, manifest, listed)
    digest = hashlib.blake2b(
        f"{url_key(store.address.full)}\n".encode() + content, digest_size=12
    ).hexdigest()
    kept = cache_folder(cache) / f"{base_name(store.url)}-{digest}"
    folder = kept / "data" / base_name(store.url)
    with cache_errors(store.url, kept):
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(kept):
            note = _read_note(kept)
            sums = _complete(store, kept, manifest, content, listed, note)
            lost = _shards_in_place(folder, manifest)
            stamps = note["stamps"] if note else _listed_stamps(manifest, listed)
            if not note or sums != note["sums"]:
                _write_note(kept, store, manifest, stamps, sums)
            _refuse_replaced(store, kept, manifest, listed, stamps)
    if note and lost:
        _log.warning(
            "%s: %s in %s: damaged or removed, fetched again",
            store.url,
            ", ".join(lost[:3]),
            folder,
        )
    return RemoteFolder(store=store, kept=kept, folder=folder, stamps=stamps, lost=tuple(lost))


def _write_note(
    kept: Path, store: Store, manifest: Manifest, stamps: dict[str, str], sums: dict[str, int]
) -> None:
    """Note that all tables are here, with what is in the manifest for none of the files."""
    make_way(kept / _NOTE)
    note = {"url": store.url, "fingerprint": manifest.fingerprint, "stamps": stamps, "sums": sums}
    write_json(kept / _NOTE, {**note, "checksum": seal_of(note, 8)})


def _read_note(kept: Path) -> JsonObject | None:
    """What was noted of an opening; None: none was finished, or the note is damaged.

    Notes of earlier versions have no checksums, and files that the manifest has none of are fetched
    again.
    """
    try:
        found = read_json(kept / _NOTE)
        seal = found.pop("checksum", None)
        if "sums" in found and seal != seal_of(found, 8):
            return None
        stamps = {str(name): str(stamp) for name, stamp in found["stamps"].items()}
        return {
            "stamps": stamps,
            "sums": {name: int(one) for name, one in found.get("sums", {}).items()},
        }
    except (CorruptionError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _not_a_dataset(store: Store, listed: Mapping[str, StoredFile]) -> str:
    splits = [name for name in ("train", "validation") if f"{name}/{MANIFEST}" in listed]
    if splits:
        return f"{store.url}: holds {' and '.join(splits)}; give {store.url}/{splits[0]}"
    found = (
        "no such folder"
        if not listed
        else f"no {MANIFEST}, so its upload did not finish, or it is something else"
    )
    return (
        f"{store.url}: not a dataset: {found}; give the URL of a folder that `penstock "
        "prepare` made, or copy it there again (`penstock copy`)"
    )


def _check_listed(store: Store, manifest: Manifest, listed: Mapping[str, StoredFile]) -> None:
    """Compare what the store lists with the manifest."""
    for name, expected in {
        **dict.fromkeys(manifest.checksums, None),
        **_ranged(manifest),
    }.items():
        if name not in listed:
            what = "is missing" if store.lists else "is missing, or may not be read"
            raise CorruptionError(
                f"{store.where(name)}: the file {what}; upload it again (`penstock copy`)"
            )
        size = listed[name].size
        if expected is not None and size not in (None, expected):
            raise CorruptionError(
                f"{store.where(name)}: {size} bytes, expected {expected}: it was replaced or "
                "cut; upload it again (`penstock copy`)"
            )


def _complete(
    store: Store,
    kept: Path,
    manifest: Manifest,
    content: bytes,
    listed: Mapping[str, StoredFile],
    note: JsonObject | None,
) -> dict[str, int]:
    """Have all files of the dataset here as they are in the store, but of the shards only the
    sizes; the manifest last.

    Returns:
        The checksums of the files that the manifest has none of.
    """
    lazy, folder = lazy_tables(manifest), kept / "data" / base_name(store.url)
    sealed = {
        name: one
        for name, one in manifest.checksums.items()
        if not name.endswith(ASSETS) and name not in lazy
    }
    sums = dict(note["sums"]) if note else {}
    others = [
        name for name in listed if name not in {*sealed, *lazy, MANIFEST} and _is_wanted(name)
    ]
    whole = [name for name in lazy if (folder / name).exists()]
    if not all(_is_sound(folder / name, manifest.checksums[name]) for name in whole):
        # Earlier versions have fetched lengths as a whole; if they are damaged, they come in
        # ranges.
        for name in whole:
            (folder / name).unlink()
    expected: dict[str, int | None] = {**sealed, **{name: sums.get(name) for name in others}}
    came = missing = [name for name, one in expected.items() if not _is_sound(folder / name, one)]
    if note and missing:
        _log.warning(
            "%s: %s in %s: damaged or removed, fetched again",
            store.url,
            ", ".join(missing[:3]),
            folder,
        )
    for last in (False, True):
        _fetch(store, folder, missing, listed)
        missing = [
            name
            for name in missing
            if name in sealed and not _is_sound(folder / name, sealed[name])
        ]
        if missing and last:
            raise CorruptionError(
                f"{store.where(missing[0])}: differs from its checksum, also when it was "
                f"fetched again into {kept}; upload it again (`penstock copy`)"
            )
    if not _has_content(folder / MANIFEST, content):
        make_way(folder / MANIFEST)
        write_file(folder / MANIFEST, content)
    return {
        name: checksum(map_file(folder / name)) if name in came else sums[name] for name in others
    }


def _fetch(store: Store, folder: Path, names: list[str], listed: Mapping[str, StoredFile]) -> None:
    """Fetch some files into a folder."""
    for name in names:
        make_way(folder / name)
    with DaemonPool(_READERS) as pool:
        coming = [
            pool.submit(
                fetch_file, store, name, listed[name].size, folder / name, listed[name].stamp
            )
            for name in names
        ]
        for name, one in zip(names, coming, strict=True):
            if not result_of(one):
                raise CorruptionError(
                    f"{store.where(name)}: the file is missing; upload it again (`penstock copy`)"
                )


def _is_sound(path: Path, expected: int | None) -> bool:
    """Whether a file of the cache has a checksum (None: it was never fetched)."""
    try:
        return (
            expected is not None and not path.is_symlink() and checksum(map_file(path)) == expected
        )
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EISDIR, errno.ENXIO, errno.ENOTDIR):
            return False
        raise


def _has_content(path: Path, content: bytes) -> bool:
    return path.is_file() and not path.is_symlink() and path.read_bytes() == content


def _shards_in_place(folder: Path, manifest: Manifest) -> list[str]:
    """Have a sparse file of full size for each shard; returns those that were missing, cut, or
    something else.

    Another process may have mapped an old file, so that is removed, not cut.
    """
    lost = []
    for name, size in _shards(manifest).items():
        path = folder / name
        try:
            check_size(path, size)
        except CorruptionError:
            lost.append(name)
            make_way(path)
            path.unlink(missing_ok=True)
            with open(path, "wb") as file:
                file.truncate(size)
    return lost


def _ranged(manifest: Manifest) -> dict[str, int]:
    """The files that are read by ranges, with their bytes: shards, their images, and lengths of
    large datasets.
    """
    return _shards(manifest) | lazy_tables(manifest)


def _shards(manifest: Manifest) -> dict[str, int]:
    """The shards and the files of their images, with their bytes."""
    found = {one.file: one.bytes for one in manifest.shards}
    return found | {
        assets_path(Path(one.file)).name: one.assets for one in manifest.shards if one.assets
    }


def _is_wanted(name: str) -> bool:
    """Whether a file that has no checksum is one of a dataset: reports, and the tokenizer."""
    above, _, last = name.rpartition("/")
    return (not above and last.endswith((".json", ".jinja"))) or above in (
        TOKENIZER_FOLDER,
        PROCESSOR_FOLDER,
    )


def _listed_stamps(manifest: Manifest, listed: Mapping[str, StoredFile]) -> dict[str, str]:
    return {name: listed[name].stamp for name in _ranged(manifest) if name in listed}


def _refuse_replaced(
    store: Store,
    kept: Path,
    manifest: Manifest,
    listed: Mapping[str, StoredFile],
    stamps: Mapping[str, str],
) -> None:
    """The stamps of the shards must be those of the first opening.

    Raises:
        ShardReplacedError: A shard was replaced since.
    """
    for name in _ranged(manifest):
        before, now = stamps.get(name, ""), listed[name].stamp if name in listed else ""
        if before and now and before != now:
            raise ShardReplacedError(
                kept,
                f"{store.where(name)}: was replaced since {kept} was begun ({before} then, "
                f"{now} now), but the manifest was not; restore it, or remove {kept} if its "
                "content is the same",
            )


class ShardReplacedError(CorruptionError):
    """A shard in a store is another object than at the first opening, under the same manifest."""

    def __init__(self, kept: Path, message: str) -> None:
        """Args: the folder of the copies; what to say."""
        super().__init__(message)
        self._kept = kept

    def accept(self) -> None:
        """Let the next opening take the shards as they are, for who has written them."""
        (self._kept / _NOTE).unlink(missing_ok=True)


@contextmanager
def _alone(kept: Path) -> Iterator[None]:
    """One process at a time; others wait."""
    make_way(kept / "opening")
    handle = os.open(kept / "opening", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
