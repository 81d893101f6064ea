"""Gives back the units of a remote dataset that were used least recently, so that it stays within
its budget.
"""

from collections.abc import Sequence
from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Array, Int32
from penstock.data.shards.remote.sparse_shards import SparseShards
from penstock.data.shards.remote.units import PAGE, Range, UnitMap, page_bytes, without
from penstock.data.stores.unit_record import ABSENT, UnitRecord

NOT_HERE, COMING, HERE = range(3)
"""States of a unit in this process: not locked, being brought, or locked and readable."""
_OLDEST = 256
"""Idle units that are found by one look over all of them."""


@final
class Eviction:
    """Makes room for units. The caller holds the lock of `states` and `pins` for every call.

    Args:
        record: Which units are here, and when each was used last, for all processes.
        units: What they consist of.
        shards: Their files.
        states: uint8 [units], of this process.
        pins: int32 [units], how often each is wanted by this process.
    """

    def __init__(
        self,
        record: UnitRecord,
        units: UnitMap,
        shards: SparseShards,
        states: Array,
        pins: Annotated[Int32, "units"],
    ) -> None:
        self._record, self._units, self._shards = record, units, shards
        self._states, self._pins = states, pins
        self._oldest: list[tuple[int, int]] = []
        self.budget: int | None = None
        """Maximum bytes on the disk; None: no limit."""

    def reserve(self, size: int, begun: int = 1) -> bool:
        """Account for units that will be brought, if they fit once old ones are given back; whether
        they do.
        """
        looks = 0
        while not self._record.account(size, begun=begun, limit=self._limit):
            if not self._oldest:
                self._oldest = self._find_oldest()
                looks += 1
                if not self._oldest or looks > 2:
                    return False
            unit, use = self._oldest.pop()
            if self._record.uses[unit] == use:  # else it was used since, and is not old any more
                self._give_back(unit)
        return True

    @property
    def _limit(self) -> int | None:
        return self.budget if self._shards.punches else None

    def _find_oldest(self) -> list[tuple[int, int]]:
        """Idle units, least recently used last, with their last-use times."""
        record = self._record
        is_idle = (record.states != ABSENT) & (self._states == NOT_HERE) & (self._pins == 0)
        idle = np.flatnonzero(is_idle)
        ages = (record.header["clock"][0] - record.uses[idle].astype(np.int64)) & 0xFFFFFFFF
        if len(idle) > _OLDEST:
            some = np.argpartition(-ages, _OLDEST)[:_OLDEST]
            idle, ages = idle[some], ages[some]
        idle = idle[np.argsort(ages, kind="stable")]
        return list(zip(idle.tolist(), record.uses[idle].tolist(), strict=True))

    def _give_back(self, unit: int) -> None:
        record = self._record
        if self._states[unit] != NOT_HERE or self._pins[unit] or not record.own(unit):
            return
        locked = [unit]
        try:
            if record.states[unit] == ABSENT:
                return
            pages = self._shards.pages(unit)
            record.states[unit] = ABSENT
            record.account(-page_bytes(pages))
            self._shards.punch(without(pages, self._kept_pages(unit, pages, locked)))
        finally:
            for one in locked:
                record.free(one)

    def _kept_pages(self, unit: int, pages: Sequence[Range], locked: list[int]) -> list[Range]:
        """Pages of neighbouring units that must stay; absent ones are locked, so that nobody brings
        them now.
        """
        kept: list[Range] = []
        record = self._record
        for other in self._units.neighbours(unit).tolist():
            theirs: list[Range] | None = None
            if self._units.has_lengths(other):
                theirs = self._pages_if_near(other, pages)
                if not theirs:
                    continue
            if (
                record.states[other] == ABSENT
                and self._states[other] == NOT_HERE
                and record.own(other)
            ):
                locked.append(other)
                if record.states[other] == ABSENT:
                    continue
            # Whoever brings it has its lengths, so asking for them now does not wait.
            kept += self._pages_if_near(other, pages) if theirs is None else theirs
        return kept

    def _pages_if_near(self, other: int, pages: Sequence[Range]) -> list[Range]:
        """The pages of a unit, if any of them is among `pages`."""
        parts = self._units.unit(other)
        if parts.has_more and self._record.states[other] != ABSENT:
            theirs = self._shards.pages(other)
        else:
            theirs = [
                Range(one.shard, one.begin // PAGE, -(-one.end // PAGE)) for one in parts.places
            ]
        shared = any(
            one.shard == mine.shard and one.begin < mine.end and mine.begin < one.end
            for one in theirs
            for mine in pages
        )
        return theirs if shared else []
