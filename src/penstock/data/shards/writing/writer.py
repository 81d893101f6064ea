"""Writes one shard: blocks of documents are checked, cut into batches, and written as an Arrow IPC
file.

There is no Python object per document. The shard gets its name only when it is complete and on the
disk. Its side files (lengths, batch table, weight sums, and last a JSON that marks it as finished)
stay next to it until `finish_dataset` joins them. So a preparation that is killed at any moment
continues after the finished shards. The bytes of a shard depend on its documents alone, not on the
blocks in which they came.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.arrays import Array
from penstock.core.arrow import from_numpy
from penstock.core.compiled import address_of
from penstock.core.errors import ConfigError
from penstock.core.ragged import Ragged
from penstock.data.shards.format._batch_kernels import (
    checksum_batch,
    checksum_counts,
    summarise_batch,
)
from penstock.data.shards.format._kernels import DOCUMENTS_PER_BATCH
from penstock.data.shards.format.images import AssetWriter, ImageOf
from penstock.data.shards.format.layout import (
    COLUMN_CHECKSUMS,
    SPAN,
    ShardLayout,
    batch_positions,
    large_list,
    schema_of,
)
from penstock.data.shards.format.manifest import ShardInfo
from penstock.data.shards.format.trees import Tree
from penstock.data.shards.tables.columns import column_checksums
from penstock.data.shards.writing.blocks import Block, SpanBlock, accept_block, join_blocks
from penstock.data.shards.writing.finish import describe_shard, save_sides
from penstock.data.stores.files import map_file, output_errors, release_pages, sync


@final
class ShardWriter:
    """Writes a shard; use it as a context manager, and call `finish` inside.

    ```python
    with ShardWriter(folder, "part-00000.arrow", layout) as writer:
        writer.write(tokens, files=0, lines=lines)
        info = writer.finish()
    ```

    Leaving it without `finish` removes what was written.

    Args:
        folder: The dataset's folder, which must exist.
        name: The shard's file name, ending in ".arrow".
        layout: The layout of all shards of the dataset.
    """

    def __init__(self, folder: Path, name: str, layout: ShardLayout) -> None:
        if not name.endswith(".arrow") or "/" in name:
            raise ConfigError(f"a shard's name must be a file name ending in .arrow, got {name!r}")
        self.path, self.layout = Path(folder) / name, layout
        self._partial = self.path.with_name(name + ".partial")
        self._waiting: list[Block] = []
        self._rooms = [np.empty(0, layout.token_dtype)] * 2
        self._lengths: list[Array] = [np.empty((0, 2), np.uint32)]
        self._weight_sums: list[Array] = []
        self._text_bytes, self._fractional, self._documents = 0, False, 0
        self._ends: tuple[set[int], set[int]] = set(), set()
        self._assets = AssetWriter(self.path) if layout.has_images else None
        with output_errors(self.path):
            self._open()

    def _open(self) -> None:
        self._schema = schema_of(self.layout)
        self._sink = pa.OSFile(str(self._partial), "wb")
        self._file = pa.ipc.new_file(self._sink, self._schema)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sink is not None:
            self._sink.close()
            self._sink = None
            self._partial.unlink(missing_ok=True)
        if self._assets is not None:
            self._assets.abandon()

    @property
    def size_bytes(self) -> int:
        """Bytes written so far; up to one batch of documents is held in memory."""
        return 0 if self._sink is None else int(self._sink.tell())

    def write(
        self,
        tokens: Ragged,
        *,
        files: int | Array,
        lines: Array,
        spans: SpanBlock | None = None,
        texts: pa.Array = None,
        text_bytes: int = 0,
        trees: Sequence[Tree | None] | None = None,
        columns: Mapping[str, Ragged] | None = None,
        images: Sequence[Sequence[ImageOf]] | None = None,
    ) -> None:
        """Add documents.

        Args:
            tokens: Integers below `vocab_size`, one row per document.
            files: Index of the origin file, one for all or int32 [documents].
            lines: Line or row of each document in its file, int64 [documents].
            spans: Loss weights, if the layout has them; None: all weights are 1.
            texts: Arrow string array [documents], if the layout has text.
            text_bytes: UTF-8 bytes that the tokens represent, for the manifest; counted if `texts`
                are given.
            trees: The tree of each document, if the layout has them; None: an ordinary document.
            columns: Numbers of each token, one row per document, for each column of the layout.
            images: Those of each document, in order, if the layout has them; their bytes are stored
                at once.

        Raises:
            ConfigError: Arrays do not fit each other or the layout, tokens are outside the
                vocabulary, or spans are out of order or outside their document.
            OutputError: The disk is full, or the folder was removed.
        """
        words = None
        if images is not None and self._assets is not None:
            words = self._assets.add(images, tokens.lengths.tolist())
        self._waiting.append(
            accept_block(self.layout, tokens, files, lines, spans, texts, trees, columns, words)
        )
        self._text_bytes += text_bytes if texts is None else _bytes_of(texts)
        if sum(map(len, self._waiting)) < DOCUMENTS_PER_BATCH:
            return
        block = join_blocks(self._waiting, self._room)
        whole = len(block) - len(block) % DOCUMENTS_PER_BATCH
        for begin in range(0, whole, DOCUMENTS_PER_BATCH):
            self._write_batch(block.slice(begin, begin + DOCUMENTS_PER_BATCH))
        self._waiting = [block.slice(whole, len(block))]

    def finish(self) -> ShardInfo:
        """Write the remaining documents, force the file to the disk, and give the shard its name.

        Raises:
            OutputError: The disk is full, or the folder was removed.
        """
        block = join_blocks(self._waiting, self._room) if self._waiting else None
        if block is not None and len(block):
            self._write_batch(block)
        with output_errors(self.path):
            self._file.close()
            self._sink.close()
            sync(self._partial)
            assets = self._assets.finish() if self._assets is not None else 0
            info, lengths, batches = self._describe(map_file(self._partial), assets)
            # Otherwise written pages would push out those being read; reusing their memory is also
            # cheaper.
            release_pages(self._partial)
            os.replace(self._partial, self.path)
            sync(self.path.parent)
        self._sink = None
        save_sides(self.path.parent, info, lengths, batches, self._weight_sums)
        return info

    def _describe(self, data: Array, assets: int) -> tuple[ShardInfo, Array, Array]:
        """The description of the finished shard with these bytes, its lengths, and its batch
        table.
        """
        lengths = np.concatenate(self._lengths)
        batches = batch_positions(data, self.layout, len(lengths))
        first, last = (ids.pop() if len(ids) == 1 else -1 for ids in self._ends)
        info = describe_shard(
            self.path.name,
            data,
            batches,
            lengths,
            text_bytes=self._text_bytes,
            fractional=self._fractional,
            ends=(first, last),
            assets=assets,
        )
        return info, lengths, batches

    def _room(self, size: int) -> Array:
        """An array that holds no waiting block: two alternate, because new memory costs more than
        the copy.
        """
        self._rooms.reverse()
        if len(self._rooms[0]) < size:
            self._rooms[0] = np.empty(size + size // 2, self.layout.token_dtype)
        return self._rooms[0][:size]

    def _write_batch(self, block: Block) -> None:
        valid, offsets, spans = block.span_arrays()
        self._summarise(block, valid, offsets, spans)
        origins = [from_numpy(block.files), from_numpy(block.lines)]
        columns = {
            "tokens": large_list(block.tokens.offsets, from_numpy(block.tokens.values)),
            "checksums": self._checksums(block, valid, offsets, spans),
            "origin": pa.StructArray.from_arrays(origins, names=["file", "line"]),
            "text": block.texts if block.texts is None else _without_rest(block.texts),
        }
        if block.spans is not None:
            values = pa.StructArray.from_arrays(
                [from_numpy(part) for part in spans], names=list(SPAN.names or ())
            )
            columns["spans"] = large_list(offsets, values, valid)
        names = [name for name, _ in self.layout.extras if name != COLUMN_CHECKSUMS]
        for name, rows in zip(names, block.extras, strict=True):
            columns[name] = large_list(rows.offsets, from_numpy(rows.values))
        if self.layout.columns:
            words = column_checksums(block.tokens.offsets, block.extras[self.layout.first_column :])
            columns[COLUMN_CHECKSUMS] = large_list(words.offsets, from_numpy(words.values))
        batch = pa.record_batch(
            [columns[field.name] for field in self._schema], schema=self._schema
        )
        with output_errors(self.path):
            self._file.write_batch(batch)
        self._documents += len(block)

    def _summarise(
        self, block: Block, valid: Array, offsets: Array, spans: tuple[Array, Array, Array]
    ) -> None:
        """Count the tokens and trained tokens of a batch, and check its spans."""
        lengths, weight_sums = np.empty((len(block), 2), np.uint32), np.empty(len(block))
        wrong, fractional = summarise_batch(
            block.tokens.offsets, valid, offsets, *spans, lengths, weight_sums
        )
        if wrong >= 0:
            listed = [part[offsets[wrong] : offsets[wrong + 1]].tolist() for part in spans]
            place = (
                f"document {self._documents + wrong} (file {block.files[wrong]}, line "
                f"{block.lines[wrong]})"
            )
            raise ConfigError(
                f"{self.path}: {place} has {block.tokens.lengths[wrong]} tokens and spans "
                f"(begin, end, weight) {list(zip(*listed, strict=True))}; they must be in "
                "order, not overlap, be inside the document, not empty, and have finite "
                "weights"
            )
        self._note_ends(block.tokens)
        self._lengths.append(lengths)
        self._weight_sums.append(weight_sums)
        self._fractional |= bool(fractional)

    def _note_ends(self, tokens: Ragged) -> None:
        """Record the ids that documents begin and end with, at most two of each."""
        begins, ends = tokens.offsets[:-1], tokens.offsets[1:]
        kept = begins < ends
        for ids, places in zip(self._ends, (begins[kept], ends[kept] - 1), strict=True):
            if len(ids) < 2 and len(places):
                found = tokens.values[places]
                ids.update({int(found.min()), int(found.max())})

    def _checksums(
        self, block: Block, valid: Array, offsets: Array, spans: tuple[Array, Array, Array]
    ) -> pa.Array:
        """The checksums column of a batch."""
        tokens = block.tokens
        starts = np.zeros(len(block) + 1, np.int64)
        checksum_counts(tokens.offsets, self.layout.has_spans, starts[1:])
        np.cumsum(starts, out=starts)
        words = np.empty(starts[-1], np.uint64)
        addresses = np.array([address_of(part) for part in spans], np.uint64)
        address = np.uint64(address_of(tokens.values))
        checksum_batch(
            address,
            tokens.values.itemsize,
            tokens.offsets,
            starts,
            (valid, offsets, addresses),
            words,
        )
        return large_list(starts, from_numpy(words))


def _without_rest(texts: pa.Array) -> pa.Array:
    """The same texts with buffers of their own size: Arrow writes up to 63 bytes behind those of a
    slice.
    """
    _, places, values = texts.buffers()
    offsets = np.frombuffer(places, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    kept = pa.py_buffer(b"") if values is None else values.slice(first, last - first)
    return pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(offsets - first), kept)


def _bytes_of(texts: pa.Array) -> int:
    """UTF-8 bytes of an Arrow string array."""
    return int(pc.sum(pc.binary_length(texts)).as_py() or 0)
