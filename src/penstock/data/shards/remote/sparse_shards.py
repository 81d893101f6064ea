"""The sparse files of a remote dataset's shards on this machine: units are written, compared,
measured and punched out.

It knows nothing of threads, locks or other processes: `residency` says which unit may be touched.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Int64
from penstock.data.shards.format import _check_kernels as check
from penstock.data.shards.remote.units import PAGE, Made, Range, UnitMap, page_bytes
from penstock.data.shards.tables.holder import SPANS, TOKENS
from penstock.data.shards.tables.lengths import for_kernel
from penstock.data.shards.tables.mappings import MappedShards, shards_of
from penstock.data.shards.tables.table import DocumentTable
from penstock.data.stores.files import checksum
from penstock.data.stores.unit_record import cache_errors, punch, write_at

_log = logging.getLogger("penstock.shards")


@final
class SparseShards:
    """The files of one dataset.

    Args:
        url: Of the dataset, for messages.
        cache: The folder of the cache, for messages.
        folder: Where the files are.
        table: Over these files.
        units: What they consist of.
    """

    def __init__(
        self, url: str, cache: Path, folder: Path, table: DocumentTable, units: UnitMap
    ) -> None:
        self._url, self._table, self._units = url, table, units
        self.cache = cache
        self.names = [os.path.basename(path) for path in map(str, table.paths)]
        """Of the shards, in the store and here."""
        self.paths = [os.path.join(folder, name) for name in self.names]
        # Where there are too many shards, those of units that are wanted or looked at are mapped.
        self.window = table.mappings if isinstance(table.mappings, MappedShards) else None
        """Maps shards on demand; None: all are mapped."""
        self.punches = True
        """Whether the file system gives back parts of files, as far as is known."""
        self._kernel_view = table.kernel_view

    def shards_of(self, units: Annotated[Int64, "units"]) -> Annotated[Int64, "shards"]:
        """The shards that units lie in, each as often as there are units in it."""
        spans = [self._units.documents(unit) for unit in units.tolist()]
        return shards_of(spans, self._table.shard_starts)

    def mapped(self, *units: int) -> AbstractContextManager[None]:
        """Have the shards of units mapped, if they are not all the time."""
        if self.window is None:
            return nullcontext()
        return self.window.held(self.shards_of(np.array(units)))

    def write(self, pieces: Sequence[Made]) -> None:
        """Write bytes into their places.

        Raises:
            OutputError: The cache cannot be written.
        """
        with cache_errors(self._url, self.cache):
            for shard in {piece.shard for piece in pieces}:
                handle = os.open(self.paths[shard], os.O_WRONLY | os.O_CLOEXEC)
                try:
                    for piece in pieces:
                        if piece.shard == shard:
                            write_at(handle, piece.begin, piece.content)
                finally:
                    os.close(handle)

    def later(self, unit: int) -> list[Range]:
        """Ranges of a unit whose places are read from what is here of it; its shards must be
        mapped.
        """
        return self._units.later(unit, self._table.mappings)

    def checksum(self, unit: int) -> int:
        """A checksum of all bytes of a unit that are here; never 0, which stands for none."""
        with self.mapped(unit):
            ranges = [*self._units.unit(unit).places, *self.later(unit)]
            data = self._table.mappings
            sums = [checksum(data[one.shard][one.begin : one.end]) for one in ranges]
        return checksum(np.array(sums, np.uint64)) or 1

    def wrong_document(self, unit: int) -> int:
        """A document of a unit that differs from its checksums, or −1."""
        return self.wrong_document_of(range(unit, unit + 1))

    def wrong_document_of(self, units: range) -> int:
        """The same of units of a kind that lie side by side."""
        kind = self._units.kind(units[0])
        if kind not in (TOKENS, SPANS):
            return -1
        places, batches, (token_bytes, _, _, has_spans) = self._kernel_view
        layout = (token_bytes, has_spans, kind == SPANS)
        begin, end = self._units.documents(units[0])[0], self._units.documents(units[-1])[1]
        lengths = for_kernel(self._table.lengths, np.arange(begin, end))
        with self.mapped(*units):
            return int(check.wrong_tokens(places, batches, layout, lengths, begin, end))

    def pages(self, unit: int) -> list[Range]:
        """The pages of a unit that is here."""
        with self.mapped(unit):
            return self._units.pages(unit, self._table.mappings)

    def size(self, unit: int) -> int:
        """Bytes of the pages of a unit that is here."""
        return page_bytes(self.pages(unit))

    def punch(self, pages: Sequence[Range]) -> None:
        """Give back the disk space of pages, if the file system does that; else warn, and try no
        more.
        """
        for one in pages:
            if not punch(self.paths[one.shard], one.begin * PAGE, one.end * PAGE):
                self.punches = False
                _log.warning(
                    "%s: its file system cannot give back parts of files, so the cache of %s grows "
                    "beyond cache_bytes",
                    self.cache, self._url,
                )  # fmt: skip
                return
