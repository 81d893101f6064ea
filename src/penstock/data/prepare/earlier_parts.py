"""Finished parts of earlier and killed runs, which are reused if their input is still the same.

`Earlier` finds parts of earlier runs by what they read. A part is the same if the sizes and times
of its files are, or else the bytes that it read, and if the encoder is the same. So a file with
only a new time costs reading its bytes, and lines appended to a large file cost its last part.

`Interrupted` finds the parts that a killed run of the same preparation left in its folder. A
manifest there is valid as long as nothing next to it changes: all code that changes something
removes the manifest first. An iterable from Python may give other records than last time, which
then take the same places.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from penstock.data.prepare.hashes import copy_hashes
from penstock.data.prepare.part import Workshop, copy_lines, digest_of, stamp_of
from penstock.data.prepare.part_record import (
    HASHES,
    PARTS,
    REJECTED,
    UNSETTLED,
    PartRecord,
    files_of,
    finished_numbers,
    forget_part,
    has_hashes,
    hashes_path,
    load_record,
    rejects_path,
    save_record,
    shard_name,
)
from penstock.data.reports.report import REPORT
from penstock.data.shards.writing.reuse import ShardStore, reopen_dataset
from penstock.data.sources import Part
from penstock.data.stores.files import output_errors


@final
@dataclass(frozen=True, slots=True)
class Kept:
    """A finished part of an earlier run."""

    home: Path
    """The folder of its preparation."""
    number: int
    record: PartRecord
    rejects: Path
    """The file with its rejects."""
    first_reject: int
    """Lines of other parts before them."""
    hashes: Path
    """The file with the hashes of its documents, if duplicates are dropped."""
    first_hash: int
    """Hashes of other parts before them."""


@final
class Earlier:
    """Finished parts of earlier runs in other folders.

    Args:
        homes: Folders of preparations with the same settings; the first that has a part is used.
        shop: The preparation that may use the parts.
    """

    def __init__(self, homes: Sequence[Path], shop: Workshop) -> None:
        self._shop = shop
        self._kept: dict[str, list[Kept]] = {}
        for home in homes:
            for kept in _kept_in(home):
                if shop.settings.accepts(kept.record.rejects, kept.record.damaged):
                    self._kept.setdefault(kept.record.identity, []).append(kept)
        self._stores: dict[Path, ShardStore] = {}

    def find(self, part: Part) -> Kept | None:
        """The finished part with the same input and encoder, if its files exist.

        Call this after the check of the encoder, which may choose another.
        """
        return next(
            (kept for kept in self._kept.get(part.identity, ()) if self._is_same(kept, part)), None
        )

    def take(self, kept: Kept, number: int, part: Part, files: Sequence[int]) -> PartRecord | None:
        """Move a finished part to the preparation; None if its shards or rejects are missing or
        damaged.

        Args:
            kept: The finished part.
            number: Number of the part in the preparation.
            part: The part in the preparation.
            files: Numbers of its files in the preparation.
        """
        output, target = self._shop.output, rejects_path(self._shop.output, number)
        if (count := kept.record.rejects) and not copy_lines(
            kept.rejects, kept.first_reject, count, target
        ):
            return None
        if self._shop.settings.drop_duplicates:
            total, place = sum(kept.record.hashed.values()), hashes_path(output, number)
            if not copy_hashes(
                kept.hashes, kept.first_hash, total, kept.record.hashes_checksum, place
            ):
                return None
        numbers = dict(zip(kept.record.files, files, strict=True))
        for split, name in kept.record.shards.items():
            if not self._store(kept.home / split).hand_over(
                name, output / split, shard_name(number), numbers
            ):
                return None
        shards = dict.fromkeys(kept.record.shards, shard_name(number))
        record = replace(
            kept.record, stamp=stamp_of(part), files=list(files), shards=shards,
            dropped_from={
                split: {str(numbers[int(file)]): count for file, count in counts.items()}
                for split, counts in kept.record.dropped_from.items()
            },
        )  # fmt: skip
        save_record(output, number, record)
        return record

    def _is_same(self, kept: Kept, part: Part) -> bool:
        record = kept.record
        if record.encoder != self._shop.tokenizer.encoder or (
            record.rejects and not kept.rejects.is_file()
        ):
            return False
        if record.drops == UNSETTLED:
            return False
        if any(
            self._store(kept.home / split).find(name) is None
            for split, name in record.shards.items()
        ):
            return False
        return record.stamp == stamp_of(part) or (
            record.digest != "" and record.digest == digest_of(part)
        )

    def _store(self, folder: Path) -> ShardStore:
        if folder not in self._stores:
            self._stores[folder] = ShardStore(folder)
        return self._stores[folder]


def _kept_in(home: Path) -> Iterator[Kept]:
    """The finished parts of a preparation that may itself be unfinished."""
    if not (home / REPORT).is_file():
        for number in finished_numbers(home):
            record = load_record(home, number)
            if record is not None:
                yield Kept(
                    home,
                    number,
                    record,
                    rejects_path(home, number),
                    0,
                    hashes_path(home, number),
                    0,
                )
        return
    rejects = hashes = 0
    for number, record in enumerate(finished_records(home)):
        yield Kept(home, number, record, home / REJECTED, rejects, home / HASHES, hashes)
        rejects += record.rejects
        hashes += sum(record.hashed.values())


def finished_records(home: Path) -> list[PartRecord]:
    """The parts of a finished preparation; empty if they are unknown."""
    try:
        return [PartRecord(**one) for one in json.loads((home / PARTS).read_bytes())]
    except (OSError, ValueError, TypeError):
        return []


@final
class Interrupted:
    """Finished parts that a killed run left in the folder of a preparation; none in a new folder.

    Args:
        shop: The preparation.
    """

    def __init__(self, shop: Workshop) -> None:
        self._shop = shop
        self._folders = {split: shop.output / split for split in shop.settings.splits}
        self._open_stores()

    def find(self, number: int, part: Part) -> PartRecord | None:
        """The record of a part, if exactly this part was finished with the same encoder, and its
        files exist.

        Call this after the check of the encoder, which may choose another.
        """
        record = load_record(self._shop.output, number)
        if record is None or not self._shop.settings.accepts(record.rejects, record.damaged):
            return None
        if (record.identity, record.stamp) != (part.identity, stamp_of(part)):
            return None
        if record.encoder != self._shop.tokenizer.encoder:
            return None
        if record.rejects and not rejects_path(self._shop.output, number).is_file():
            return None
        if self._shop.settings.drop_duplicates and not has_hashes(
            hashes_path(self._shop.output, number), record
        ):
            return None
        complete = all(
            self._stores[split].find(name) is not None for split, name in record.shards.items()
        )
        return record if complete else None

    def forget(self, number: int) -> None:
        """Remove a part that is made again, or is no longer part of the input."""
        self.reopen()
        record = load_record(self._shop.output, number)
        if record is not None:
            forget_part(self._shop.output, number, record)

    def keep_only(self, records: Mapping[int, PartRecord]) -> None:
        """Remove everything that belongs to no part of this run: a killed run may have had other or
        more records.
        """
        for number in finished_numbers(self._shop.output):
            if number not in records:
                self.forget(number)
        for split, folder in self._folders.items():
            expected = {
                name
                for record in records.values()
                if (name := record.shards.get(split)) is not None
            }
            expected = {path.name for name in expected for path in files_of(folder / name)}
            with output_errors(folder):
                for path in folder.glob("part-*"):
                    if path.name not in expected:
                        path.unlink()

    def reopen(self) -> None:
        """Remove the manifests that a killed run may have written, before something next to them
        changes.
        """
        for folder in self._folders.values():
            reopen_dataset(folder)
        self._open_stores()

    def _open_stores(self) -> None:
        self._stores = {split: ShardStore(folder) for split, folder in self._folders.items()}
