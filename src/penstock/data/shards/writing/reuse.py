"""Reuses finished shards: moves them to another dataset, or reopens a finished dataset.

Shards are linked, not copied, if the file system supports it. A shard is the same in every dataset
with the same settings, except for the numbers of its origin files, which depend on the other files.
If these differ, the shard is checked and copied with other numbers.
"""

import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import DTypeLike

from penstock.core.arrays import Array
from penstock.core.errors import CorruptionError, FormatError
from penstock.data.shards.format._kernels import BATCH, DOCUMENTS_PER_BATCH
from penstock.data.shards.format.images import assets_path
from penstock.data.shards.format.layout import other_places
from penstock.data.shards.format.manifest import (
    BATCHES,
    LENGTHS,
    MANIFEST,
    WEIGHT_SUMS,
    Manifest,
    ShardInfo,
)
from penstock.data.shards.writing.finish import (
    has_files,
    load_shard,
    save_sides,
    side_batches,
    side_lengths,
    side_weight_sums,
)
from penstock.data.shards.writing.stubs import stub_path
from penstock.data.stores.files import (
    checksum,
    map_file,
    map_numbers,
    output_errors,
    sync,
    write_file,
)

_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES}


@final
class ShardStore:
    """The shards of a folder with a finished or unfinished dataset.

    A finished dataset with a damaged manifest, lengths, batch table or sums counts as empty: reused
    shards get new checksums, which would hide the damage.

    Args:
        folder: Nothing is written to it. The lengths of a finished dataset are read once, for their
            checksum.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)
        self._places: dict[str, tuple[ShardInfo, int, int]] = {}
        if (self._folder / MANIFEST).is_file():
            try:
                manifest = Manifest.load(self._folder)
                self._joined = _joined_sides(self._folder, manifest)
            except (FormatError, OSError):
                return
            shards = manifest.shards
            documents = accumulate((shard.documents for shard in shards), initial=0)
            batches = accumulate((shard.batches for shard in shards), initial=0)
            self._places = {
                shard.file: (shard, first, batch)
                for shard, first, batch in zip(shards, documents, batches, strict=False)
            }

    @property
    def finished(self) -> tuple[str, ...]:
        """Names of the shards of a finished dataset."""
        return tuple(self._places)

    def find(self, name: str) -> ShardInfo | None:
        """The description of a shard by name; None if it is missing or has the wrong size."""
        if name not in self._places:
            return load_shard(self._folder, name)
        info = self._places[name][0]
        path = self._folder / name
        return info if has_files(path, info) else None

    def hand_over(self, name: str, folder: Path, new_name: str, files: Mapping[int, int]) -> bool:
        """Hand a shard over to an unfinished dataset.

        Args:
            name: Name of the shard.
            folder: Folder of the other dataset.
            new_name: Name of the shard in the other dataset.
            files: Number of each origin file here → its number in the other dataset.

        Returns:
            Whether the other dataset has it now; False if it is missing or damaged here, or is in a
            store and would need another name or other numbers.

        Raises:
            OutputError: The other folder cannot be written.
        """
        info = self.find(name)
        if info is None:
            return False
        lengths, batches, weight_sums = self.sides(info)
        target = folder / new_name
        if not (self._folder / name).is_file():
            # In a store, it keeps its name and its bytes.
            if name != new_name or any(old != new for old, new in files.items()):
                return False
            _link(stub_path(self._folder / name), stub_path(target))
        elif all(old == new for old, new in files.items()):
            _link(self._folder / name, target)
        elif (data := _renumbered(self._folder / name, info, batches, files)) is not None:
            write_file(target, data)
            info = replace(info, checksum=checksum(data))
        else:
            return False
        if info.assets and assets_path(self._folder / name).is_file():
            _link(assets_path(self._folder / name), assets_path(target))
        sync(folder)
        save_sides(folder, replace(info, file=new_name), lengths, batches, [weight_sums])
        return True

    def sides(self, info: ShardInfo) -> tuple[Array, Array, Array]:
        """Lengths, batch table and weight sums of a shard that `find` returned."""
        if info.file not in self._places:
            folder = self._folder
            return (
                side_lengths(folder, info),
                side_batches(folder, info),
                side_weight_sums(folder, info),
            )
        (_, first, batch), (lengths, batches, sums) = self._places[info.file], self._joined
        rows = slice(first, first + info.documents)
        return lengths[rows], batches[batch : batch + info.batches], sums[rows].astype(np.float64)


def reopen_dataset(folder: Path) -> None:
    """Turn a finished dataset back into an unfinished one, so that its shards may change, until
    `finish_dataset`.

    The shards get their side files back, and the manifest is removed. A missing or damaged shard
    gets none, and must be written again. Without a manifest, nothing is done; so if killed
    meanwhile, call it again.

    Raises:
        OutputError: The folder cannot be written.
    """
    if not (folder / MANIFEST).is_file():
        return
    store = ShardStore(folder)
    for info in filter(None, map(store.find, store.finished)):
        lengths, batches, weight_sums = store.sides(info)
        save_sides(folder, info, lengths, batches, [weight_sums])
    with output_errors(folder):
        (folder / MANIFEST).unlink()
        # The manifest must not reappear after a power failure, next to other shards.
        sync(folder)


def _joined_sides(folder: Path, manifest: Manifest) -> tuple[Array, Array, Array]:
    """Lengths, batch table and weight sums of a finished dataset, checked against its manifest.

    Raises:
        CorruptionError: They are missing or damaged.
    """

    def load(name: str, dtype: DTypeLike, *shape: int) -> Array:
        found = map_numbers(folder / name, dtype, shape)
        if checksum(found) != manifest.checksums[name]:
            raise CorruptionError(
                f"{folder / name}: its checksum differs; copy it again, or prepare again"
            )
        return found

    lengths = load(LENGTHS, "<u4", manifest.documents, 2)
    batches = load(BATCHES, BATCH, sum(shard.batches for shard in manifest.shards))
    sums = (
        load(WEIGHT_SUMS, "<f8", manifest.documents)
        if manifest.fractional_weights
        else lengths[:, 1]
    )
    return lengths, batches, sums


def _link(source: Path, target: Path) -> None:
    with output_errors(target):
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            partial = target.with_name(f"{target.name}.partial")
            shutil.copyfile(source, partial)
            sync(partial)
            os.replace(partial, target)


def _renumbered(
    path: Path, info: ShardInfo, batches: Array, files: Mapping[int, int]
) -> Array | None:
    """The bytes of a shard with other numbers of origin files; None if the shard is damaged."""
    data = np.array(map_file(path))
    if checksum(data) != info.checksum:
        return None
    numbers = np.full(max(files, default=-1) + 1, -1, np.int32)
    numbers[list(files)] = list(files.values())
    for number, line in enumerate(batches):
        rows = min(DOCUMENTS_PER_BATCH, info.documents - number * DOCUMENTS_PER_BATCH)
        place = other_places(data, line, rows)[0]
        column = data[place : place + 4 * rows].view(np.int32)
        if column.min(initial=0) < 0 or column.max(initial=0) >= len(numbers):
            return None
        column[:] = numbers[column]
    return data
