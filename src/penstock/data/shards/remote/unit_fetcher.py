"""Fetches units of a remote dataset by ranges, writes them into their places, and checks them."""

from collections.abc import Sequence
from typing import final

from penstock.core.errors import CorruptionError
from penstock.data.shards.remote.sparse_shards import SparseShards
from penstock.data.shards.remote.stretches import Line
from penstock.data.shards.remote.units import Made, Range, UnitMap, joined_requests, merged
from penstock.data.shards.tables.table import DocumentTable
from penstock.data.stores.daemons import DaemonPool, result_of, wait_for
from penstock.data.stores.store import Store

THREADS = 64
"""Units that are brought at the same time, at most; and requests besides those of their threads."""
GAP = 1 << 13
"""Bytes between two ranges that are rather fetched than asked for in two requests."""
SHARE, FAST_GAP = 32, 1 << 16
"""The same as a part of the range before: a thirty-second; and where the line has no limits."""


@final
class UnitFetcher:
    """Fetches units of one dataset.

    Args:
        store: Where the dataset is.
        shards: The sparse shards to write into.
        table: Its document table, over the sparse shards.
        units: What they are.
        stamps: File → stamp that it must have.
        line: The line to the store; each request is measured.
    """

    def __init__(
        self,
        store: Store,
        shards: SparseShards,
        table: DocumentTable,
        units: UnitMap,
        stamps: dict[str, str],
        line: Line,
    ) -> None:
        self._store, self._shards, self._table, self._units = store, shards, table, units
        self._stamps, self._line = stamps, line
        self._threads = DaemonPool(THREADS, "penstock-ranges")

    def fetch(self, unit: int, *, at_once: bool) -> int:
        """Fetch a unit; its shards must be mapped.

        Args:
            unit: Its number.
            at_once: Request its ranges at the same time; False: other units keep all threads busy
                anyway.

        Returns:
            The bytes of it that `UnitMap.size` does not count.

        Raises:
            StoreError, OutputError: The store cannot be read, or the shards cannot be written.
            CorruptionError: It is not what was prepared, also when it is fetched twice.
        """
        parts = self._units.unit(unit)
        for last in (False, True):
            self._write(parts.fetched, parts.made, at_once)
            if later := self._shards.later(unit):
                self._write(later, (), at_once)
            wrong = self._shards.wrong_document(unit)
            if wrong < 0:
                break
            if last:
                url = self._store.url
                shard = self._shards.names[self._table.locate(wrong)[0]]
                raise CorruptionError(
                    f"{self._store.where(shard)}: document {wrong} is not what was prepared: "
                    "its bytes differ from their checksums, also when they are fetched again "
                    f"into the cache {self._shards.cache}; upload the dataset again (`penstock "
                    f"verify {url}` lists all faults)"
                )
        return self._shards.size(unit) - self._units.size(unit) if later else 0

    def fetch_together(self, units: range) -> bool:
        """Fetch runs that lie side by side, in as few requests as possible; their shards must be
        mapped. Returns whether they are what was prepared.

        Raises:
            StoreError, OutputError: The store cannot be read, or the shards cannot be written.
            CorruptionError: A shard of the store is another than before.
        """
        parts = [self._units.unit(unit) for unit in units]
        fetched = merged([one for part in parts for one in part.fetched])
        made = [one for part in parts for one in part.made]
        self._write(fetched, made, at_once=False, gap=FAST_GAP if self._line.is_fast else GAP)
        return self._shards.wrong_document_of(units) < 0

    def _write(
        self, ranges: Sequence[Range], made: Sequence[Made], at_once: bool, gap: int = GAP
    ) -> None:
        """Request ranges, and write them and what was made."""
        requests = joined_requests(ranges, gap, SHARE)
        bodies = self._bodies([whole for whole, _ in requests], at_once)
        pieces = [
            Made(part.shard, part.begin, body[part.begin - whole.begin : part.end - whole.begin])
            for (whole, parts), body in zip(requests, bodies, strict=True)
            for part in parts
        ]
        self._shards.write([*pieces, *made])

    def _bodies(self, ranges: Sequence[Range], at_once: bool) -> list[memoryview]:
        if not at_once:
            return [self._request(one) for one in ranges]
        others = [self._threads.submit(self._request, one) for one in ranges[1:]]
        try:
            bodies = [self._request(one) for one in ranges[:1]]
        finally:
            for other in others:
                wait_for(other)
        return bodies + [result_of(other) for other in others]

    def _request(self, one: Range) -> memoryview:
        name = self._shards.names[one.shard]
        stamp = self._stamps.get(name, "")
        return self._line.asked(lambda: self._store.read_view(name, one.begin, one.end, stamp))
