"""Fetches whole files of a store, and has temporary folders for them on the disk of the cache."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.core.folders import cache_folder
from penstock.data.stores.daemons import DaemonPool
from penstock.data.stores.files import output_errors, write_file
from penstock.data.stores.store import Store
from penstock.data.stores.unit_record import cache_errors

_TOGETHER = 4
_REQUEST_BYTES = 32 << 20
_temporary: set[Path] = set()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A temporary folder on the disk of the cache."""
    base = cache_folder()
    with cache_errors("temporary files", base):
        base.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="copy-", dir=base))
    _temporary.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _temporary.discard(folder)


@atexit.register
def _remove_temporary() -> None:
    """Those of threads that the end of the process leaves where they wait."""
    for folder in list(_temporary):
        shutil.rmtree(folder, ignore_errors=True)


def fetch_file(store: Store, name: str, size: int | None, path: Path, stamp: str = "") -> bool:
    """Write a file of a store to a path; a large one in several requests. Returns whether there is
    one.

    Raises:
        StoreError: The store cannot be read.
        OutputError: The path cannot be written.
    """
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    if size is None:
        if (data := store.read_if_there(name)) is None:
            return False
        write_file(path, data)
        return True
    begins = range(0, size, _REQUEST_BYTES)
    partial = path.with_name(f"{path.name}.partial")
    with DaemonPool(_TOGETHER) as pool, output_errors(path), open(partial, "wb") as file:
        for first in range(0, len(begins), _TOGETHER):
            spans = [
                (begin, min(begin + _REQUEST_BYTES, size))
                for begin in begins[first : first + _TOGETHER]
            ]
            for data in pool.map(
                lambda span: store.read_range(name, span[0], span[1], stamp), spans
            ):
                file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return True
