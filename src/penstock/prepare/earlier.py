"""Finished parts of earlier runs: found again by what they read, used again where that is still the same.

A part is the same when the sizes and times of its files are, or else the bytes that it read, and when the same encoder
is at work. So a file that was only touched costs a look at its bytes, and lines that were appended to a large file cost
its last part.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from penstock.prepare.part import (
    PARTS,
    REJECTED,
    REPORT,
    PartRecord,
    Workshop,
    digest_of,
    finished_numbers,
    load_record,
    rejects_path,
    save_record,
    shard_name,
    stamp_of,
)
from penstock.prepare.rejects import copy_lines
from penstock.shards import ShardStore
from penstock.sources import Part


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


@final
class Earlier:
    """What earlier runs left in some folders.

    Args:
        homes: Folders of preparations with the same settings; of a part that is in several, the first counts.
        shop: The preparation that may use it.
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
        """The finished part that read the same and was encoded the same way, if its files are there.

        To be asked after the look at the input, which chooses the encoder.
        """
        return next((kept for kept in self._kept.get(part.identity, ()) if self._is_same(kept, part)), None)

    def take(self, kept: Kept, number: int, part: Part, files: Sequence[int]) -> PartRecord | None:
        """Give a finished part to the preparation; None where its shards or rejects are missing or damaged.

        Args:
            kept: The part.
            number: Of the part there.
            part: What it reads.
            files: Numbers of its files there.
        """
        output, target = self._shop.output, rejects_path(self._shop.output, number)
        if (count := kept.record.rejects) and not copy_lines(kept.rejects, kept.first_reject, count, target):
            return None
        numbers = dict(zip(kept.record.files, files, strict=True))
        for split, name in kept.record.shards.items():
            if not self._store(kept.home / split).hand_over(name, output / split, shard_name(number), numbers):
                return None
        shards = dict.fromkeys(kept.record.shards, shard_name(number))
        record = replace(kept.record, stamp=stamp_of(part), files=list(files), shards=shards)
        save_record(output, number, record)
        return record

    def _is_same(self, kept: Kept, part: Part) -> bool:
        record = kept.record
        if record.encoder != self._shop.tokenizer.encoder or (record.rejects and not kept.rejects.is_file()):
            return False
        if any(self._store(kept.home / split).find(name) is None for split, name in record.shards.items()):
            return False
        return record.stamp == stamp_of(part) or (record.digest != "" and record.digest == digest_of(part))

    def _store(self, folder: Path) -> ShardStore:
        if folder not in self._stores:
            self._stores[folder] = ShardStore(folder)
        return self._stores[folder]


def _kept_in(home: Path) -> Iterator[Kept]:
    """The finished parts of a preparation, finished as a whole or not."""
    if not (home / REPORT).is_file():
        for number in finished_numbers(home):
            record = load_record(home, number)
            if record is not None:
                yield Kept(home, number, record, rejects_path(home, number), 0)
        return
    rejects = 0
    for number, record in enumerate(finished_records(home)):
        yield Kept(home, number, record, home / REJECTED, rejects)
        rejects += record.rejects


def finished_records(home: Path) -> list[PartRecord]:
    """The parts of a finished preparation; empty where they are not known any more."""
    try:
        return [PartRecord(**one) for one in json.loads((home / PARTS).read_bytes())]
    except (OSError, ValueError, TypeError):
        return []
