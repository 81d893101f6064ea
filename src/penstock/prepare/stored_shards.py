"""A preparation whose shards are in a store: each goes there from the node that made it, once.

A shard is made in a temporary folder and uploaded, and a stub takes its place in the output, next to its side files. So
the output, and the program that started the work, hold small files only. A stub counts as long as its object is the one
that was uploaded: objects that are missing or were replaced, by tasks of a killed run for example, are made again.
"""

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import final

from penstock.core.errors import CorruptionError, OutputError
from penstock.shards import Manifest, ShardInfo, ShardLayout
from penstock.shards.copying import fetch_file
from penstock.shards.files import checksum, map_file, output_errors, write_file
from penstock.shards.finish import (
    fingerprint_pieces,
    save_sides,
    side_batches,
    side_lengths,
    side_weight_sums,
)
from penstock.shards.images import ASSETS, assets_path
from penstock.shards.manifest import MANIFEST
from penstock.shards.stores import Store, StoredFile
from penstock.shards.stubs import ENDING, Stub, load_stub, save_stub, stub_path, upload_shard

MAKING = "making-"
"""Prefix of temporary folders in the working folder."""

_SHARDS = re.compile(rf"part-\d{{6}}(\.arrow|{re.escape(ASSETS)})")
_TOGETHER = 16


@contextmanager
def made_apart(scratch: Path | None, splits: Sequence[str]) -> Iterator[Path]:
    """A temporary folder for the shards of a part, with a folder for each split.

    Args:
        scratch: The folder to create it in; None: that of this machine for temporary files.
        splits: Their names.
    """
    with tempfile.TemporaryDirectory(prefix=MAKING if scratch else "penstock-part-", dir=scratch) as name:
        for split in splits:
            (Path(name) / split).mkdir(exist_ok=True)
        yield Path(name)


def put_shard(url: str, split: str, made: Path, output: Path, info: ShardInfo, layout: ShardLayout) -> None:
    """Move a finished shard to the store, and its side files to the output; one without documents goes to the output.

    Args:
        url: The store's folder for the preparation.
        split: Name of the split.
        made: The folder where it was made.
        output: The folder of the preparation.
        info: The shard.
        layout: Its layout.

    Raises:
        StoreError: The store cannot be written.
    """
    here, target = made / split, output / split
    lengths, batches = side_lengths(here, info), side_batches(here, info)
    if info.documents:
        pieces: tuple[list[bytes], list[bytes]] = [], []
        for kind, piece in fingerprint_pieces(map_file(here / info.file), batches, lengths, layout):
            pieces[kind].append(bytes(piece))
        words, extras = map(b"".join, pieces)
        name = object_name(split, info.file)
        save_stub(target / info.file, upload_shard(Store(url), name, here / info.file, info, words, extras))
    else:
        write_file(target / info.file, map_file(here / info.file))
    save_sides(target, info, lengths, batches, [side_weight_sums(here, info)])


def get_shard(url: str, stub: Stub, path: Path) -> None:
    """Write a shard of the store, and its images, to a path.

    Raises:
        CorruptionError: Another object has taken its place.
        StoreError: The store cannot be read.
    """
    store = Store(url)
    for (name, stored), target, expected in zip(
        stub.objects().items(), (path, assets_path(path)), (stub.checksum, stub.assets_checksum), strict=False
    ):
        fetch_file(store, name, stored.size, target, stored.stamp)
        if checksum(map_file(target)) != expected:
            raise CorruptionError(f"{store.where(name)}: was replaced by another object meanwhile")


def object_name(split: str, file: str) -> str:
    """The name of a file of a split in the store."""
    return f"{split}/{file}" if split else file


@final
class StoreOutput:
    """Where a preparation into a store puts its shards.

    Args:
        url: The store's folder.
        replaced: Manifests of datasets that are there, and will be replaced.
        complete: Manifests of this very preparation that are there already: only the rest is to be copied.
    """

    def __init__(self, url: str, replaced: Sequence[str], complete: Sequence[str]) -> None:
        self.url, self._store = url, Store(url)
        self._replaced, self._complete = replaced, complete

    def begin(self, home: Path, *, is_finished: bool) -> bool:
        """Make the store ready, before the first shard comes.

        Removes the manifests of datasets that will be replaced, and stubs whose objects are no longer there.

        Args:
            home: The locked folder of the preparation.
            is_finished: Whether it is complete, and its input has not changed.

        Returns:
            Whether all shards with stubs are there.

        Raises:
            OutputError: A dataset is there, and must not be replaced.
        """
        if self._complete and not is_finished:
            raise OutputError(
                f"{self._store.where(self._complete[0])}: a dataset is there already; choose another URL, or replace "
                "it with overwrite (--overwrite)"
            )
        for name in self._replaced:
            self._store.remove(name)
        shards = [path.with_name(path.name.removesuffix(ENDING)) for path in home.rglob(f"part-*{ENDING}")]
        return not self._forget_lost(shards, self._store.listing()) if shards else True

    def settle(self, output: Path, splits: Sequence[str], parts: Iterable[Mapping[str, str]]) -> None:
        """Check that the shards of all parts are there, and remove those of no part.

        Args:
            output: The folder of the preparation.
            splits: Names of the splits.
            parts: Split → file name, for the splits of each part.

        Raises:
            OutputError: Some are not: they were removed or replaced meanwhile.
        """
        listed = self._store.listing()
        shards = [output / split / file for part in parts for split, file in part.items()]
        lost = self._forget_lost(shards, listed)
        if lost:
            raise OutputError(
                f"{self._store.where(lost[0])}: was removed or replaced meanwhile{_more(len(lost) - 1)}; run it again: "
                "all other parts are kept"
            )
        expected = {name for shard in shards for name in _objects(shard)}
        old = [
            name
            for name in listed
            if name not in expected and _SHARDS.fullmatch(Path(name).name) and _folder(name) in splits
        ]
        with ThreadPoolExecutor(_TOGETHER) as pool:
            list(pool.map(self._store.remove, old))

    def stored(self, home: Path) -> dict[str, StoredFile]:
        """The files of the finished datasets in a folder that are in the store already, by name."""
        found: dict[str, StoredFile] = {}
        for folder in (home, home / "train", home / "validation"):
            if (folder / MANIFEST).is_file():
                shards = [folder / shard.file for shard in Manifest.load(folder).shards]
                for shard in shards:
                    found |= {} if shard.is_file() else _objects(shard)
        return found

    def _forget_lost(self, shards: Sequence[Path], listed: dict[str, StoredFile]) -> list[str]:
        """Remove the stubs of some shards whose objects are not there as they were uploaded; returns their names."""

        def lost(shard: Path) -> list[str]:
            return [name for name, one in _objects(shard).items() if not self._has(name, one, listed)]

        with ThreadPoolExecutor(_TOGETHER) as pool:
            found = list(zip(shards, pool.map(lost, shards), strict=True))
        for shard, names in found:
            if names:
                with output_errors(shard):
                    stub_path(shard).unlink(missing_ok=True)
        return [name for _, names in found for name in names]

    def _has(self, name: str, expected: StoredFile, listed: dict[str, StoredFile]) -> bool:
        if name not in listed or listed[name] == expected:
            return name in listed
        # A listing may report other stamps than a look-up, from which the stub has its own.
        return self._store.look_up(name) == expected


def _objects(shard: Path) -> dict[str, StoredFile]:
    stub = load_stub(shard)
    return {} if stub is None else stub.objects()


def _folder(name: str) -> str:
    """The split of an object."""
    return name.rpartition("/")[0]


def _more(count: int) -> str:
    return f", and {count} more" if count else ""
