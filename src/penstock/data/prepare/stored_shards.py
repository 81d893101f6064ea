"""Preparing with the shards in a store: each goes there once, from the node that made it.

A shard is made in a temporary folder and uploaded, and a stub takes its place in the output, next
to its side files. So the output, and the program that started the work, hold small files only. A
stub counts as long as its object is the one that was uploaded: objects that are missing or were
replaced, by tasks of a killed run for example, are made again.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final

from penstock.core.errors import CorruptionError, OutputError
from penstock.data.prepare.part_record import PartRecord
from penstock.data.shards import Manifest, ShardInfo, ShardLayout
from penstock.data.shards.copying import SPLITS
from penstock.data.shards.format.images import ASSETS, assets_path
from penstock.data.shards.format.manifest import MANIFEST
from penstock.data.shards.writing.finish import (
    fingerprint_pieces,
    save_sides,
    side_batches,
    side_lengths,
    side_weight_sums,
)
from penstock.data.shards.writing.stubs import (
    ENDING,
    Stub,
    load_stub,
    save_stub,
    stub_path,
    upload_shard,
)
from penstock.data.stores.daemons import DaemonPool
from penstock.data.stores.files import checksum, map_file, output_errors, write_file
from penstock.data.stores.store import Store, StoredFile
from penstock.data.stores.transfer import fetch_file

MAKING = "making-"
"""Prefix of temporary folders in the working folder."""

_SHARDS = re.compile(rf"part-\d{{6}}(\.arrow|{re.escape(ASSETS)})")
_TOGETHER = 16
_MOST_LOSSES = 5
"""How often shards may be lost in one run."""


@contextmanager
def made_apart(scratch: Path | None, splits: Sequence[str]) -> Iterator[Path]:
    """A temporary folder for the shards of a part, with a folder for each split.

    Args:
        scratch: The folder to create it in; None: that of this machine for temporary files.
        splits: Their names.
    """
    with tempfile.TemporaryDirectory(
        prefix=MAKING if scratch else "penstock-part-", dir=scratch
    ) as name:
        for split in splits:
            (Path(name) / split).mkdir(exist_ok=True)
        yield Path(name)


def put_shard(
    url: str, split: str, made: Path, output: Path, info: ShardInfo, layout: ShardLayout
) -> None:
    """Move a finished shard to the store, and its side files to the output; one without documents
    goes to the output.

    Args:
        url: The full URL of the store's folder for the preparation.
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
        save_stub(
            target / info.file,
            upload_shard(Store(url), name, here / info.file, info, words, extras),
        )
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
        stub.objects().items(),
        (path, assets_path(path)),
        (stub.checksum, stub.assets_checksum),
        strict=False,
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
        url: The full URL of the store's folder.
        replaced: Manifests of datasets that are there, and will be replaced.
        complete: Manifests of this very preparation that are there already: only the rest is to be
            copied.
    """

    def __init__(self, url: str, replaced: Sequence[str], complete: Sequence[str]) -> None:
        self._store = Store(url)
        self.url, self.address = self._store.url, self._store.address
        """As it is shown, and what opens it."""
        self._replaced, self._complete = replaced, complete
        self._losses = 0

    def begin(self, home: Path, *, is_finished: bool) -> bool:
        """Make the store ready, before the first shard comes.

        Removes the manifests of datasets that will be replaced, and stubs whose objects are no
        longer there.

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
                f"{self._store.where(self._complete[0])}: a dataset is there already; choose "
                "another URL, or replace it with overwrite (--overwrite)"
            )
        for name in self._replaced:
            self._store.remove(name)
        shards = [
            path.with_name(path.name.removesuffix(ENDING)) for path in home.rglob(f"part-*{ENDING}")
        ]
        return not self._forget_lost(shards, self._store.listing()) if shards else True

    def find_lost(self, output: Path, records: Mapping[int, PartRecord]) -> list[int]:
        """Numbers of the parts of which shards are no longer in the store as they were uploaded;
        forgets these stubs.

        A task that Ray runs again may have replaced them by equal ones, a task of a killed run by
        others.

        Raises:
            OutputError: Again and again.
        """
        owners = {
            output / split / file: n
            for n, record in records.items()
            for split, file in record.shards.items()
        }
        lost = self._forget_lost(list(owners), self._store.listing())
        self._losses += bool(lost)
        if self._losses > _MOST_LOSSES:
            where = self._store.where(str(lost[0].relative_to(output)))
            raise OutputError(
                f"{where}: is removed or replaced again and again; let no other program write "
                "there, then run it again: finished parts are kept"
            )
        return sorted({owners[shard] for shard in lost})

    def keep_only(
        self, output: Path, records: Mapping[int, PartRecord], splits: Sequence[str]
    ) -> None:
        """Remove the shards in the store that belong to no part: a killed run may have had other or
        more of them.
        """
        expected = {
            name
            for record in records.values()
            for split, file in record.shards.items()
            for name in _objects(output / split / file)
        }
        old = [
            name
            for name in self._store.listing()
            if name not in expected
            and _SHARDS.fullmatch(Path(name).name)
            and name.rpartition("/")[0] in splits
        ]
        with DaemonPool(_TOGETHER) as pool:
            list(pool.map(self._store.remove, old))

    def stored(self, home: Path) -> dict[str, StoredFile]:
        """The files of the finished datasets in a folder that are in the store already, by name."""
        found: dict[str, StoredFile] = {}
        for folder in (home / split for split in SPLITS):
            if (folder / MANIFEST).is_file():
                shards = [folder / shard.file for shard in Manifest.load(folder).shards]
                for shard in shards:
                    found |= {} if shard.is_file() else _objects(shard)
        return found

    def _forget_lost(self, shards: Sequence[Path], listed: dict[str, StoredFile]) -> list[Path]:
        """Remove the stubs of shards that are not in the store as they were uploaded; returns these
        shards.
        """

        def is_there(shard: Path) -> bool:
            return all(self._has(name, one, listed) for name, one in _objects(shard).items())

        with DaemonPool(_TOGETHER) as pool:
            lost = [
                shard
                for shard, there in zip(shards, pool.map(is_there, shards), strict=True)
                if not there
            ]
        for shard in lost:
            with output_errors(shard):
                stub_path(shard).unlink(missing_ok=True)
        return lost

    def _has(self, name: str, expected: StoredFile, listed: dict[str, StoredFile]) -> bool:
        if name not in listed or listed[name] == expected:
            return name in listed
        # A listing may report other stamps than a look-up, from which the stub has its own.
        return self._store.look_up(name) == expected


def _objects(shard: Path) -> dict[str, StoredFile]:
    stub = load_stub(shard)
    return {} if stub is None else stub.objects()
