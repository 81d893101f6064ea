"""Prepare all parts that are not finished yet, by one crew, and take over those that are."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from penstock.core.errors import OutputError
from penstock.core.terminal import Progress
from penstock.data.prepare.duplicates import drop_duplicates
from penstock.data.prepare.earlier_parts import Earlier, Interrupted, Kept, finished_records
from penstock.data.prepare.executors import MakeCrew
from penstock.data.prepare.folder import OutputFolder, Place
from penstock.data.prepare.part import Progressed, Task, Workshop, prepare_part, using_copies
from penstock.data.prepare.part_record import PartRecord
from penstock.data.prepare.pool import Pool
from penstock.data.prepare.probe import check_encoder, checked_first
from penstock.data.prepare.stored_shards import StoreOutput
from penstock.data.reports.report import REPORT
from penstock.data.sources import Part
from penstock.data.sources.json_files import number_lines

FREE_SHARE = 0.2
"""Free bytes required per raw byte; less than any real text takes, so a refusal is never wrong."""
Found = tuple[Part, PartRecord | None, Kept | None]
"""A part; its record, if an interrupted run finished it; and what an earlier run kept of it."""


@final
@dataclass(frozen=True, slots=True)
class Done:
    """The results of all parts."""

    records: list[PartRecord]
    resumed: int
    """Number of parts that were already finished."""
    files: list[str]
    """Names of all files."""
    unchanged: bool
    """Whether the finished dataset in the output is still the right one."""


@final
class Work:
    """The work on all parts of one preparation; `run` does it, once.

    Args:
        shop: The preparation.
        folder: Its output.
        place: Where in the output this run writes, and the earlier runs whose parts it may take
            over.
        store: Where shards go as soon as they are made; None: they stay in the folder.
        progress: Show a bar.
        verbose: Report the settings of chats too.
    """

    def __init__(
        self,
        shop: Workshop,
        folder: OutputFolder,
        place: Place,
        store: StoreOutput | None,
        *,
        progress: bool,
        verbose: bool,
    ) -> None:
        self._shop, self._folder, self._place, self._store = shop, folder, place, store
        self._progress, self._verbose = progress, verbose
        self._interrupted, self._earlier = Interrupted(shop), Earlier(place.earlier, shop)
        self._listed: list[Part] = []
        self._files: dict[str, int] = {}
        self._records: dict[int, PartRecord] = {}
        self._resumed = 0
        self._stayed: set[int] = set()
        """Numbers of the parts that are finished in the output itself, as the same parts of the
        same files.
        """

    def run(self, parts: list[Part] | Iterator[Part], make_crew: MakeCrew) -> Done:
        """Prepare the parts; the records are complete when this returns."""
        shop = self._shop
        for split in shop.settings.splits:
            (shop.output / split).mkdir(exist_ok=True)
        with Pool(shop, make_crew(shop, self._folder)) as pool:
            found, total = self._survey(parts, pool)
            with Progress(
                "preparing",
                total=total,
                unit="B",
                enabled=self._progress,
                rates={"tokens": "tok/s"},
            ) as bar:

                def advance(size_bytes: int, tokens: int, rejects: int) -> None:
                    bar.advance(
                        size_bytes, tokens=tokens, **({"rejects": rejects} if rejects else {})
                    )

                self._records.update(pool.run(_prepare_one, self._tasks(found), advance))
            self._interrupted.keep_only(self._records)
            self._drop_duplicates(pool)
            if self._store is not None:
                while lost := self._store.find_lost(shop.output, self._records):
                    self._records.update(self._prepare_again(pool, lost))
                    self._drop_duplicates(pool)
                self._store.keep_only(shop.output, self._records, shop.settings.splits)
        ordered = [self._records[number] for number in sorted(self._records)]
        return Done(ordered, self._resumed, list(self._files), self._is_unchanged())

    def _survey(
        self, parts: list[Part] | Iterator[Part], pool: Pool
    ) -> tuple[Iterable[Found], int | None]:
        """Each part with what is finished of it, after the check of the encoder; and the bytes to
        prepare, if known.
        """
        shop = self._shop
        if not isinstance(parts, list):
            return self._stream(checked_first(shop, parts, self._progress, self._verbose)), None
        self._listed = _numbered(parts, pool)
        if check_encoder(shop, self._listed, self._progress, self._verbose):
            pool.renew()  # the workers that counted lines have the old tokenizer
        found = [
            (part, self._interrupted.find(number, part), self._earlier.find(part))
            for number, part in enumerate(self._listed)
        ]
        missing = sum(
            part.size_bytes for part, there, kept in found if there is None and kept is None
        )
        if self._store is None:
            _check_room(shop, missing)
        return found, missing

    def _stream(self, parts: Iterator[Part]) -> Iterator[Found]:
        """Parts from Python, as they come.

        None can be prepared again later, should others be duplicates now, so one that lost
        documents is not taken over.
        """
        for number, part in enumerate(parts):
            there, kept = self._interrupted.find(number, part), self._earlier.find(part)
            yield part, _whole(there), kept if kept and _whole(kept.record) else None

    def _tasks(self, found: Iterable[Found]) -> Iterator[tuple[str, Task]]:
        """The tasks of the missing parts; the records of the others are taken over."""
        for number, (part, there, kept) in enumerate(found):
            files = tuple(self._files.setdefault(name, len(self._files)) for name in part.files)
            record = there
            if record is None:
                self._interrupted.forget(number)
                record = self._earlier.take(kept, number, part, files) if kept is not None else None
            if record is None:
                yield part.name, Task(number, part, files)
                continue
            self._records[number] = record
            self._resumed += 1
            same = (self._folder.path, number, [*files])
            if kept is not None and (kept.home, kept.number, kept.record.files) == same:
                self._stayed.add(number)

    def _drop_duplicates(self, pool: Pool) -> None:
        """Remove from the parts the documents that earlier parts have."""
        if self._shop.settings.drop_duplicates:
            again = partial(self._prepare_again, pool)
            reopen, progress = self._interrupted.reopen, self._progress
            self._records = drop_duplicates(
                self._shop, pool, self._records, again, reopen, progress
            )

    def _prepare_again(
        self, pool: Pool, numbers: Sequence[int]
    ) -> Iterator[tuple[int, PartRecord]]:
        """Prepare finished parts once more, as if they were not."""
        if not self._listed:
            raise OutputError(
                f"{self._shop.output}: a shard was lost while it was written; run it again"
            )
        for number in numbers:
            self._interrupted.forget(number)
            self._stayed.discard(number)
        listed = self._listed
        tasks = [
            (listed[n].name, Task(n, listed[n], tuple(self._records[n].files))) for n in numbers
        ]
        return pool.run(_prepare_one, tasks, lambda *_: None)

    def _is_unchanged(self) -> bool:
        """Whether the dataset that is finished in the output has exactly the parts of this run."""
        path = self._folder.path
        finished = len(finished_records(path)) if (path / REPORT).is_file() else -1
        return self._place.path != path and finished == len(self._records) == len(self._stayed)


def _whole(record: PartRecord | None) -> PartRecord | None:
    """The record, unless documents were dropped from its part."""
    return None if record is None or record.drops else record


def _prepare_one(shop: Workshop, task: Task, report: Progressed) -> tuple[int, PartRecord]:
    with using_copies(shop):
        return task.number, prepare_part(shop, task, report)


def _check_room(shop: Workshop, missing_bytes: int) -> None:
    needed = FREE_SHARE * missing_bytes
    free = shutil.disk_usage(shop.output).free
    if free < needed:
        raise OutputError(
            f"{shop.output}: {free / 1e6:,.1f} MB are free, but at least {needed / 1e6:,.1f} "
            "MB are needed; make room or choose another folder"
        )


def _numbered(parts: list[Part], pool: Pool) -> list[Part]:
    """Give ranges of large files their first line numbers, counted in the pool."""

    def count(_: object, ranges: Iterable[Any]) -> Iterable[Any]:
        listed = list(ranges)
        found = dict(
            pool.run(
                _count, [(part.name, (n, part)) for n, part in enumerate(listed)], lambda: None
            )
        )
        return [found[n] for n in range(len(listed))]

    return number_lines(parts, count)


def _count(shop: Workshop, argument: tuple[int, Any], report: object) -> tuple[int, Any]:
    number, part = argument
    with using_copies(shop):
        return number, part.survey()
