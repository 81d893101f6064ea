"""Preparing into an object store: on this machine first, then copied.

The preparation is made in a folder of the cache that belongs to the URL, so a killed one goes on: parts that are
finished are not prepared again, and files that were copied are not copied again. The manifest is copied last. The
folder is removed at the end.
"""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.core.errors import OutputError
from penstock.core.folders import base_name, cache_folder
from penstock.prepare.report import PrepareReport
from penstock.shards.copying import SPLITS, copy_dataset
from penstock.shards.manifest import MANIFEST
from penstock.shards.stores import Store


def prepare_remote(
    url: str, overwrite: bool, progress: bool, prepare: Callable[[Path], PrepareReport]
) -> PrepareReport:
    """Prepare into a folder, and copy the result to a URL.

    Args:
        url: Where the result goes.
        overwrite: Replace a dataset that is there.
        progress: Show a bar.
        prepare: Prepares into a folder.

    Raises:
        OutputError: A dataset is there already.
        StoreError: The store cannot be read or written.
    """
    store = Store(url)
    folder = (
        cache_folder() / "prepared" / f"{base_name(url)}-{hashlib.blake2b(url.encode(), digest_size=8).hexdigest()}"
    )
    there = [f"{split}{MANIFEST}" for split in SPLITS if store.read_if_there(f"{split}{MANIFEST}") is not None]
    if there and not overwrite and not folder.is_dir():
        raise OutputError(
            f"{store.where(there[0])}: a dataset is there already; choose another URL, or replace it with overwrite "
            "(--overwrite)"
        )
    report = prepare(folder)
    for name in there if overwrite else ():
        store.remove(name)
    copy_dataset(folder, url, progress=progress)
    shutil.rmtree(folder)
    return replace(report, output=url)
