"""Brings the units of a remote dataset to this machine, keeps them while they are read, and gives back what is old.

The shards lie in the cache folder as sparse files of their full size, which are mapped once. A unit is requested by
ranges, written into its place, checked against its checksums, and then noted as present (`unit_record`): what a killed
process had begun counts as absent. Beyond the budget, the units that were used least recently go: their pages become
holes, so that the disk shrinks although the files stay mapped. A unit that is wanted or read by any process stays.

Reading ahead (`want`) waits for room; reading (`hold`) never does, and exceeds the budget rather than wait for itself.

What the cache holds may be damaged. Tokens and spans have checksums that are compared whenever they are read, and are
fetched again where they differ (`renew`). Of origins, texts and columns, the checksum of what was fetched is kept, and
compared before this process reads them first.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, final

import numpy as np

from penstock.core.arrays import Int64
from penstock.core.daemons import LOOK_SECONDS, DaemonPool, refuse_at_end, result_of, wait_for
from penstock.core.errors import CorruptionError
from penstock.data.shards import _check_kernels as check
from penstock.data.shards.document import EXTRAS, SPANS, TOKENS, DocumentTable
from penstock.data.shards.files import checksum
from penstock.data.shards.lengths import for_kernel
from penstock.data.shards.mappings import MappedShards, shards_of
from penstock.data.shards.stores import Store
from penstock.data.shards.unit_record import (
    ABSENT,
    PRESENT,
    UNSURE,
    UnitRecord,
    cache_errors,
    map_sums,
    punch,
    write_at,
)
from penstock.data.shards.units import PAGE, Made, Range, UnitMap, joined_requests, page_bytes, without

_log = logging.getLogger("penstock.shards")

THREADS = 64
"""Units that are brought at the same time, at most."""
GAP = 1 << 13
"""Bytes between two ranges that are rather fetched than asked for in two requests."""
_NOT_HERE, _COMING, _HERE = range(3)
_OLDEST = 256

Units = Annotated[Int64, "units"]


@final
class Residency:
    """The units of one remote dataset on this machine.

    Args:
        store: Where the dataset is.
        folder: Its cache folder; `folder / units` and `folder / locks` are shared with other processes.
        shards: The folder with the sparse shards.
        table: Its document table, over the sparse shards.
        units: What they are.
        stamps: File → stamp that it must have.
    """

    def __init__(
        self, store: Store, folder: Path, shards: Path, table: DocumentTable, units: UnitMap, stamps: dict[str, str]
    ) -> None:
        self.store, self.folder, self.units = store, folder, units
        self._table, self._stamps = table, stamps
        # Where there are too many shards, those of units that are wanted or looked at are mapped.
        self._window = table.mappings if isinstance(table.mappings, MappedShards) else None
        self._names = [os.path.basename(path) for path in map(str, table.paths)]
        self._files = [os.path.join(shards, name) for name in self._names]
        self._kernel_view = table.kernel_view
        with cache_errors(store.url, folder):
            self._record = UnitRecord(folder, len(units))
            self._sums = map_sums(folder, len(units))
        # Units share bytes and pages, but never take more than this.
        self._record.join(self._size_here, most=4 * int(table.shard_bytes.sum()) + 32 * PAGE * len(units))
        self._sound = np.zeros(len(units), np.bool_)
        self._sound[: units.self_checked] = True
        self._before = store.bytes, store.requests
        self.budget: int | None = None
        """Maximum bytes on the disk; None: no limit."""
        self.used_bytes = 0
        """Bytes of tokens that were read."""
        self._pins = np.zeros(len(units), np.int32)
        self._mine = np.zeros(len(units), np.uint8)
        self._coming = 0
        self._errors: dict[int, BaseException] = {}
        self._changed = threading.Condition()
        self._oldest: list[tuple[int, int]] = []
        self._process = os.getpid()
        self._pools: tuple[DaemonPool | None, ...] = (None, None)
        self._punches, self._has_warned = True, False

    def __len__(self) -> int:
        return len(self.units)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of shards that this process fetched."""
        return self.store.bytes - self._before[0]

    @property
    def requests(self) -> int:
        """Requests for shards that this process made."""
        return self.store.requests - self._before[1]

    @property
    def size(self) -> int:
        """Bytes of the dataset's units that are on this machine, or on their way, for all processes."""
        return self._record.used

    @property
    def run_bytes(self) -> int:
        """Mean bytes on the disk that a run of documents takes alone, with its spans and columns; of up to 64 runs."""
        runs = {self.units.runs * number // 64 for number in range(64)} if self.units.runs else set()
        kinds = (TOKENS, SPANS, EXTRAS)
        self.units.need_lengths(np.array(sorted(runs), np.int64))
        sizes = [
            sum(self.units.size(unit) for unit in self.units.of(np.arange(*self.units.documents(run)), kinds).tolist())
            for run in runs
        ]
        return -(-sum(sizes) // max(len(sizes), 1))

    # What callers use.

    def find(self, documents: Annotated[Int64, "documents"], kinds: Sequence[int]) -> Units:
        """The units that hold documents."""
        return self.units.of(documents, kinds)

    def is_remote(self, documents: Annotated[Int64, "documents"]) -> Any:
        """bool [documents], whether each is one of a store."""
        return np.ones(len(documents), np.bool_)

    def file_near(self, document: int, suffix: str) -> tuple[str, Callable[[int, int], bytes]]:
        """The URL of the file with a suffix next to a document's shard, and what reads it; nothing of it is kept."""
        name = os.path.splitext(self._names[self._table.locate(document)[0]])[0] + suffix

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
        """Begin to bring units, in this order; each stays until it is released as often as it was wanted.

        Args:
            units: Their numbers.
            may_wait: Asked while there is no room: False brings the unit nevertheless. None: never wait.
        """
        self.units.need_lengths(units[self._mine[units] == _NOT_HERE])
        if self._window is not None:
            self._window.want(self._shards(units), may_wait)
        with self._changed:
            self._pins[units] += 1
            # What is wanted is not old, for other processes either.
            self._record.touch(units)
        for unit in units.tolist():
            with self._changed:
                if self._mine[unit] != _NOT_HERE:
                    continue
                reserved = 0
                if self._take_present(unit):
                    continue
                if self._record.states[unit] == ABSENT:
                    reserved = self.units.size(unit)
                    while not (is_reserved := self._reserve(reserved)) and may_wait is not None and may_wait():
                        self._changed.wait(LOOK_SECONDS)
                    if self._mine[unit] != _NOT_HERE:  # another thread wanted it meanwhile
                        if is_reserved:
                            self._record.account(-reserved, begun=-1)
                        continue
                    if not is_reserved:
                        self._record.account(reserved, begun=1)
                self._mine[unit] = _COMING
                self._coming += 1
                self._errors.pop(unit, None)
            try:
                self._pool(0).submit(self._bring, unit, reserved)
            except RuntimeError as error:  # the process ends; whoever waits must not wait for ever
                with self._changed:
                    self._coming -= 1
                    self._mine[unit], self._errors[unit] = _NOT_HERE, error
                    self._changed.notify_all()

    def _take_present(self, unit: int) -> bool:
        """Lock a unit that is here, at once; whether it is here, and was locked."""
        record = self._record
        if not self._sound[unit] or record.states[unit] != PRESENT or not record.share_now(unit):
            return False
        if record.states[unit] != PRESENT:  # given back by another process, before it was locked
            record.free(unit)
            return False
        self._mine[unit] = _HERE
        self._errors.pop(unit, None)
        return True

    def wait(self, units: Units) -> None:
        """Wait until wanted units are here.

        Raises:
            StoreError, CorruptionError, OutputError: One cannot be brought; names the URL.
        """
        with self._changed:
            while (self._mine[units] == _COMING).any():
                self._changed.wait(LOOK_SECONDS)
                refuse_at_end()
            for unit in units[self._mine[units] == _NOT_HERE].tolist():
                raise self._errors[unit]

    def release(self, units: Units) -> None:
        """Let units go that were wanted, once."""
        with self._changed:
            self._pins[units] -= 1
            done = units[(self._pins[units] == 0) & (self._mine[units] == _HERE)]
            self._record.touch(units)
            self._mine[done] = _NOT_HERE
            self._record.free_all(done)
            self._changed.notify_all()
        if self._window is not None:
            self._window.release(self._shards(units))

    def _shards(self, units: Units) -> Annotated[Int64, "shards"]:
        """The shards that units lie in, each as often as there are units in it."""
        return shards_of([self.units.documents(unit) for unit in units.tolist()], self._table.shard_starts)

    def _mapped(self, unit: int) -> AbstractContextManager[None]:
        """Have the shards of a unit mapped, if they are not all the time."""
        return nullcontext() if self._window is None else self._window.held(self._shards(np.array([unit])))

    def hold_all(self, begin: int, end: int, kinds: Sequence[int]) -> Units | None:
        """Hold some kinds of units of documents [begin, end) with a few locks, if all of them are here already.

        Returns:
            What the caller must release, once; None: some are not here, what is here exceeds the budget, or there are
            too many shards to have all of them mapped.
        """
        record = self._record
        if self._window is not None:
            return None
        with self._changed:
            ranges = self.units.ranges(begin, end, kinds)
            if (self.budget is not None and record.used > self.budget) or not self._all_here(ranges):
                return None
            locked = [one for one in ranges if record.share_all(*one)]
            # Before they were locked, another process may have given one back.
            if len(locked) < len(ranges) or not self._all_here(ranges):
                for first, last in locked:
                    record.free_all(first + np.flatnonzero(self._mine[first:last] == _NOT_HERE))
                return None
            units = np.concatenate([np.empty(0, np.int64), *(np.arange(*one) for one in ranges)])
            self._pins[units] += 1
            self._mine[units] = _HERE
            record.touch(units)
            return units

    def _all_here(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether units are present, and no thread of this process is about to lock one."""
        states, mine, sound = self._record.states, self._mine, self._sound
        return all(
            (states[a:b] == PRESENT).all() and (mine[a:b] != _COMING).all() and sound[a:b].all() for a, b in ranges
        )

    def renew(self, units: Units, error: CorruptionError) -> None:
        """As in `Holder`: the same bytes are written over the damaged ones, so whoever reads them meanwhile is safe."""
        damaged = [unit for unit in units.tolist() if self._wrong(unit) >= 0] or units.tolist()
        self._say_damaged(error)
        for coming in [self._pool(0).submit(self._load, unit) for unit in damaged]:
            result_of(coming)

    def _say_damaged(self, what: object) -> None:
        """The first of many damaged copies is worth a warning."""
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        _log.log(level, "%s: copies in %s are damaged, and are fetched again: %s", self.store.url, self.folder, what)

    def explained(self, units: Units, error: CorruptionError) -> CorruptionError:
        """As in `Holder`."""
        return CorruptionError(
            f"{error}; its copies in the cache {self.folder} were fetched again, and are as {self.store.url} has them: "
            f"if `penstock verify {self.store.url}` finds that sound, remove the folder"
        )

    def forget(self, names: Sequence[str]) -> None:
        """What shards held that were missing or cut has to be fetched again."""
        record, starts = self._record, self._table.shard_starts
        for shard in [self._names.index(name) for name in names if name in self._names]:
            for first, last in self.units.ranges(int(starts[shard]), int(starts[shard + 1]), range(4)):
                for unit in (first + np.flatnonzero(record.states[first:last] == PRESENT)).tolist():
                    # What another process reads stays: its old file is whole; here, it is renewed when it is read.
                    if record.own(unit):
                        record.states[unit] = UNSURE
                        record.free(unit)

    # Bringing.

    def _pool(self, which: int) -> DaemonPool:
        """The threads that bring units, or those that wait for requests; threads do not survive a fork."""
        if self._pools[which] is None or self._process != os.getpid():
            self._process = os.getpid()
            self._pools = (DaemonPool(THREADS, "penstock-units"), DaemonPool(THREADS, "penstock-ranges"))
        found: Any = self._pools[which]
        return found  # type: ignore[no-any-return]

    def _bring(self, unit: int, reserved: int) -> None:
        error: BaseException | None = None
        try:
            self._lock_present(unit, reserved)
        except BaseException as caught:
            error = caught
        with self._changed:
            self._coming -= 1
            if error is not None:
                self._mine[unit], self._errors[unit] = _NOT_HERE, error
            elif self._pins[unit] == 0:
                self._mine[unit] = _NOT_HERE
                self._record.free(unit)
            else:
                self._mine[unit] = _HERE
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
        """Before this process first reads a unit that has no checksums of its own: it must be what was fetched."""
        if not self._sound[unit] and self._sum(unit) != self._sums[unit]:
            self._say_damaged("what it holds besides tokens is not what was fetched")
            try:
                self._load(unit)
            except BaseException:
                self._record.free(unit)
                raise
        self._sound[unit] = True

    def _sum(self, unit: int) -> int:
        """A checksum of all bytes of a unit that are here; never 0, which stands for none."""
        parts = self.units.unit(unit)
        ranges = [*parts.fetched, *(Range(one.shard, one.begin, one.begin + len(one.content)) for one in parts.made)]
        with self._mapped(unit):
            ranges += self.units.later(unit, self._table.mappings)
            sums = [checksum(self._table.mappings[one.shard][one.begin : one.end]) for one in ranges]
        return checksum(np.array(sums, np.uint64)) or 1

    def _give_up(self, reserved: int) -> None:
        """What was reserved for a unit is not needed."""
        if reserved:
            with self._changed:
                self._record.account(-reserved, begun=-1)

    def _fetch_locked(self, unit: int, reserved: int) -> None:
        """Bring a unit that this process alone has locked."""
        record, size = self._record, reserved or self.units.size(unit)
        if record.states[unit] == UNSURE:
            if self._wrong(unit) < 0 and self.units.kind(unit) in (TOKENS, SPANS):
                record.states[unit] = PRESENT
                record.share(unit)
                self._give_up(reserved)
                return
            with self._changed:
                record.account(-self._size_here(unit))
            record.states[unit] = ABSENT
        if not reserved:
            with self._changed:
                if not self._reserve(size):
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
        with self._mapped(unit):
            return self._load_mapped(unit)

    def _load_mapped(self, unit: int) -> int:
        parts = self.units.unit(unit)
        for last in (False, True):
            self._fetch(parts.fetched, parts.made)
            if later := self.units.later(unit, self._table.mappings):
                self._fetch(later)
            wrong = self._wrong(unit)
            if wrong < 0:
                break
            if last:
                shard = self._names[self._table.locate(wrong)[0]]
                raise CorruptionError(
                    f"{self.store.where(shard)}: document {wrong} is not what was prepared: its bytes differ from "
                    f"their checksums, also when they are fetched again into the cache {self.folder}; upload the "
                    f"dataset again (`penstock verify {self.store.url}` lists all faults)"
                )
        if unit >= self.units.self_checked:
            self._sums[unit] = self._sum(unit)
            self._sound[unit] = True
        return self._size_here(unit) - self.units.size(unit) if later else 0

    def _fetch(self, ranges: Sequence[Range], made: Sequence[Made] = ()) -> None:
        """Request ranges, and write them and what was made."""
        requests = joined_requests(ranges, GAP)
        bodies = self._bodies([whole for whole, _ in requests])
        pieces = [
            Made(part.shard, part.begin, body[part.begin - whole.begin : part.end - whole.begin])
            for (whole, parts), body in zip(requests, bodies, strict=True)
            for part in parts
        ]
        self._write([*pieces, *made])

    def _bodies(self, ranges: Sequence[Range]) -> list[memoryview]:
        """The bytes of ranges, requested at the same time, unless other units keep all threads busy anyway."""
        if self._coming > THREADS:
            return [self._request(one) for one in ranges]
        others = [self._pool(1).submit(self._request, one) for one in ranges[1:]]
        try:
            bodies = [self._request(one) for one in ranges[:1]]
        finally:
            for other in others:
                wait_for(other)
        return bodies + [result_of(other) for other in others]

    def _request(self, one: Range) -> memoryview:
        name = self._names[one.shard]
        return self.store.read_view(name, one.begin, one.end, self._stamps.get(name, ""))

    def _size_here(self, unit: int) -> int:
        """Bytes of the pages of a present unit."""
        with self._mapped(unit):
            return page_bytes(self.units.pages(unit, self._table.mappings))

    def _write(self, pieces: Sequence[Made]) -> None:
        """Write bytes into their places."""
        with cache_errors(self.store.url, self.folder):
            for shard in {piece.shard for piece in pieces}:
                handle = os.open(self._files[shard], os.O_WRONLY | os.O_CLOEXEC)
                try:
                    for piece in pieces:
                        if piece.shard == shard:
                            write_at(handle, piece.begin, piece.content)
                finally:
                    os.close(handle)

    def _wrong(self, unit: int) -> int:
        """A document of a unit that differs from its checksums, or −1."""
        kind = self.units.kind(unit)
        if kind not in (TOKENS, SPANS):
            return -1
        places, batches, (token_bytes, _, _, has_spans) = self._kernel_view
        layout = (token_bytes, has_spans, kind == SPANS)
        begin, end = self.units.documents(unit)
        lengths = for_kernel(self._table.lengths, np.arange(begin, end))
        with self._mapped(unit):
            return int(check.wrong_tokens(places, batches, layout, lengths, begin, end))

    # Giving back. All of it runs under `_changed`.

    def _reserve(self, size: int) -> bool:
        """Account for a unit that will be brought, if it fits once what was used least recently is given back."""
        tried = 0
        while not self._record.account(size, begun=1, limit=self.budget if self._punches else None):
            if not self._oldest:
                self._oldest = self._find_oldest()
                tried += 1
                if not self._oldest or tried > 2:
                    return False
            unit, use = self._oldest.pop()
            if self._record.uses[unit] == use:  # else it was used since, and is not old any more
                self._give_back(unit)
        return True

    def _find_oldest(self) -> list[tuple[int, int]]:
        """Idle units, least recently used last, with their last-use times."""
        idle = np.flatnonzero((self._record.states != ABSENT) & (self._mine == _NOT_HERE) & (self._pins == 0))
        ages = (self._record.header["clock"][0] - self._record.uses[idle].astype(np.int64)) & 0xFFFFFFFF
        if len(idle) > _OLDEST:
            some = np.argpartition(-ages, _OLDEST)[:_OLDEST]
            idle, ages = idle[some], ages[some]
        idle = idle[np.argsort(ages, kind="stable")]
        return list(zip(idle.tolist(), self._record.uses[idle].tolist(), strict=True))

    def _give_back(self, unit: int) -> None:
        record = self._record
        if self._mine[unit] != _NOT_HERE or self._pins[unit] or not record.own(unit):
            return
        locked = [unit]
        try:
            if record.states[unit] == ABSENT:
                return
            with self._mapped(unit):
                pages = self.units.pages(unit, self._table.mappings)
            record.states[unit] = ABSENT
            record.account(-page_bytes(pages))
            self._punch(without(pages, self._kept_pages(unit, pages, locked)))
        finally:
            for one in locked:
                record.free(one)

    def _kept_pages(self, unit: int, pages: Sequence[Range], locked: list[int]) -> list[Range]:
        """Pages of other units near a unit that must stay; absent ones are locked, so that nobody brings them now."""
        kept: list[Range] = []
        record = self._record
        for other in self.units.neighbours(unit).tolist():
            theirs: list[Range] | None = None
            if self.units.has_lengths(other):
                theirs = self._pages_if_near(other, pages)
                if not theirs:
                    continue
            if record.states[other] == ABSENT and self._mine[other] == _NOT_HERE and record.own(other):
                locked.append(other)
                if record.states[other] == ABSENT:
                    continue
            # Whoever brings it has its lengths, so asking for them now does not wait.
            kept += self._pages_if_near(other, pages) if theirs is None else theirs
        return kept

    def _pages_if_near(self, other: int, pages: Sequence[Range]) -> list[Range]:
        """The pages of a unit, if any of them is among `pages`."""
        present = self._record.states[other] != ABSENT
        parts = self.units.unit(other)
        bare = [*parts.fetched, *(Range(one.shard, one.begin, one.begin + len(one.content)) for one in parts.made)]
        theirs = [Range(one.shard, one.begin // PAGE, -(-one.end // PAGE)) for one in bare]
        if parts.has_more and present:
            with self._mapped(other):
                theirs = self.units.pages(other, self._table.mappings)
        shared = any(
            one.shard == mine.shard and one.begin < mine.end and mine.begin < one.end
            for one in theirs
            for mine in pages
        )
        return theirs if shared else []

    def _punch(self, pages: Sequence[Range]) -> None:
        for one in pages:
            if not punch(self._files[one.shard], one.begin * PAGE, one.end * PAGE):
                self._punches = False
                _log.warning(
                    "%s: its file system cannot give back parts of files, so the cache of %s grows beyond cache_bytes",
                    self.folder, self.store.url,
                )  # fmt: skip
                return


@final
class JoinedResidency:
    """The holders of the parts of a joined corpus, as one: units are numbered through, part after part.

    Args:
        starts: First document of each part, and the number of all.
        parts: One for each part; None: it is on this machine, and mapped.
    """

    def __init__(self, starts: Sequence[int], parts: Sequence[Any]) -> None:
        self._starts, self.parts = np.array(starts, np.int64), parts
        self._firsts = np.cumsum([0, *(0 if part is None else len(part) for part in parts)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def find(self, documents: Annotated[Int64, "documents"], kinds: Sequence[int]) -> Units:
        """As in `Residency`."""
        found = [np.empty(0, np.int64)]
        of = np.searchsorted(self._starts, documents, side="right") - 1
        for number, part in enumerate(self.parts):
            if part is not None and (mine := documents[of == number]).size:
                found.append(self._firsts[number] + part.find(mine - self._starts[number], kinds))
        return np.concatenate(found)

    def file_near(self, document: int, suffix: str) -> tuple[str, Callable[[int, int], bytes]]:
        """As in `Residency`."""
        number = int(np.searchsorted(self._starts, document, side="right")) - 1
        found: tuple[str, Any] = self.parts[number].file_near(document - int(self._starts[number]), suffix)
        return found

    def is_remote(self, documents: Annotated[Int64, "documents"]) -> Any:
        """As in `Residency`."""
        some = np.zeros(1, np.int64)
        remote = np.array([part is not None and bool(part.is_remote(some)[0]) for part in self.parts])
        return remote[np.searchsorted(self._starts, documents, side="right") - 1]

    @contextmanager
    def held(self, units: Units) -> Iterator[None]:
        """As in `Residency`."""
        self.want(units)
        try:
            self.wait(units)
            yield
        finally:
            self.release(units)

    def want(self, units: Units, may_wait: Callable[[], bool] | None = None) -> None:
        """As in `Residency`."""
        for part, mine in self._split(units):
            part.want(mine, may_wait)

    def wait(self, units: Units) -> None:
        """As in `Residency`."""
        for part, mine in self._split(units):
            part.wait(mine)

    def hold_all(self, begin: int, end: int, kinds: Sequence[int]) -> Units | None:
        """As in `Residency`."""
        found = [np.empty(0, np.int64)]
        for number, part in enumerate(self.parts):
            first, last = (np.clip([begin, end], *self._starts[number : number + 2]) - self._starts[number]).tolist()
            if part is None or first == last:
                continue
            units = part.hold_all(first, last, kinds)
            if units is None:
                self.release(np.concatenate(found))
                return None
            found.append(self._firsts[number] + units)
        return np.concatenate(found)

    def release(self, units: Units) -> None:
        """As in `Residency`."""
        for part, mine in self._split(units):
            part.release(mine)

    def renew(self, units: Units, error: CorruptionError) -> None:
        """As in `Residency`."""
        for part, mine in self._split(units):
            part.renew(mine, error)

    def explained(self, units: Units, error: CorruptionError) -> CorruptionError:
        """As in `Residency`."""
        for part, mine in self._split(units):
            error = part.explained(mine, error)
        return error

    def _split(self, units: Units) -> Iterator[tuple[Any, Units]]:
        for number, part in enumerate(self.parts):
            low, high = self._firsts[number : number + 2].tolist()
            mine = units[(low <= units) & (units < high)]
            if mine.size:
                yield part, mine - low
