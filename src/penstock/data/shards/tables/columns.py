"""Columns and trees of a dataset: lists behind the texts of each batch, found once, and read by
document.

A column is a number for each token of each document (float32 or int32), with a checksum for every
256 of them. Making the table reads a few numbers of each batch of 1,024 documents.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, final

import numpy as np

from penstock.core.arrays import Array, Int64, UInt64
from penstock.core.compiled import address_of
from penstock.core.errors import CorruptionError
from penstock.core.ragged import Ragged
from penstock.data.shards.format import _column_kernels as ck
from penstock.data.shards.format import _kernels as k
from penstock.data.shards.format.images import ASSETS, IMAGE, WORDS, ImageOf, image_of, records_of
from penstock.data.shards.format.layout import ShardLayout, extra_places
from penstock.data.shards.format.trees import UNITS, Tree
from penstock.data.shards.tables.holder import EXTRAS
from penstock.data.shards.tables.lengths import for_kernel
from penstock.data.shards.tables.table import DocumentTable

_TOGETHER = 64
"""Batches of a remote dataset: their lists are read together."""


def column_checksums(offsets: Array, columns: Sequence[Ragged]) -> Ragged:
    """Checksums of the columns of a batch, uint64, a row for each document."""
    chunks = -(-np.diff(offsets) // k.CHUNK_TOKENS) * len(columns)
    starts = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int64)
    words = np.empty(int(starts[-1]), np.uint64)
    addresses = np.array([address_of(rows.values) for rows in columns], np.uint64)
    ck.checksum_columns(addresses, np.ascontiguousarray(offsets, np.int64), starts, words)
    return Ragged(words, starts)


@final
class ExtraTable:
    """Where the trees and columns of a dataset are.

    Args:
        table: Its document table.
        layout: The layout of its shards.

    Raises:
        CorruptionError: A list would leave its file.
    """

    def __init__(
        self, table: DocumentTable, layout: ShardLayout, path_values: tuple[str, ...]
    ) -> None:
        self._table, self.columns, self.path_values = table, layout.columns, path_values
        self.has_trees, self.has_images = layout.has_trees, layout.has_images
        self._first, self._layout = layout.first_column, layout
        self._lists = np.zeros((len(table.batches), 3, len(layout.extras)), np.int64)
        self._found = np.zeros(len(table.batches), np.bool_)
        if table.holder is None:
            self._find(np.arange(len(table.batches)))

    def _find(self, batches: Array) -> None:
        """Find the lists of batches, int64 [n]; those of a remote dataset must be held."""
        table = self._table
        shards = np.searchsorted(table.shard_first_batch, batches, side="right") - 1
        for shard, batch in zip(shards.tolist(), batches.tolist(), strict=True):
            data, address = table.mappings[shard], address_of(table.mappings[shard])
            documents = int(table.shard_starts[shard + 1] - table.shard_starts[shard])
            begin = int(table.shard_first_batch[shard])
            rows = min(
                table.documents_per_batch, documents - (batch - begin) * table.documents_per_batch
            )
            try:
                places = extra_places(data, table.batches[batch], rows, self._layout)
            except CorruptionError as error:
                raise CorruptionError(
                    f"{table.paths[shard]}: batch {batch - begin}: {error}"
                ) from None
            self._lists[batch, 0] = [place + address for place in places]
            self._lists[batch, 1] = [
                int(data[place + 8 * rows : place + 8 * rows + 8].view(np.int64)[0])
                for place in places
            ]
            self._lists[batch, 2] = rows
        self._found[batches] = True

    @contextmanager
    def _held(self, documents: Annotated[Int64, "documents"]) -> Iterator[None]:
        """Have the lists of documents, int64 [n], on this machine, and found."""
        if self._table.holder is None:
            yield
            return
        with self._table.held(documents, (EXTRAS,)):
            shards = np.searchsorted(self._table.shard_starts, documents, side="right") - 1
            local = documents - self._table.shard_starts[shards]
            batches = np.unique(
                self._table.shard_first_batch[shards] + local // self._table.documents_per_batch
            )
            self._find(batches[~self._found[batches]])
            yield

    def tree(self, document: int) -> Tree | None:
        """The tree of a document; None: it is an ordinary one without values.

        Raises:
            CorruptionError: It is not what was written; names the file and the document.
        """
        if not self.has_trees:
            return None
        words = self._words(document, 0)
        if not len(words):
            return None
        try:
            return Tree.of_words(words, self.path_values, int(self._table.lengths[document, 0]))
        except CorruptionError as error:
            raise self._fault(document, str(error)) from None

    def counts(self, documents: Annotated[Int64, "documents"]) -> Annotated[Int64, "documents 5"]:
        """[n, 5] what `trees.UNITS` names, of documents; 0 of those without a tree."""
        found = np.zeros((len(documents), len(UNITS)), np.int64)
        if self.has_trees:
            for row, document in enumerate(documents.tolist()):
                words = self._words(document, 0)
                if len(words):
                    found[row] = words[: len(UNITS)]
        return found

    def images(self, document: int) -> list[ImageOf]:
        """The images of a document, in order.

        Raises:
            CorruptionError: They are not what was written; names the file and the document.
        """
        if not self.has_images:
            return []
        words = self._words(document, int(self.has_trees))
        shard, holder = self._table.paths[self._table.locate(document)[0]], self._table.holder
        remote = holder is not None and holder.is_remote(np.array([document]))[0]
        near = holder.file_near(document, ASSETS) if holder is not None and remote else None
        try:
            records = records_of(words, int(self._table.lengths[document, 0]))
            return [image_of(record, Path(shard), near) for record in records]
        except CorruptionError as error:
            raise self._fault(document, str(error)) from None

    def patches(self) -> Annotated[Int64, "documents"]:
        """[N] patches of the images of each document; reads 64 bytes an image."""
        table, number = self._table, int(self.has_trees)
        found = np.zeros(len(table.lengths), np.int64)
        for shard in range(len(table.shard_starts) - 1) if self.has_images else ():
            begin, end = table.shard_starts[shard : shard + 2].tolist()
            # Of a remote dataset, some batches at a time.
            for first in range(begin, end, _TOGETHER * table.documents_per_batch):
                documents = np.arange(
                    first, min(first + _TOGETHER * table.documents_per_batch, end)
                )
                with self._held(documents):
                    self._add_patches(found, shard, first, int(documents[-1]) + 1, number)
        return found

    def _add_patches(self, found: Array, shard: int, first: int, end: int, number: int) -> None:
        """Patches of documents [first, end) of whole batches, whose lists are here."""
        table, data = self._table, self._table.mappings[shard]
        local = first - int(table.shard_starts[shard])
        batch = int(table.shard_first_batch[shard]) + local // table.documents_per_batch
        while first < end:
            address, count, rows = self._lists[batch, :, number].tolist()
            place = address - address_of(data)
            ends = data[place : place + 8 * (rows + 1)].view(np.int64) // WORDS
            values = data[place + 8 * (rows + 1) :][: 4 * count].view(IMAGE)["patches"]
            sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
            found[first : first + rows] = np.diff(sums[np.clip(ends, 0, len(values))])
            first, batch = first + rows, batch + 1

    def _words(self, document: int, number: int) -> Any:
        """Words of one of the first lists, of a document."""
        with self._held(np.array([document])):
            words = self._held_words(document, number)
            return words if self._table.holder is None else words.copy()

    def _held_words(self, document: int, number: int) -> Any:
        shard, batch, row = self._table.locate(document)
        data = self._table.mappings[shard]
        address, count, rows = self._lists[batch, :, number].tolist()
        place = address - address_of(data)
        begin, end = data[place + 8 * row : place + 8 * row + 16].view(np.int64).tolist()
        if not 0 <= begin <= end <= count:
            raise self._fault(document, "its tree or list of images leaves the file")
        values = place + 8 * (rows + 1)
        return data[values + 4 * begin : values + 4 * end].view(np.uint32)

    def numbers_of(self, names: Sequence[str]) -> Annotated[Int64, "columns"]:
        """Number of each column here; −1: the dataset lacks it."""
        mine = [column.name for column in self.columns]
        return np.array([mine.index(name) if name in mine else -1 for name in names], np.int64)

    def copy(
        self,
        pieces: Annotated[Int64, "pieces 7"],
        row_starts: Annotated[Int64, "rows+1"],
        slots: int,
        source: int,
        wanted: Annotated[Int64, "columns"],
        addresses: Annotated[UInt64, "columns"],
    ) -> None:
        """Copy columns of the pieces of one source to their slots.

        Args:
            pieces: The fields of the loader's `PIECE`.
            row_starts: First piece of each row.
            slots: Slots of a row.
            source: Number of the source that has this dataset.
            wanted: Number of each column here, from `numbers_of`; those that the dataset lacks are
                left alone.
            addresses: Where each column's array of [rows, slots] 32-bit numbers begins.

        Raises:
            CorruptionError: They are not what was written; names the file and the document.
        """
        table = self._table
        here = pieces[int(row_starts[0]) : int(row_starts[-1])]
        documents = here[here[:, ck.SOURCE] == source, ck.DOCUMENT]
        lengths = for_kernel(table.lengths, documents)
        with self._held(documents):
            fault, piece = ck.copy_columns(
                pieces,
                row_starts,
                slots,
                source,
                self._lists,
                table.shard_starts,
                table.shard_first_batch,
                table.documents_per_batch,
                lengths,
                wanted,
                self._first,
                addresses,
            )
        if fault != k.OK:
            raise self._fault(
                int(pieces[piece, ck.DOCUMENT]), "its columns differ from their checksums"
            )

    def read(self, document: int) -> dict[str, Array]:
        """Name → numbers of all tokens of a document."""
        count = int(self._table.lengths[document, 0])
        out = np.zeros((len(self.columns), count), np.uint32)
        whole = np.array([[0, document, 0, count, count, count, 0]])
        if self.columns:
            addresses = np.array([address_of(one) for one in out], np.uint64)
            self.copy(whole, np.array([0, 1]), count, 0, np.arange(len(self.columns)), addresses)
        return {
            column.name: values.view(column.dtype)
            for column, values in zip(self.columns, out, strict=True)
        }

    def _fault(self, document: int, what: str) -> CorruptionError:
        return CorruptionError(
            f"{self._table.paths[self._table.locate(document)[0]]}: document {document}: "
            f"{what}; copy the file again, or prepare again; `penstock verify` lists all "
            "faults"
        )
