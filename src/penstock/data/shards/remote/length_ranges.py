"""Brings ranges of the lengths and weight sums of a large remote dataset to this machine, before
anything reads them.

The tables lie in the cache folder as sparse files of their full size. A range of some thousand
documents is requested, checked against its checksum, written into its place, and then noted as
present (`unit_record`), for all processes that share the cache; what a killed process had begun
counts as absent. Nothing is given back: all of it takes 8 bytes a document (16 where loss weights
are fractional), which `cache_bytes` does not count.

Ranges that lie side by side come in one request. Many processes that need all ranges share the
work: what one is bringing, another leaves out, and waits for at the end.
"""

import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, final

import numpy as np

from penstock.core.arrays import Array, Bool, Bytes, Int64, UInt64
from penstock.core.compiled import address_of
from penstock.core.errors import CorruptionError
from penstock.core.terminal import Progress
from penstock.data.shards.format import _check_kernels as check
from penstock.data.shards.format.manifest import LENGTHS, RANGE_CHECKSUMS, WEIGHT_SUMS, Manifest
from penstock.data.shards.tables.lengths import (
    DOCUMENT_BYTES,
    RANGE_DOCUMENTS,
    Documents,
    LazyNumbers,
    ranges_of,
    runs_of,
)
from penstock.data.stores.daemons import LOOK_SECONDS, DaemonPool, refuse_at_end
from penstock.data.stores.files import checksum, make_way, map_numbers
from penstock.data.stores.store import Store
from penstock.data.stores.unit_record import ABSENT, PRESENT, UnitRecord, cache_errors, write_at

THREADS, THREADS_AHEAD = 32, 8
"""Concurrent requests for blocking reads and for read-ahead, besides those for documents."""
REQUEST_BYTES = 4 << 20
"""Of one table, at most."""
SHOWN_BYTES = 256 << 20
"""Progress is shown if at least this many bytes are waited for."""
_TOGETHER = 4096

RangeNumbers = Annotated[Int64, "ranges"]


def lazy_tables(manifest: Manifest) -> dict[str, int]:
    """Name → bytes of the tables of a remote dataset that come in ranges; none where it has no
    checksums of ranges.
    """
    if RANGE_CHECKSUMS not in manifest.checksums:
        return {}
    names = [LENGTHS, *([WEIGHT_SUMS] if manifest.fractional_weights else [])]
    return dict.fromkeys(names, DOCUMENT_BYTES * manifest.documents)


