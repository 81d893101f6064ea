"""Opens a dataset in an object store: tables come first and are kept, shards become sparse files.

Two round trips: the manifest and the list of files; then lengths, batch table, files and tokenizer, in parallel.
Nothing else is read until a document is needed (`residency`). The tables are kept in a cache folder of this URL and
manifest, so an opening after the first takes one round trip, and what was fetched of the shards is not fetched again.
Lengths are checked against their checksum as a whole. A file that is not the one that was opened before is an error.

The lengths take 8 bytes a document on this machine. Those of a dataset with checksums of ranges are sparse files, too,
and come before they are read (`length_ranges`); others are fetched as a whole at the first opening.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from penstock.core.errors import CorruptionError, FormatError
from penstock.core.folders import base_name, cache_folder
from penstock.core.urls import url_key
from penstock.shards.copying import fetch_file
from penstock.shards.files import checksum, map_file, output_errors, read_json, write_file, write_json
from penstock.shards.images import ASSETS, PROCESSOR_FOLDER, assets_path
from penstock.shards.layout import TOKENIZER_FOLDER
from penstock.shards.length_ranges import lazy_tables
from penstock.shards.manifest import MANIFEST, Manifest
from penstock.shards.stores import TOKENIZER_FILES, Store, StoredFile

_NOTE = "store.json"
_READERS = 16


def fetch_tables(
    url: str | os.PathLike[str], cache: str | os.PathLike[str] | None
) -> tuple[Store, Path, dict[str, str]]:
    """Have a folder with everything of a remote dataset but the bytes of its shards, which are sparse files.

    Args:
        url: The dataset's folder in a store.
        cache: Where copies are kept; None: `penstock.core.folders.cache_folder`.

    Returns:
        The store, the folder, and the stamp of each shard.

    Raises:
        StoreError: The store cannot be read.
        FormatError: There is no dataset.
        CorruptionError: A file is missing, or is not what the manifest or the cache says.
        OutputError: The cache cannot be written.
    """
    store = Store(url)
    with ThreadPoolExecutor(2) as pool:
        listing = pool.submit(store.listing, [f"{TOKENIZER_FOLDER}/{name}" for name in TOKENIZER_FILES])
        reading = pool.submit(store.read_if_there, MANIFEST)
        content, listed = reading.result(), listing.result()
    if content is None:
        raise FormatError(_not_a_dataset(store, listed))
    manifest = Manifest.parse(content, store.url)
    if not store.lists:
        listed |= store.listing([*manifest.checksums, *(shard.file for shard in manifest.shards)])
    _check_listed(store, manifest, listed)
    digest = hashlib.blake2b(f"{url_key(store.address.full)}\n".encode() + content, digest_size=12).hexdigest()
    kept = cache_folder(cache) / f"{base_name(store.url)}-{digest}"
    folder = kept / "data" / base_name(store.url)
    with output_errors(kept):
        folder.mkdir(parents=True, exist_ok=True)
    with _alone(kept):
        if not (kept / _NOTE).is_file():
            _fetch(store, folder, manifest, content, listed)
            stamps = {name: listed[name].stamp for name in _ranged(manifest) if name in listed}
            write_json(kept / _NOTE, {"url": store.url, "fingerprint": manifest.fingerprint, "stamps": stamps})
        return store, folder, _stamps(store, kept, manifest, listed)


def _not_a_dataset(store: Store, listed: Mapping[str, StoredFile]) -> str:
    splits = [name for name in ("train", "validation") if f"{name}/{MANIFEST}" in listed]
    if splits:
        return f"{store.url}: holds {' and '.join(splits)}; give {store.url}/{splits[0]}"
    found = "no such folder" if not listed else f"no {MANIFEST}, so its upload did not finish, or it is something else"
    return (
        f"{store.url}: not a dataset: {found}; give the URL of a folder that `penstock prepare` made, or copy it there "
        "again (`penstock copy`)"
    )


def _check_listed(store: Store, manifest: Manifest, listed: Mapping[str, StoredFile]) -> None:
    """Compare what the store lists with the manifest."""
    for name, expected in {
        **dict.fromkeys(manifest.checksums, None),
        **_ranged(manifest),
    }.items():
        if name not in listed:
            raise CorruptionError(f"{store.where(name)}: the file is missing; upload it again (`penstock copy`)")
        size = listed[name].size
        if expected is not None and size not in (None, expected):
            raise CorruptionError(
                f"{store.where(name)}: {size} bytes, expected {expected}: it was replaced or cut; upload it again "
                "(`penstock copy`)"
            )


def _fetch(store: Store, folder: Path, manifest: Manifest, content: bytes, listed: Mapping[str, StoredFile]) -> None:
    """Write all files of the dataset, but of the shards only the sizes; the manifest last."""
    lazy = lazy_tables(manifest)
    names = [name for name in manifest.checksums if not name.endswith(ASSETS) and name not in lazy]
    names += [name for name in listed if name not in {*names, *lazy, MANIFEST} and _is_wanted(name)]
    with ThreadPoolExecutor(_READERS) as pool:
        coming = [
            pool.submit(fetch_file, store, name, listed[name].size, folder / name, listed[name].stamp) for name in names
        ]
        for one in coming:
            one.result()
    for name, expected in manifest.checksums.items():
        if name.endswith(ASSETS) or name in lazy:
            continue
        if not (folder / name).is_file():
            raise CorruptionError(f"{store.where(name)}: the file is missing; upload it again (`penstock copy`)")
        if checksum(map_file(folder / name)) != expected:
            raise CorruptionError(f"{store.where(name)}: differs from its checksum; upload it again (`penstock copy`)")
    for name, size in _shards(manifest).items():
        with output_errors(folder / name), open(folder / name, "ab") as file:
            file.truncate(size)
    write_file(folder / MANIFEST, content)


def _ranged(manifest: Manifest) -> dict[str, int]:
    """The files that are read by ranges, with their bytes: shards, their images, and lengths of large datasets."""
    return _shards(manifest) | lazy_tables(manifest)


def _shards(manifest: Manifest) -> dict[str, int]:
    """The shards and the files of their images, with their bytes."""
    found = {one.file: one.bytes for one in manifest.shards}
    return found | {assets_path(Path(one.file)).name: one.assets for one in manifest.shards if one.assets}


def _is_wanted(name: str) -> bool:
    """Whether a file that has no checksum is one of a dataset: reports, and the tokenizer."""
    above, _, last = name.rpartition("/")
    return (not above and last.endswith((".json", ".jinja"))) or above in (TOKENIZER_FOLDER, PROCESSOR_FOLDER)


def _stamps(store: Store, kept: Path, manifest: Manifest, listed: Mapping[str, StoredFile]) -> dict[str, str]:
    """The stamps of the shards, which must be those of the first opening.

    Raises:
        CorruptionError: A shard was replaced since.
    """
    stamps: dict[str, str] = read_json(kept / _NOTE, f"remove {kept}")["stamps"]
    for name in _ranged(manifest):
        before, now = stamps.get(name, ""), listed[name].stamp if name in listed else ""
        if before and now and before != now:
            raise CorruptionError(
                f"{store.where(name)}: was replaced since {kept} was begun ({before} then, {now} now), but the "
                f"manifest was not; restore it, or remove {kept} if its content is the same"
            )
    return stamps


@contextmanager
def _alone(kept: Path) -> Iterator[None]:
    """One process at a time; others wait."""
    with output_errors(kept):
        handle = os.open(kept / "opening", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
