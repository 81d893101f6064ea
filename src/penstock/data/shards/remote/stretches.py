"""Which units come in one request: runs of documents that lie side by side.

Runs that are wanted and lie side by side always come together, up to a megabyte. Where the line
has no limits, a request costs more than its bytes; so what lies around a wanted run comes with it,
up to eight megabytes, whether it is wanted yet or not. As long as little of that was used, little
more is brought.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Array, Int32, Int64
from penstock.data.shards.remote.eviction import NOT_HERE
from penstock.data.shards.remote.units import UnitMap
from penstock.data.stores.unit_record import ABSENT, UnitRecord

WANTED_BYTES = 1 << 20
"""Bytes of wanted runs that come in one request, at most."""
AROUND_BYTES = 8 << 20
"""Bytes that come in one request where the line has no limits, at most."""
_LARGE, _SMALLER = 8, 4
"""While eight such requests are under way, others are for a quarter: their bytes are in memory."""
UNUSED = 8
"""Runs that nobody wanted yet are at most this many times as many as those that were wanted."""
_FAST_SECONDS, _FAST_RATE = 1e-3, 100e6
_LEAST, _REQUESTS, _QUICKEST = 8, 32, 256
"""A line has no limits while half of its last 32 requests took at most a millisecond and 10 ms a
megabyte, of the time that requests under way share; and one of the last 256 took at most twice
that, from its begin to its end. With a busy processor, few come as soon as the line allows.
"""


@final
class Line:
    """The line to a store, as its last requests found it."""

    def __init__(self) -> None:
        self._lock, self._under_way = threading.Lock(), 0
        self._shared: deque[float] = deque(maxlen=_REQUESTS)
        """Seconds more than a fast line takes, of the time that requests shared."""
        self._whole: deque[float] = deque(maxlen=_QUICKEST)
        """The same, from begin to end, over what a fast line takes."""
        self.is_fast = False
        """Whether it has no limits, as far as is known."""

    def asked(self, request: Callable[[], memoryview]) -> memoryview:
        """The answer to a request, which is measured."""
        with self._lock:
            self._under_way += 1
            others = self._under_way
        begun = time.monotonic()
        size = 0
        try:
            data = request()
            size = len(data)
            return data
        finally:
            with self._lock:
                if size:
                    self.note(time.monotonic() - begun, (others + self._under_way) / 2, size)
                self._under_way -= 1

    def note(self, seconds: float, together: float, size: int) -> None:
        """A request for `size` bytes took `seconds`, with `together` requests under way."""
        fast = _FAST_SECONDS + size / _FAST_RATE
        self._shared.append(seconds / together - fast)
        self._whole.append(seconds / fast)
        self.is_fast = (
            len(self._shared) >= _LEAST and median(self._shared) <= 0 and min(self._whole) <= 2
        )


@final
class Stretches:
    """Finds the units that come with a wanted one. The caller holds the lock of `states` and
    `pins` for every call.

    Args:
        record: Which units are here, for all processes.
        units: What they consist of.
        states: uint8 [units], of this process, as in `Eviction`.
        pins: int32 [units], how often each is wanted by this process.
        stored_bytes: Of all shards.
        line: The line to the store.
    """

    def __init__(
        self,
        record: UnitRecord,
        units: UnitMap,
        states: Array,
        pins: Annotated[Int32, "units"],
        stored_bytes: int,
        line: Line,
    ) -> None:
        self._record, self._units, self._states, self._pins = record, units, states, pins
        self._together, self._around = (
            max(size * units.runs // max(stored_bytes, 1), 1)
            for size in (WANTED_BYTES, AROUND_BYTES)
        )
        self._line = line
        self._is_unused = np.zeros(units.runs, np.bool_)
        """[runs] came with another run, and was not wanted since."""
        self._unused = self._used = 0
        self._under_way = 0

    def want(self, units: Annotated[Int64, "units"]) -> None:
        """Count what came before it was wanted as used."""
        if self._unused:
            runs = units[units < len(self._is_unused)]
            found = runs[self._is_unused[runs]]
            self._is_unused[found] = False
            self._unused, self._used = self._unused - len(found), self._used + len(found)

    def came(self, stretch: range) -> None:
        """What `of` found is here, or cannot come."""
        self._under_way -= len(stretch) > 1

    def of(self, unit: int, *, may_add: bool) -> range:
        """The units that come with an absent one, in one request; the caller calls `came` for
        several.

        Args:
            unit: Its number.
            may_add: Whether runs may come that nobody wants yet.
        """
        if unit >= self._units.runs:
            return range(unit, unit + 1)
        room = UNUSED * (self._used + 1) - self._unused
        if may_add and room > 0 and self._line.is_fast:
            size = self._around
            if self._under_way >= _LARGE:
                size = max(size // _SMALLER, 1)
            begin = unit // size * size
            found = self._absent(unit, max(begin, unit - room), min(begin + size, unit + room))
        else:
            found = self._absent(unit, unit, unit + self._together, only_wanted=True)
        self._under_way += len(found) > 1
        added = found.start + np.flatnonzero(self._pins[found.start : found.stop] == 0)
        self._is_unused[added] = True
        self._unused, self._used = (
            self._unused + len(added),
            self._used + len(found) - len(added),
        )
        return found

    def _absent(self, unit: int, begin: int, end: int, *, only_wanted: bool = False) -> range:
        """The longest range of absent runs around a run, in [begin, end)."""
        end = min(end, self._units.runs)
        part = slice(begin, end)
        brings = (self._record.states[part] == ABSENT) & (self._states[part] == NOT_HERE)
        if only_wanted:
            brings &= self._pins[part] > 0
        brings[unit - begin] = True  # another process may have brought it just now
        stops = begin + np.flatnonzero(~brings)
        at = int(np.searchsorted(stops, unit))
        begin = int(stops[at - 1]) + 1 if at else begin
        end = int(stops[at]) if at < len(stops) else end
        # Where runs lie follows from their lengths, which nobody waits for here.
        has_lengths = self._units.has_lengths
        begin = next(
            (one + 1 for one in range(unit - 1, begin - 1, -1) if not has_lengths(one)), begin
        )
        end = next((one for one in range(unit + 1, end) if not has_lengths(one)), end)
        return range(begin, end)