def open_tables(
    store: Store, kept: Path, folder: Path, manifest: Manifest, stamps: dict[str, str]
) -> tuple[LazyNumbers, LazyNumbers | None]:
    """Lengths and weight sums (None: all weights are 0 or 1) of a remote dataset with
    `lazy_tables`.

    Args:
        store: Where it is.
        kept: Its cache folder; the tables are in `kept / lengths`.
        folder: The folder with its small files.
        manifest: Its manifest.
        stamps: File → stamp that it must have.

    Raises:
        CorruptionError: The checksums of the ranges do not fit the dataset.
        OutputError: The cache cannot be written.
    """
    names = list(lazy_tables(manifest))
    words = map_numbers(
        folder / RANGE_CHECKSUMS, "<u8", ((folder / RANGE_CHECKSUMS).stat().st_size // 8,)
    )
    if checksum(words) != manifest.checksums[RANGE_CHECKSUMS]:
        raise CorruptionError(
            f"{folder / RANGE_CHECKSUMS}: differs from its checksum; remove {kept}, and it is "
            "fetched again"
        )
    size = int(words[0]) if len(words) else 0
    count = -(-manifest.documents // size) if size else 0
    if not size or len(words) != 1 + count * len(names):
        raise CorruptionError(
            f"{store.where(RANGE_CHECKSUMS)}: {len(words)} words do not fit "
            f"{manifest.documents:,} documents; prepare the dataset again"
        )
    tables = kept / "lengths"
    with cache_errors(store.url, tables):
        tables.mkdir(exist_ok=True)
        for name, expected in lazy_tables(manifest).items():
            make_way(tables / name)
            with open(tables / name, "ab") as file:
                file.truncate(expected)
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        LENGTHS: ("<u4", (manifest.documents, 2)), WEIGHT_SUMS: ("<f8", (manifest.documents,)),
    }  # fmt: skip
    arrays = {name: map_numbers(tables / name, *shapes[name]) for name in names}
    ranges = StoredRanges(
        store, tables, manifest, arrays, words[1:].reshape(len(names), count), size, stamps
    )
    found = [LazyNumbers(array, ranges) for array in arrays.values()]
    return found[0], found[1] if len(found) > 1 else None


@final
class StoredRanges:
    """The ranges of the tables of one remote dataset.

    Args:
        store: Where the dataset is.
        folder: Where its tables are, as sparse files.
        manifest: Its manifest.
        arrays: File → its numbers, mapped.
        sums: The checksum of each range of each table.
        size: Documents of a range.
        stamps: File → stamp that it must have.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        manifest: Manifest,
        arrays: dict[str, Array],
        sums: Annotated[UInt64, "tables ranges"],
        size: int,
        stamps: dict[str, str],
    ) -> None:
        self.size, self.here = size, np.zeros(sums.shape[1], np.uint8)
        self._store, self._folder, self._arrays, self._sums, self._stamps = (
            store,
            folder,
            arrays,
            sums,
            stamps,
        )
        self._documents, self._per_batch = manifest.documents, manifest.documents_per_batch
        self._starts = np.cumsum(
            [0, *(shard.documents for shard in manifest.shards)], dtype=np.int64
        )
        with cache_errors(store.url, folder):
            self._record = UnitRecord(folder, len(self.here))
        self._record.join(lambda _: 0)
        self._coming = np.zeros(len(self.here), np.uint8)
        self._errors: dict[int, BaseException] = {}
        self._changed = threading.Condition()
        self._process = os.getpid()
        self._threads = DaemonPool(THREADS, "penstock-lengths")
        self._needed: deque[RangeNumbers] = deque()
        self._wanted: deque[RangeNumbers] = deque()
        self._running = 0
        self._complete = False

    def want(self, begins: Documents, ends: Documents) -> None:
        """As in `Ranges`."""
        self._start(self._absent(*self._whole_batches(begins, ends)), is_urgent=False)

    def need(self, begins: Documents, ends: Documents) -> None:
        """As in `Ranges`."""
        if len(absent := self._absent(begins, ends)) and len(
            coming := self._start(absent, is_urgent=True)
        ):
            self._wait(coming)

    def has(self, begin: int, end: int) -> bool:
        """Whether documents `begin` … `end` − 1 are on this machine, whoever brought them."""
        ranges = np.arange(begin // self.size, -(-end // self.size))
        self._adopt(ranges)
        return bool(self.here[ranges].all())

    def _absent(self, begins: Documents, ends: Documents) -> RangeNumbers:
        """Ranges with some of these documents that are not here."""
        if self._complete:
            return np.empty(0, np.int64)
        ranges = ranges_of(begins, ends, self.size)
        absent: RangeNumbers = ranges[self.here[ranges] == 0]
        if not len(absent) and len(ranges) == len(self.here):
            self._complete = True
        return absent

    def _whole_batches(self, begins: Documents, ends: Documents) -> tuple[Documents, Documents]:
        """Documents, extended to whole record batches: where the tokens of one lie follows from all
        of a batch.
        """
        some = ends > begins
        begins, lasts = begins[some], ends[some] - 1
        shards = np.searchsorted(self._starts, begins, side="right") - 1
        begins = begins - (begins - self._starts[shards]) % self._per_batch
        shards = np.searchsorted(self._starts, lasts, side="right") - 1
        ends = lasts - (lasts - self._starts[shards]) % self._per_batch + self._per_batch
        return begins, np.minimum(ends, self._starts[shards + 1])

    # Bringing.

    def _adopt(self, ranges: RangeNumbers) -> None:
        """Note what other processes, or earlier ones, have brought; what is damaged by now has to
        come again.
        """
        self._forget_parent()
        found = ranges[(self.here[ranges] == 0) & (self._record.states[ranges] == PRESENT)]
        if len(found) and len(found := found[self._are_sound(found)]):
            with self._changed:
                # A lock orders what is read: first the state, then what it vouches for.
                self._record.account(0)
                self.here[found] = 1

    def _start(self, ranges: RangeNumbers, *, is_urgent: bool) -> RangeNumbers:
        """Begin to bring ranges that are neither here nor on their way; returns those that are not
        here yet.

        What is urgent goes before what is only wanted.
        """
        self._adopt(ranges)
        with self._changed:
            ranges = ranges[self.here[ranges] == 0]
            missing = ranges[self._coming[ranges] == 0]
            self._coming[missing] = 1
            for number in missing.tolist() if self._errors else ():
                self._errors.pop(number, None)
            self._wanted.extend(
                runs_of(missing, max(REQUEST_BYTES // (DOCUMENT_BYTES * self.size), 1))
            )
            if is_urgent and self._wanted:
                marks = np.zeros(len(self.here), np.bool_)
                marks[ranges] = True
                waiting, self._wanted = self._wanted, deque()
                for group in waiting:
                    (self._needed if marks[group].any() else self._wanted).append(group)
        self._begin()
        return ranges

    def _wait(self, ranges: RangeNumbers) -> None:
        """Wait until ranges that were started are here."""
        size = len(ranges) * self.size * DOCUMENT_BYTES * len(self._arrays)
        # One of the processes that wait shows it.
        shown = size >= SHOWN_BYTES and self._record.own(len(self.here) + 2)
        try:
            with Progress(
                f"fetching lengths of {self._store.url}", total=size, unit="B", enabled=shown
            ) as bar:
                with self._changed:
                    while coming := int(self._coming[ranges].sum()):
                        bar.advance(size - size * coming // len(ranges) - bar.done)
                        self._changed.wait(LOOK_SECONDS)
                        refuse_at_end()
                    for number in ranges[self.here[ranges] == 0].tolist():
                        raise self._errors[number]
                bar.advance(size - bar.done)
        finally:
            if shown:
                self._record.free(len(self.here) + 2)

    def _forget_parent(self) -> None:
        """In a forked process: its parent's threads are not here, so nothing is on its way."""
        if self._process != os.getpid():
            self._process, self._changed = os.getpid(), threading.Condition()
            self._needed.clear()
            self._wanted.clear()
            self._running = 0
            self._coming[:] = 0

    def _begin(self) -> None:
        """Give the threads as much as they have room for: at the end of the interpreter, the rest
        is never begun.
        """
        while True:
            with self._changed:
                if self._needed and self._running < THREADS:
                    group = self._needed.popleft()
                elif self._wanted and self._running < THREADS_AHEAD:
                    group = self._wanted.popleft()
                else:
                    return
                self._running += 1
            try:
                self._threads.submit(self._bring, group)
            except (
                RuntimeError
            ) as error:  # the interpreter ends; whoever waits must not wait for ever
                self._end(group, error)

    def _bring(self, group: RangeNumbers) -> None:
        error: BaseException | None = None
        try:
            self._bring_shared(group)
        except BaseException as caught:
            error = caught
        self._end(group, error)
        self._begin()

    def _end(self, group: RangeNumbers, error: BaseException | None) -> None:
        """Ranges are not on their way any more: they are here, or there is an error."""
        with self._changed:
            self.here[group[self._record.states[group] == PRESENT]] = 1
            if error is not None:
                self._errors.update(dict.fromkeys(group[self.here[group] == 0].tolist(), error))
            self._coming[group] = 0
            self._running -= 1
            self._changed.notify_all()

    def _bring_shared(self, group: RangeNumbers) -> None:
        """Bring ranges that lie side by side; other processes may be bringing some of them."""
        while len(group):
            mine = np.array([self._record.own(number) for number in group.tolist()])
            try:
                absent = [number for number in group[mine].tolist() if not self._is_present(number)]
                for part in runs_of(np.array(absent, np.int64), len(group)):
                    self._fetch(part)
            finally:
                for number in group[mine].tolist():
                    self._record.free(number)
            group = group[~mine]
            if len(group):
                # Nothing is locked while this waits, so two processes never wait for each other.
                self._record.share(int(group[0]))
                self._record.free(int(group[0]))

    def _is_present(self, number: int) -> bool:
        """Whether a range that this process has locked is present, and what was prepared.

        An end of the machine may have lost bytes that were not on the disk, and anything else may
        have damaged them.
        """
        states = self._record.states
        if states[number] != ABSENT:
            states[number] = PRESENT if self._are_sound(np.array([number]))[0] else ABSENT
        return bool(states[number] == PRESENT)

    def _are_sound(self, ranges: RangeNumbers) -> Annotated[Bool, "ranges"]:
        """Whether ranges, of all tables, have their checksums."""
        sound = np.ones(len(ranges), np.bool_)
        for array, sums in zip(self._arrays.values(), self._sums, strict=True):
            data = array.view(np.uint8).reshape(-1)
            place, width = np.uint64(address_of(data)), np.int64(self.size * DOCUMENT_BYTES)
            check.compare_ranges(
                place, np.int64(len(data)), width, ranges, np.ascontiguousarray(sums), sound
            )
        return sound

    def _fetch(self, part: RangeNumbers) -> None:
        """Fetch ranges that lie side by side, of all tables."""
        first, last = int(part[0]), int(part[-1]) + 1
        for name, sums in zip(self._arrays, self._sums, strict=True):
            begin = first * self.size * DOCUMENT_BYTES
            end = min(last * self.size, self._documents) * DOCUMENT_BYTES
            data = self._sound(name, begin, end, sums[first:last])
            with (
                cache_errors(self._store.url, self._folder),
                open(self._folder / name, "r+b", 0) as file,
            ):
                write_at(file.fileno(), begin, data)
        self._record.states[part] = PRESENT

    def _sound(self, name: str, begin: int, end: int, sums: Annotated[UInt64, "ranges"]) -> bytes:
        """Bytes of a table that have these checksums; asked for again once."""
        width = self.size * DOCUMENT_BYTES
        for last in (False, True):
            data = self._store.read_range(name, begin, end, self._stamps.get(name, ""))
            view = np.frombuffer(data, np.uint8)
            found = [checksum(view[at : at + width]) for at in range(0, len(view), width)]
            wrong = np.flatnonzero(np.array(found, np.uint64) != sums)
            if not len(wrong):
                break
            if last:
                document = begin // DOCUMENT_BYTES + int(wrong[0]) * self.size
                raise CorruptionError(
                    f"{self._store.where(name)}: what it says of documents {document:,} to "
                    f"{min(document + self.size, self._documents) - 1:,} is not what was "
                    "prepared: it differs from its checksum; upload the dataset again "
                    "(`penstock copy`)"
                )
        return data


@final
class JoinedRanges:
    """The lengths and weight sums of a joined corpus of which a part comes in ranges: copied in
    ranges, too.

    Args:
        parts: Lengths and weight sums of each part: arrays, or `LazyNumbers`.
        lengths: Those of all, to be written.
        sums: Weight sums of all, to be written; None: all weights are 0 or 1.
    """

    def __init__(
        self, parts: Sequence[tuple[Any, Any]], lengths: Array, sums: Array | None
    ) -> None:
        self._parts, self._lengths, self._sums = parts, lengths, sums
        self._starts = np.cumsum([0, *(len(part) for part, _ in parts)], dtype=np.int64)
        self._size, self._lock = RANGE_DOCUMENTS, threading.Lock()
        self._here = np.zeros(-(-len(lengths) // self._size), np.uint8)

    @property
    def size(self) -> int:
        """As in `Ranges`."""
        return self._size

    @property
    def here(self) -> Bytes:
        """As in `Ranges`."""
        return self._here

    def has(self, begin: int, end: int) -> bool:
        """As in `Ranges`."""
        return bool(self._here[begin // self._size : -(-end // self._size)].all())

    def want(self, begins: Documents, ends: Documents) -> None:
        """As in `Ranges`."""
        for number, (part, _) in enumerate(self._parts):
            low, high = self._starts[number : number + 2].tolist()
            mine = (begins < high) & (ends > low)
            if isinstance(part, LazyNumbers) and mine.any():
                part.ranges.want(
                    np.maximum(begins[mine], low) - low, np.minimum(ends[mine], high) - low
                )

    def need(self, begins: Documents, ends: Documents) -> None:
        """As in `Ranges`."""
        ranges = ranges_of(begins, ends, self._size)
        ranges = ranges[self._here[ranges] == 0]
        if not len(ranges):
            return
        firsts = ranges * self._size
        if len(ranges) <= _TOGETHER:
            # Of all parts at the same time; of many ranges, one part alone fills the line.
            self.want(firsts, np.minimum(firsts + self._size, len(self._lengths)))
        for group in runs_of(ranges, len(ranges)):
            self._copy(
                int(group[0]) * self._size,
                min((int(group[-1]) + 1) * self._size, len(self._lengths)),
            )
            with self._lock:
                self._here[group] = 1

    def _copy(self, begin: int, end: int) -> None:
        """Copy the numbers of documents `begin` … `end` − 1 from the parts."""
        for number, (lengths, sums) in enumerate(self._parts):
            low, high = self._starts[number : number + 2].tolist()
            first, last = max(begin, low), min(end, high)
            if last <= first:
                continue
            found = lengths[first - low : last - low]
            self._lengths[first:last] = found
            if self._sums is not None:
                self._sums[first:last] = (
                    found[:, 1] if sums is None else sums[first - low : last - low]
                )


def join_numbers(parts: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Lengths and weight sums of several tables, end to end: copied at once, or in ranges where a
    part is lazy.

    Args:
        parts: Lengths and weight sums (None: all weights are 0 or 1) of each.
    """
    fractional = any(sums is not None for _, sums in parts)
    if not any(isinstance(lengths, LazyNumbers) for lengths, _ in parts):
        sums = [
            lengths[:, 1].astype(np.float64) if sums is None else sums
            for lengths, sums in parts
            if fractional
        ]
        return np.concatenate([lengths for lengths, _ in parts]), np.concatenate(
            sums
        ) if fractional else None
    documents = sum(len(lengths) for lengths, _ in parts)
    # Pages that nothing is copied to take no memory.
    joined = np.empty((documents, parts[0][0].shape[1]), parts[0][0].dtype)
    joined_sums = np.empty(documents) if fractional else None
    ranges = JoinedRanges(parts, joined, joined_sums)
    return LazyNumbers(joined, ranges), None if joined_sums is None else LazyNumbers(
        joined_sums, ranges
    )
