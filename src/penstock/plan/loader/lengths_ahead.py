"""The lengths that a plan reads of a large remote dataset come ahead of it, in the order of its
shuffle.

Documents that are mixed together are known from the permutation, so their lengths are asked for
together: a window of the runs of shuffle `block`, with the windows after it; a stretch of the
dataset with `none`. With `full`, the plan soon needs all lengths, at random places, so they come as
a whole, before the first step.
"""

from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Int64
from penstock.data.shards.tables.lengths import Ranges
from penstock.plan.loader.mixture import Source
from penstock.plan.loader.places import order_of
from penstock.plan.sampling.order import mixed_with

_STRETCH = 1 << 17
"""Maximum documents to wait for together: 512 runs of 256."""
_LEAST = 1024
"""Minimum documents to ask for after those."""


@final
class LengthsAhead:
    """Brings the lengths that one source's plan reads next.

    Args:
        source: Its shuffle.
        ranges: What brings them.
        first: Number of the first document in use.
        size: Documents of an epoch.
        key: Of the source's order.
        last: Documents of all epochs, at most.
    """

    def __init__(
        self, source: Source, ranges: Ranges, first: int, size: int, key: int, last: int
    ) -> None:
        self._source, self.ranges, self._first, self._size, self._key = (
            source,
            ranges,
            first,
            size,
            key,
        )
        self._last = last
        self._here = self._asked = 0, 0
        """Positions [begin, end) of the stretch that the plan is in; and of all that was asked
        for.
        """
        if source.shuffle == "full":
            self._here = self._asked = 0, last

    def look(self, position: int) -> None:
        """Ask for the lengths of the stretch at a position of the plan, and the next time for those
        after it.

        It never waits. When a run begins, nothing is asked for before what it begins with.
        """
        if self._here[0] <= position < self._here[1]:
            end = min(self._here[1] + max(2 * (self._here[1] - self._here[0]), _LEAST), self._last)
        else:
            self._here = self._stretch(position)
            end = self._here[1]
            if not self._asked[0] <= position <= self._asked[1]:
                self._asked = position, position
        while self._asked[1] < end:
            begin, stop = self._asked[1], self._stretch(self._asked[1])[1]
            documents = self._documents(begin, stop)
            self.ranges.want(documents, documents + 1)
            self._asked = self._asked[0], stop

    def bring(self, position: int) -> None:
        """Have the lengths from a position of the plan to the end of its stretch.

        Raises:
            StoreError, CorruptionError, OutputError: They cannot be brought; names the URL.
        """
        if self._source.shuffle == "full":
            self.ranges.need(np.array([self._first]), np.array([self._first + self._size]))
            return
        self.look(position)
        documents = self._documents(position, self._here[1])
        self.ranges.need(documents, documents + 1)

    def _stretch(self, position: int) -> tuple[int, int]:
        """The positions [begin, end) around one: their documents are asked for together."""
        epoch, index = divmod(position, self._size)
        begin, end = mixed_with(index, self._size, self._source.shuffle, self._source.shuffle_runs)
        if self._source.shuffle == "none":
            begin, end = 0, self._size
        begin += (index - begin) // _STRETCH * _STRETCH
        before = epoch * self._size
        return before + begin, min(before + min(begin + _STRETCH, end), self._last)

    def _documents(self, begin: int, end: int) -> Annotated[Int64, "documents"]:
        """The documents at some positions of one epoch."""
        epoch, index = divmod(begin, self._size)
        order = order_of(self._source, self._key, self._size, epoch)
        return self._first + order.images(index, index + end - begin)
