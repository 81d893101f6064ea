"""Writes one shard: arrays of whole blocks in, an Arrow IPC file and its side files out.

No Python object a document. The shard appears under its name only when it is complete and on the disk; its side files
(lengths, batch table, weight sums, and last a JSON that says that all is there) wait beside it until `finish_dataset`
joins them. So preparation killed at any moment goes on from the finished shards. The bytes of a shard depend on its
documents alone, not on the blocks in which they came.
"""

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import numpy as np

from penstock.compiled import address_of
from penstock.errors import ConfigError
from penstock.ragged import Ragged
from penstock.shards import _kernels as k
from penstock.shards._kernels import DOCUMENTS_PER_BATCH
from penstock.shards.blocks import Block, SpanBlock, accept_block, join_blocks
from penstock.shards.files import Array, map_file, output_errors, release_pages, sync
from penstock.shards.layout import SPAN, ShardLayout, batch_positions, flat_array, large_list, schema_of
from penstock.shards.manifest import ShardInfo
from penstock.shards.sides import describe_shard, save_sides


@final
class ShardWriter:
    """Writes a shard; use as a context manager, and call `finish` inside it.

    ```python
    with ShardWriter(folder, "part-00000.arrow", layout) as writer:
        writer.write(tokens, files=0, lines=lines)
        info = writer.finish()
    ```

    Leaving it without `finish` removes what was written.

    Args:
        folder: The dataset's; it must exist.
        name: The shard's file name, ending in ".arrow".
        layout: What all shards of the dataset have in common.
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
        with output_errors(self.path):
            self._open()

    def _open(self) -> None:
        import pyarrow as pa

        self._schema = schema_of(self.layout)
        self._sink: Any = pa.OSFile(str(self._partial), "wb")
        self._file: Any = pa.ipc.new_file(self._sink, self._schema)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sink is not None:
            self._sink.close()
            self._sink = None
            self._partial.unlink(missing_ok=True)

    @property
    def size_bytes(self) -> int:
        """Bytes written so far; up to a batch of documents waits in memory."""
        return 0 if self._sink is None else int(self._sink.tell())

    def write(
        self,
        tokens: Ragged,
        *,
        files: int | Array,
        lines: Array,
        spans: SpanBlock | None = None,
        texts: Any = None,
        text_bytes: int = 0,
    ) -> None:
        """Add documents.

        Args:
            tokens: Integers below `vocab_size`, a row for each document.
            files: Index of the origin file, one for all or int32 [documents].
            lines: Line or row of each document in its file, int64 [documents].
            spans: Loss weights, where the layout has them; None for all weights 1.
            texts: Arrow string array [documents], where the layout has text.
            text_bytes: UTF-8 bytes that the tokens stand for, for the manifest; of `texts` they are counted.

        Raises:
            ConfigError: Arrays that do not fit each other or the layout, tokens outside the vocabulary, spans out of
                order or outside their document.
            OutputError: The disk is full, or the folder went away.
        """
        self._waiting.append(accept_block(self.layout, tokens, files, lines, spans, texts))
        self._text_bytes += text_bytes if texts is None else _bytes_of(texts)
        if sum(map(len, self._waiting)) < DOCUMENTS_PER_BATCH:
            return
        block = join_blocks(self._waiting, self._room)
        whole = len(block) - len(block) % DOCUMENTS_PER_BATCH
        for begin in range(0, whole, DOCUMENTS_PER_BATCH):
            self._write_batch(block.slice(begin, begin + DOCUMENTS_PER_BATCH))
        self._waiting = [block.slice(whole, len(block))]

    def finish(self) -> ShardInfo:
        """Write what is left, force it to the disk, and give the shard its name.

        Raises:
            OutputError: The disk is full, or the folder went away.
        """
        block = join_blocks(self._waiting, self._room) if self._waiting else None
        if block is not None and len(block):
            self._write_batch(block)
        with output_errors(self.path):
            self._file.close()
            self._sink.close()
            sync(self._partial)
            info, lengths, batches = self._describe(map_file(self._partial))
            # Or written pages would push out those being read; and it is cheaper to use the same memory for the next.
            release_pages(self._partial)
            os.replace(self._partial, self.path)
            sync(self.path.parent)
        self._sink = None
        save_sides(self.path.parent, info, lengths, batches, self._weight_sums)
        return info

    def _describe(self, data: Array) -> tuple[ShardInfo, Array, Array]:
        """What the finished shard holds, given its bytes; its lengths, and where its batches are."""
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
        )
        return info, lengths, batches

    def _room(self, size: int) -> Array:
        """An array that holds no waiting block: two take turns, since fresh memory costs more than the copy."""
        self._rooms.reverse()
        if len(self._rooms[0]) < size:
            self._rooms[0] = np.empty(size + size // 2, self.layout.token_dtype)
        return self._rooms[0][:size]

    def _write_batch(self, block: Block) -> None:
        import pyarrow as pa

        valid, offsets, spans = block.span_arrays()
        self._summarise(block, valid, offsets, spans)
        origins = [flat_array(block.files), flat_array(block.lines)]
        columns = {
            "tokens": large_list(block.tokens.offsets, flat_array(block.tokens.values)),
            "checksums": self._checksums(block, valid, offsets, spans),
            "origin": pa.StructArray.from_arrays(origins, names=["file", "line"]),
            "text": block.texts,
        }
        if block.spans is not None:
            values = pa.StructArray.from_arrays([flat_array(part) for part in spans], names=list(SPAN.names or ()))
            columns["spans"] = large_list(offsets, values, valid)
        batch = pa.record_batch([columns[field.name] for field in self._schema], schema=self._schema)
        with output_errors(self.path):
            self._file.write_batch(batch)
        self._documents += len(block)

    def _summarise(self, block: Block, valid: Array, offsets: Array, spans: tuple[Array, Array, Array]) -> None:
        """Count the tokens and trained tokens of a batch, and check its spans."""
        lengths, weight_sums = np.empty((len(block), 2), np.uint32), np.empty(len(block))
        wrong, fractional = k.summarise_batch(block.tokens.offsets, valid, offsets, *spans, lengths, weight_sums)
        if wrong >= 0:
            listed = [part[offsets[wrong] : offsets[wrong + 1]].tolist() for part in spans]
            place = f"document {self._documents + wrong} (file {block.files[wrong]}, line {block.lines[wrong]})"
            raise ConfigError(
                f"{self.path}: {place} has {block.tokens.lengths[wrong]} tokens and spans (begin, end, weight) "
                f"{list(zip(*listed, strict=True))}; they must be in order, apart, inside it, not empty, and finite"
            )
        self._note_ends(block.tokens)
        self._lengths.append(lengths)
        self._weight_sums.append(weight_sums)
        self._fractional |= bool(fractional)

    def _note_ends(self, tokens: Ragged) -> None:
        """Remember which ids documents begin and end with, two of each at most."""
        begins, ends = tokens.offsets[:-1], tokens.offsets[1:]
        kept = begins < ends
        for ids, places in zip(self._ends, (begins[kept], ends[kept] - 1), strict=True):
            if len(ids) < 2 and len(places):
                found = tokens.values[places]
                ids.update({int(found.min()), int(found.max())})

    def _checksums(self, block: Block, valid: Array, offsets: Array, spans: tuple[Array, Array, Array]) -> Any:
        """The checksums column of a batch."""
        tokens = block.tokens
        starts = np.zeros(len(block) + 1, np.int64)
        k.checksum_counts(tokens.offsets, self.layout.has_spans, starts[1:])
        np.cumsum(starts, out=starts)
        words = np.empty(starts[-1], np.uint64)
        addresses = np.array([address_of(part) for part in spans], np.uint64)
        address = np.uint64(address_of(tokens.values))
        k.checksum_batch(address, tokens.values.itemsize, tokens.offsets, starts, (valid, offsets, addresses), words)
        return large_list(starts, flat_array(words))


def _bytes_of(texts: Any) -> int:
    """UTF-8 bytes of an Arrow string array."""
    import pyarrow.compute as pc

    return int(pc.sum(pc.binary_length(texts)).as_py() or 0)
