"""Preparing into a store: in a folder of the cache that belongs to the URL; its files are copied at
the end.

Where several machines may write to the store at once, shards go there as soon as they are made,
from the node that made them (`prepare/stored_shards.py`), and the folder holds small files only. A
killed preparation goes on: parts that are finished are not prepared again, and files that were
copied are not copied again. The manifest is copied last. The folder is removed at the end.
"""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.core.errors import OutputError
from penstock.core.folders import base_name, cache_folder
from penstock.core.urls import url_key
from penstock.data.prepare.stored_shards import StoreOutput
from penstock.data.reports.report import PrepareReport
from penstock.data.shards.copying import SPLITS, copy_dataset
from penstock.data.shards.format.manifest import MANIFEST
from penstock.data.stores.store import Store


def prepare_remote(
    url: str,
    overwrite: bool,
    progress: bool,
    prepare: Callable[[Path, StoreOutput | None], PrepareReport],
) -> PrepareReport:
    """Prepare into a URL.

    Args:
        url: Where the result goes.
        overwrite: Replace a dataset that is there.
        progress: Show a bar.
        prepare: Prepares into a folder, and its shards into the store, if one is given.

    Raises:
        OutputError: A dataset is there already.
        StoreError: The store cannot be read or written.
    """
    store = Store(url)
    folder = folder_of(url)
    found = {name: store.read_if_there(name) for name in (f"{split}{MANIFEST}" for split in SPLITS)}
    there = {name: content for name, content in found.items() if content is not None}
    if not overwrite and (
        strange := [name for name, content in there.items() if not _is(folder / name, content)]
    ):
        raise OutputError(
            f"{store.where(strange[0])}: a dataset is there already; choose another URL, or "
            "replace it with overwrite (--overwrite)"
        )
    replaced = list(there) if overwrite else []
    output = (
        StoreOutput(url, replaced, [] if overwrite else list(there)) if store.is_shared else None
    )
    report = prepare(folder, output)
    if output is None:
        for name in replaced:
            store.remove(name)
    copy_dataset(
        folder, url, progress=progress, stored={} if output is None else output.stored(folder)
    )
    shutil.rmtree(folder)
    splits = {split: replace(one, path=store.where(split)) for split, one in report.splits.items()}
    return replace(report, output=store.url, splits=splits)


def folder_of(url: str) -> Path:
    """The folder of this machine for a preparation into a URL."""
    digest = hashlib.blake2b(url_key(url).encode(), digest_size=8).hexdigest()
    return cache_folder() / "prepared" / f"{base_name(url)}-{digest}"


def _is(file: Path, content: bytes) -> bool:
    """Whether a file has this content."""
    return file.is_file() and file.read_bytes() == content
