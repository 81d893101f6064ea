"""Brings the units of a remote dataset to this machine, keeps them while they are read, and gives
back what is old.

The shards lie in the cache folder as sparse files of their full size, which are mapped once. A unit
is requested by ranges, alone or with others (`stretches`), written into its place, checked against
its checksums, and then noted as present (`unit_record`): what a killed process had begun counts as
absent. Beyond the budget, the
units that were used least recently go: their pages become holes, so that the disk shrinks although
the files stay mapped. A unit that is wanted or read by any process stays.

Reading ahead (`want`) waits for room; reading (`hold`) never does, and exceeds the budget rather
than wait for itself.

What the cache holds may be damaged. Tokens and spans have checksums that are compared whenever they
are read, and are fetched again where they differ (`renew`). Of origins, texts and columns, the
checksum of what was fetched is kept, and compared before this process reads them first.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Bool, Int64
from penstock.core.errors import CorruptionError
from penstock.data.shards.remote.eviction import COMING, HERE, NOT_HERE, Eviction
from penstock.data.shards.remote.sparse_shards import SparseShards
from penstock.data.shards.remote.stretches import Line, Stretches
from penstock.data.shards.remote.unit_fetcher import THREADS, UnitFetcher
from penstock.data.shards.remote.units import PAGE, UnitMap
from penstock.data.shards.tables.holder import EXTRAS, SPANS, TOKENS
from penstock.data.shards.tables.table import DocumentTable
from penstock.data.stores.daemons import LOOK_SECONDS, DaemonPool, refuse_at_end, result_of
from penstock.data.stores.store import Store
from penstock.data.stores.unit_record import (
    ABSENT,
    PRESENT,
    UNSURE,
    UnitRecord,
    cache_errors,
    map_sums,
)

_log = logging.getLogger("penstock.shards")


Units = Annotated[Int64, "units"]


@final
class Residency:
    """The units of one remote dataset on this machine.

    Args:
        store: Where the dataset is.
        folder: Its cache folder; `folder / units` and `folder / locks` are shared with other
            processes.
        shards: The folder with the sparse shards.
        table: Its document table, over the sparse shards.
        units: What they are.
        stamps: File → stamp that it must have.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        shards: Path,
        table: DocumentTable,
        units: UnitMap,
        stamps: dict[str, str],
    ) -> None:
        self.store, self.folder, self.units = store, folder, units
        self._table, self._stamps = table, stamps
        self._shards = SparseShards(store.url, folder, shards, table, units)
        with cache_errors(store.url, folder):
            self._record = UnitRecord(folder, len(units))
            self._sums = map_sums(folder, len(units))
        # Units share bytes and pages, but never take more than this.
        self._record.join(
            self._shards.size, most=4 * int(table.shard_bytes.sum()) + 32 * PAGE * len(units)
        )
        self._sound = np.zeros(len(units), np.bool_)
        self._sound[: units.self_checked] = True
        self._before = store.bytes, store.requests
        self._pins = np.zeros(len(units), np.int32)
        self._mine = np.zeros(len(units), np.uint8)
        self._eviction = Eviction(self._record, units, self._shards, self._mine, self._pins)
        self._coming = 0
        self._errors: dict[int, BaseException] = {}
        self._changed = threading.Condition()
        self._threads = DaemonPool(THREADS, "penstock-units")
        line = Line()
        self._fetcher = UnitFetcher(store, self._shards, table, units, stamps, line)
        self._stretches = Stretches(
            self._record, units, self._mine, self._pins, self.stored_bytes, line
        )
        self._has_warned = False

    def __len__(self) -> int:
        return len(self.units)

    @property
    def stored(self) -> "tuple[Residency]":
        """As in `Holder`: all of it."""
        return (self,)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all shards in the store."""
        return int(self._table.shard_bytes.sum())

    @property
    def fetched_bytes(self) -> int:
        """Bytes of shards that this process fetched."""
        return self.store.bytes - self._before[0]

    @property
    def requests(self) -> int:
        """Requests for shards that this process made."""
        return self.store.requests - self._before[1]

    @property
    def budget(self) -> int | None:
        """Maximum bytes on the disk; None: no limit."""
        return self._eviction.budget

    @budget.setter
    def budget(self, most: int | None) -> None:
        self._eviction.budget = most

    @property
    def size(self) -> int:
        """Bytes of the dataset's units that are on this machine, or on their way, for all
        processes.
        """
        return self._record.used

    @property
    def run_bytes(self) -> int:
        """Mean bytes on the disk that a run of documents takes alone, with its spans and columns;
        of up to 64 runs.
        """
        return self.units.run_bytes((TOKENS, SPANS, EXTRAS))

    # What callers use.

    def find(self, documents: Annotated[Int64, "documents"], kinds: Sequence[int]) -> Units:
        """The units that hold documents."""
        return self.units.of(documents, kinds)

    def is_remote(self, documents: Annotated[Int64, "documents"]) -> Annotated[Bool, "documents"]:
        """[documents] whether each is one of a store."""
        return np.ones(len(documents), np.bool_)

    def file_near(self, document: int, suffix: str) -> tuple[str, Callable[[int, int], bytes]]:
        """The URL of the file with a suffix next to a document's shard, and what reads it; nothing
        of it is kept.
        """
        name = os.path.splitext(self._shards.names[self._table.locate(document)[0]])[0] + suffix

        def read(begin: int, size: int) -> bytes:
            return self.store.read_range(name, begin, begin + size, self._stamps.get(name, ""))

        return self.store.where(name), read

    @contextmanager
    def held(self, units: Units) -> Iterator[None]:
        """Have units here, and keep them, while the block runs."""
        self.want(units)
        try:
            self.wait(units)
            yield
        finally:
            self.release(units)

    def want(self, units: Units, may_wait: Callable[[], bool] | None = None) -> None:
        """Begin to bring units, in this order; each stays until it is released as often as it was
        wanted.

        Args:
            units: Their numbers.
            may_wait: Asked while there is no room: False brings the unit nevertheless. None: never
                wait.
        """
        self.units.need_lengths(units[self._mine[units] == NOT_HERE])
        if (window := self._shards.window) is not None:
            window.want(self._shards.shards_of(units), may_wait)
        with self._changed:
            self._pins[units] += 1
            # What is wanted is not old, for other processes either.
            self._record.touch(units)
            self._stretches.want(units)
            missing = units[self._mine[units] == NOT_HERE].tolist()
        for unit in missing:
            with self._changed:
                if self._mine[unit] != NOT_HERE or self._take_present(unit):
                    continue
                stretch, reserved = range(unit, unit + 1), 0
                if self._record.states[unit] == ABSENT:
                    stretch = self._stretches.of(unit, may_add=may_wait is not None and self._fits)
                    reserved = sum(map(self.units.size, stretch))
                    if len(stretch) > 1 and not self._eviction.reserve(reserved, len(stretch)):
                        self._stretches.came(stretch)
                        stretch, reserved = range(unit, unit + 1), self.units.size(unit)
                    if len(stretch) == 1 and not self._reserve(unit, reserved, may_wait):
                        continue
                self._mine[stretch.start : stretch.stop] = COMING
                self._begin(stretch, reserved)

    @property
    def _fits(self) -> bool:
        """Whether all of the dataset may be here, so that what comes before it is wanted stays."""
        return self.budget is None or self.stored_bytes <= self.budget

    def _reserve(self, unit: int, size: int, may_wait: Callable[[], bool] | None) -> bool:
        """Account for a unit, as `want` says; False: another thread brings it meanwhile."""
        while (
            not (is_reserved := self._eviction.reserve(size))
            and may_wait is not None
            and may_wait()
        ):
            self._changed.wait(LOOK_SECONDS)
        if self._mine[unit] != NOT_HERE:
            if is_reserved:
                self._record.account(-size, begun=-1)
            return False
        if not is_reserved:
            self._record.account(size, begun=1)
        return True

    def _begin(self, stretch: range, reserved: int) -> None:
        """Bring units, which are COMING, in another thread."""
        self._coming += 1
        for unit in stretch:
            self._errors.pop(unit, None)
        try:
            bring = self._bring if len(stretch) == 1 else self._bring_together
            self._threads.submit(bring, stretch, reserved)
        except RuntimeError as error:  # the process ends; whoever waits must not wait for ever
            self._coming -= 1
            self._stretches.came(stretch)
            self._mine[stretch.start : stretch.stop] = NOT_HERE
            self._errors.update(dict.fromkeys(stretch, error))
            self._changed.notify_all()

    def _take_present(self, unit: int) -> bool:
        """Lock a unit that is here, at once; whether it is here, and was locked."""
        record = self._record
        if not self._sound[unit] or record.states[unit] != PRESENT or not record.share_now(unit):
            return False
        if record.states[unit] != PRESENT:  # given back by another process, before it was locked
            record.free(unit)
            return False
        self._mine[unit] = HERE
        self._errors.pop(unit, None)
        return True

    def wait(self, units: Units) -> None:
        """Wait until wanted units are here.

        Raises:
            StoreError, CorruptionError, OutputError: One cannot be brought; names the URL.
        """
        with self._changed:
            while (self._mine[units] == COMING).any():
                self._changed.wait(LOOK_SECONDS)
                refuse_at_end()
            for unit in units[self._mine[units] == NOT_HERE].tolist():
                raise self._errors[unit]

    def release(self, units: Units) -> None:
        """Let units go that were wanted, once."""
        with self._changed:
            self._pins[units] -= 1
            done = units[(self._pins[units] == 0) & (self._mine[units] == HERE)]
            self._record.touch(units)
            self._mine[done] = NOT_HERE
            self._record.free_all(done)
            self._changed.notify_all()
        if (window := self._shards.window) is not None:
            window.release(self._shards.shards_of(units))

    def hold_all(self, begin: int, end: int, kinds: Sequence[int]) -> Units | None:
        """Hold some kinds of units of documents [begin, end) with a few locks, if all of them are
        here already.

        Returns:
            What the caller must release, once; None: some are not here, what is here exceeds the
            budget, or there are too many shards to have all of them mapped.
        """
        record = self._record
        if self._shards.window is not None:
            return None
        with self._changed:
            ranges = self.units.ranges(begin, end, kinds)
            if (self.budget is not None and record.used > self.budget) or not self._all_here(
                ranges
            ):
                return None
            locked = [one for one in ranges if record.share_all(*one)]
            # Before they were locked, another process may have given one back.
            if len(locked) < len(ranges) or not self._all_here(ranges):
                for first, last in locked:
                    record.free_all(first + np.flatnonzero(self._mine[first:last] == NOT_HERE))
                return None
            units = np.concatenate([np.empty(0, np.int64), *(np.arange(*one) for one in ranges)])
            self._pins[units] += 1
            self._mine[units] = HERE
            record.touch(units)
            return units

    def _all_here(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether units are present, and no thread of this process is about to lock one."""
        states, mine, sound = self._record.states, self._mine, self._sound
        return all(
            (states[a:b] == PRESENT).all() and (mine[a:b] != COMING).all() and sound[a:b].all()
            for a, b in ranges
        )

    def renew(self, units: Units, error: CorruptionError) -> None:
        """As in `Holder`: the same bytes are written over the damaged ones, so whoever reads them
        meanwhile is safe.
        """
        damaged = [
            unit for unit in units.tolist() if self._shards.wrong_document(unit) >= 0
        ] or units.tolist()
        self._say_damaged(error)
        for coming in [self._threads.submit(self._load, unit) for unit in damaged]:
            result_of(coming)

    def _say_damaged(self, what: object) -> None:
        """The first of many damaged copies is worth a warning."""
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        _log.log(
            level,
            "%s: copies in %s are damaged, and are fetched again: %s",
            self.store.url,
            self.folder,
            what,
        )

    def explained(self, units: Units, error: CorruptionError) -> CorruptionError:
        """As in `Holder`."""
        return CorruptionError(
            f"{error}; its copies in the cache {self.folder} were fetched again, and are as "
            f"{self.store.url} has them: if `penstock verify {self.store.url}` finds that "
            "sound, remove the folder"
        )

    def forget(self, names: Sequence[str]) -> None:
        """What shards held that were missing or cut has to be fetched again."""
        record, starts = self._record, self._table.shard_starts
        for shard in [
            self._shards.names.index(name) for name in names if name in self._shards.names
        ]:
            for first, last in self.units.ranges(
                int(starts[shard]), int(starts[shard + 1]), range(4)
            ):
                for unit in (first + np.flatnonzero(record.states[first:last] == PRESENT)).tolist():
                    # What another process reads stays: its old file is whole; here, it is renewed
                    # when it is read.
                    if record.own(unit):
                        record.states[unit] = UNSURE
                        record.free(unit)

    def _bring_together(self, stretch: range, reserved: int) -> None:
        """Bring absent units that lie side by side; where that fails, those that are wanted come
        one by one, and each finds its own error.
        """
        record, part = self._record, slice(stretch.start, stretch.stop)
        is_owned = is_here = False
        try:
            is_owned = record.own_all(stretch.start, stretch.stop)
            if is_owned and (record.states[part] == ABSENT).all():
                with self._shards.mapped(*stretch):
                    is_here = self._fetcher.fetch_together(stretch)
        except BaseException as error:
            _log.debug("%s: units %s: %s", self.store.url, stretch, error)
        with self._changed:
            self._end_together(stretch, reserved, is_owned, is_here)

    def _end_together(self, stretch: range, reserved: int, is_owned: bool, is_here: bool) -> None:
        record, part = self._record, slice(stretch.start, stretch.stop)
        wanted = stretch.start + np.flatnonzero(self._pins[part])
        others = stretch.start + np.flatnonzero(self._pins[part] == 0)
        self._coming -= 1
        self._stretches.came(stretch)
        if is_here:
            record.states[part] = PRESENT
            record.account(0, begun=-len(stretch))
            record.share_all(stretch.start, stretch.stop)
            record.free_all(others)
            self._mine[wanted] = HERE
        else:
            if is_owned:
                record.free_all(np.arange(stretch.start, stretch.stop))
            record.account(-reserved, begun=-len(stretch))
            for unit in wanted.tolist():
                self._begin(range(unit, unit + 1), 0)
        self._mine[others] = NOT_HERE
        self._changed.notify_all()

    def _bring(self, stretch: range, reserved: int) -> None:
        (unit,), error = stretch, None
        try:
            self._lock_present(unit, reserved)
        except BaseException as caught:
            error = caught
        with self._changed:
            self._coming -= 1
            if error is not None:
                self._mine[unit], self._errors[unit] = NOT_HERE, error
            elif self._pins[unit] == 0:
                self._mine[unit] = NOT_HERE
                self._record.free(unit)
            else:
                self._mine[unit] = HERE
            self._changed.notify_all()

    def _lock_present(self, unit: int, reserved: int) -> None:
        """Have a shared lock on a unit that is present; another process may be bringing it."""
        record = self._record
        while True:
            record.share(unit)
            if record.states[unit] == PRESENT:
                self._check_first(unit)
                break
            record.free(unit)
            if record.own(unit):
                if record.states[unit] == PRESENT:
                    record.share(unit)
                    self._check_first(unit)
                    break
                self._fetch_locked(unit, reserved)
                return
            time.sleep(0.001)
        self._give_up(reserved)

    def _check_first(self, unit: int) -> None:
        """Before this process first reads a unit that has no checksums of its own: it must be what
        was fetched.
        """
        if not self._sound[unit] and self._shards.checksum(unit) != self._sums[unit]:
            self._say_damaged("what it holds besides tokens is not what was fetched")
            try:
                self._load(unit)
            except BaseException:
                self._record.free(unit)
                raise
        self._sound[unit] = True

    def _give_up(self, reserved: int) -> None:
        """What was reserved for a unit is not needed."""
        if reserved:
            with self._changed:
                self._record.account(-reserved, begun=-1)

    def _fetch_locked(self, unit: int, reserved: int) -> None:
        """Bring a unit that this process alone has locked."""
        record, size = self._record, reserved or self.units.size(unit)
        if record.states[unit] == UNSURE:
            if self._shards.wrong_document(unit) < 0 and self.units.kind(unit) in (TOKENS, SPANS):
                record.states[unit] = PRESENT
                record.share(unit)
                self._give_up(reserved)
                return
            with self._changed:
                record.account(-self._shards.size(unit))
            record.states[unit] = ABSENT
        if not reserved:
            with self._changed:
                if not self._eviction.reserve(size):
                    record.account(size, begun=1)
        try:
            more = self._load(unit)
        except BaseException:
            with self._changed:
                record.account(-size, begun=-1)
            record.free(unit)
            raise
        record.states[unit] = PRESENT
        with self._changed:
            record.account(more, begun=-1)
        record.share(unit)

    def _load(self, unit: int) -> int:
        """Fetch a unit, and write it into its shards; returns bytes that `size` does not count."""
        with self._shards.mapped(unit):
            more = self._fetcher.fetch(unit, at_once=self._coming <= THREADS)
            if unit >= self.units.self_checked:
                self._sums[unit] = self._shards.checksum(unit)
                self._sound[unit] = True
            return more
