"""Finished parts of earlier runs: found again by what they read, used again where that is still the same.

A part is the same when the sizes and times of its files are, or else the bytes that it read. So a file that was only
touched costs a look at its bytes, and lines that were appended to a large file cost its last part.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from penstock.prepare.part import (
    PARTS,
    REJECTED,
    REPORT,
    WORK,
    PartRecord,
    Workshop,
    digest_of,
    load_record,
    rejects_path,
    save_record,
    shard_name,
    stamp_of,
)
from penstock.prepare.rejects import copy_lines
from penstock.prepare.settings import PrepareSettings
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
    first_reject: int | None
    """Rejects of the parts before it, where those of all parts are in one file."""


@final
class Earlier:
    """What earlier runs left in some folders.

    Args:
        homes: Folders of preparations with the same settings; of a part that is in several, the first counts.
        settings: What is done about bad records and damaged files.
    """

    def __init__(self, homes: Sequence[Path], settings: PrepareSettings) -> None:
        self._kept: dict[str, Kept] = {}
        for home in homes:
            for kept in _kept_in(home):
                if settings.accepts(kept.record.rejects, kept.record.damaged):
                    self._kept.setdefault(kept.record.identity, kept)
        self._stores: dict[Path, ShardStore] = {}

    def find(self, part: Part) -> Kept | None:
        """The finished part that read the same."""
        kept = self._kept.get(part.identity)
        if kept is None:
            return None
        record = kept.record
        same = record.stamp == stamp_of(part) or (record.digest != "" and record.digest == digest_of(part))
        return kept if same else None

    def take(self, kept: Kept, shop: Workshop, number: int, part: Part, files: Sequence[int]) -> PartRecord | None:
        """Give a finished part to another preparation; None where its shards are missing or damaged.

        Args:
            kept: The part.
            shop: The other preparation.
            number: Of the part there.
            part: What it reads.
            files: Numbers of its files there.
        """
        numbers = dict(zip(kept.record.files, files, strict=True))
        for split, name in kept.record.shards.items():
            store = self._stores.setdefault(kept.home / split, ShardStore(kept.home / split))
            if not store.hand_over(name, shop.output / split, shard_name(number), numbers):
                return None
        target = rejects_path(shop.output, number)
        if kept.record.rejects and kept.first_reject is not None:
            copy_lines(kept.home / REJECTED, kept.first_reject, kept.record.rejects, target)
        elif kept.record.rejects:
            shutil.copyfile(rejects_path(kept.home, kept.number), target)
        shards = dict.fromkeys(kept.record.shards, shard_name(number))
        record = replace(kept.record, stamp=stamp_of(part), files=list(files), shards=shards)
        save_record(shop.output, number, record)
        return record


def _kept_in(home: Path) -> Iterator[Kept]:
    """The finished parts of a preparation, finished as a whole or not."""
    if not (home / REPORT).is_file():
        for path in sorted((home / WORK).glob("part-??????.json")):
            number = int(path.stem.removeprefix("part-"))
            record = load_record(home, number)
            if record is not None:
                yield Kept(home, number, record, None)
        return
    rejects = 0
    for number, record in enumerate(finished_records(home)):
        yield Kept(home, number, record, rejects)
        rejects += record.rejects


def finished_records(home: Path) -> list[PartRecord]:
    """The parts of a finished preparation; empty where they are not known any more."""
    try:
        return [PartRecord(**one) for one in json.loads((home / PARTS).read_bytes())]
    except (OSError, ValueError, TypeError):
        return []
