"""Writes one shard: arrays of whole blocks in, an Arrow IPC file and its side files out.

No Python object a document. The shard appears under its name only when it is complete and on the disk; its side files
(lengths, batch table, weight sums, and last a JSON that says that all is there) wait in the folder `UNFINISHED` until
`finish_dataset` joins them. So preparation killed at any moment goes on from the finished shards.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import numpy as np

from penstock.compiled import address_of
from penstock.errors import ConfigError, FormatError
from penstock.ragged import Ragged
from penstock.shards import _kernels as k
from penstock.shards.files import Array, checksum, map_file, output_errors, sync_folder, write_file, write_json
from penstock.shards.manifest import DOCUMENTS_PER_BATCH, HISTOGRAM_BINS, ShardInfo, shard_from_json

UNFINISHED = "unfinished"
"""Folder of the side files, inside the dataset's, gone when the dataset is finished."""

SPAN = np.dtype([("begin", "<u4"), ("end", "<u4"), ("loss_weight", "<f4")])
"""A range of tokens of a document, half-open, and the loss weight of the tokens in it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """What all shards of a dataset have in common."""

    vocab_size: int
    """One more than the highest token id; up to 65,536 tokens take two bytes each, else four."""
    has_spans: bool = False
    has_text: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.vocab_size <= 2**32:
            raise ConfigError(f"vocab_size must be between 1 and 2^32, got {self.vocab_size}")

    @property
    def token_dtype(self) -> Any:
        """uint16 or uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SpanBlock:
    """Loss-weight spans of a block of documents."""

    spans: Ragged
    """Values of dtype `SPAN`, a row for each document."""
    valid: np.ndarray[Any, np.dtype[np.bool_]]
    """bool [documents]: False where a document has no list, so that all its weights are 1."""


@final
@dataclass(frozen=True, slots=True)
class _Block:
    """Documents waiting to be written: tokens, spans, origins, texts."""

    tokens: Ragged
    spans: SpanBlock | None
    files: Array
    lines: Array
    texts: Any

    def __len__(self) -> int:
        return len(self.tokens)

    def slice(self, begin: int, end: int) -> "_Block":
        spans = self.spans
        if spans is not None:
            spans = SpanBlock(spans=_slice(spans.spans, begin, end), valid=spans.valid[begin:end])
        texts = None if self.texts is None else self.texts[begin:end]
        return _Block(_slice(self.tokens, begin, end), spans, self.files[begin:end], self.lines[begin:end], texts)


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
        self._waiting: list[_Block] = []
        self._lengths: list[Array] = []
        self._weight_sums: list[Array] = []
        self._text_bytes, self._fractional, self._documents = 0, False, 0
        with output_errors(self.path):
            self._open()

    def _open(self) -> None:
        import pyarrow as pa

        self._schema = _schema(self.layout)
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
            tokens: Unsigned integers below `vocab_size`, a row for each document.
            files: Index of the origin file, one for all or int32 [documents].
            lines: Line or row of each document in its file, int64 [documents].
            spans: Loss weights, where the layout has them; None for all weights 1.
            texts: Arrow string array [documents], where the layout has text.
            text_bytes: UTF-8 bytes that the tokens stand for, for the manifest.

        Raises:
            ConfigError: Arrays that do not fit each other or the layout, tokens outside the vocabulary, spans out of
                order or outside their document.
            OutputError: The disk is full, or the folder went away.
        """
        block = self._accept(tokens, files, lines, spans, texts)
        self._text_bytes += text_bytes
        self._waiting.append(block)
        if sum(map(len, self._waiting)) >= DOCUMENTS_PER_BATCH:
            block = _join(self._waiting)
            whole = len(block) - len(block) % DOCUMENTS_PER_BATCH
            for begin in range(0, whole, DOCUMENTS_PER_BATCH):
                self._write_batch(block.slice(begin, begin + DOCUMENTS_PER_BATCH))
            self._waiting = [block.slice(whole, len(block))] if whole < len(block) else []

    def _accept(self, tokens: Ragged, files: int | Array, lines: Array, spans: SpanBlock | None, texts: Any) -> _Block:
        """Check a block and bring it to the types of the layout."""
        count = len(tokens)
        if not self.layout.has_spans and spans is not None or (texts is None) == self.layout.has_text:
            raise ConfigError(f"{self.path.name}: spans or texts do not fit the layout {self.layout}")
        values = np.ascontiguousarray(tokens.values)
        if len(values) and (int(values.max()) >= self.layout.vocab_size or int(values.min()) < 0):
            raise ConfigError(
                f"{self.path.name}: token ids from {values.min()} to {values.max()}; the vocabulary has "
                f"{self.layout.vocab_size}: 0 to {self.layout.vocab_size - 1}"
            )
        tokens = Ragged(values.astype(self.layout.token_dtype, copy=False), np.asarray(tokens.offsets, np.int64))
        if count and int(tokens.lengths.max()) >= 2**32:
            raise ConfigError(f"{self.path.name}: a document of {tokens.lengths.max()} tokens; at most 2^32 - 1")
        if self.layout.has_spans and spans is None:
            spans = SpanBlock(
                spans=Ragged(np.empty(0, SPAN), np.zeros(count + 1, np.int64)), valid=np.zeros(count, np.bool_)
            )
        origins = np.full(count, files, np.int32) if np.isscalar(files) else np.asarray(files, np.int32)
        block = _Block(tokens, spans, origins, np.asarray(lines, np.int64), texts)
        sizes = {len(block.files), len(block.lines), count}
        sizes |= {len(spans.spans), len(spans.valid)} if spans is not None else set()
        if len(sizes | ({len(texts)} if texts is not None else set())) > 1:
            raise ConfigError(
                f"{self.path.name}: tokens, spans, origins and texts are not of the same {count} documents"
            )
        return block

    def _write_batch(self, block: _Block) -> None:
        import pyarrow as pa

        arrays, columns = self._columns(block)
        batch = pa.record_batch([columns[field.name] for field in self._schema], schema=self._schema)
        with output_errors(self.path):
            self._file.write_batch(batch)
        del arrays
        self._documents += len(block)

    def _columns(self, block: _Block) -> tuple[Any, dict[str, Any]]:
        """Arrow columns of a batch, and the arrays that they point into; also counts its lengths."""
        import pyarrow as pa

        count, tokens = len(block), block.tokens
        valid, offsets, spans, parts = _split_spans(block.spans)
        lengths, weight_sums = np.empty((count, 2), np.uint32), np.empty(count)
        wrong, fractional = k.summarise_batch(tokens.offsets, valid, offsets, *parts, lengths, weight_sums)
        if wrong >= 0:
            raise ConfigError(
                f"{self.path.name}: document {self._documents + wrong} (line {block.lines[wrong]} of file "
                f"{block.files[wrong]}): spans {spans[offsets[wrong] : offsets[wrong + 1]].tolist()} overlap, are empty "
                f"or out of order, leave its {lengths[wrong, 0]} tokens, or have a weight that is not finite"
            )
        self._lengths.append(lengths)
        self._weight_sums.append(weight_sums)
        self._fractional |= bool(fractional)
        starts = np.zeros(count + 1, np.int64)
        k.checksum_counts(tokens.offsets, self.layout.has_spans, starts[1:])
        np.cumsum(starts, out=starts)
        words = np.empty(starts[-1], np.uint64)
        addresses = np.array([address_of(part) for part in parts], np.uint64)
        address = np.uint64(address_of(tokens.values))
        k.checksum_batch(address, tokens.values.itemsize, tokens.offsets, starts, (valid, offsets, addresses), words)
        columns = {
            "tokens": _large_list(tokens.offsets, pa.array(tokens.values)),
            "checksums": _large_list(starts, pa.array(words)),
            "origin": pa.StructArray.from_arrays(
                [pa.array(block.files), pa.array(block.lines)], names=["file", "line"]
            ),
        }
        if block.spans is not None:
            values = pa.StructArray.from_arrays([pa.array(part) for part in parts], names=list(SPAN.names or ()))
            columns["spans"] = _large_list(offsets, values, valid)
        if block.texts is not None:
            columns["text"] = block.texts.cast(pa.large_string())
        return (parts, words), columns

    def finish(self) -> ShardInfo:
        """Write what is left, force it to the disk, and give the shard its name.

        Raises:
            OutputError: The disk is full, or the folder went away.
        """
        if self._waiting:
            self._write_batch(_join(self._waiting))
            self._waiting = []
        with output_errors(self.path):
            self._file.close()
            self._sink.close()
            self._sink = None
            _sync(self._partial)
            data = map_file(self._partial)
            batches = batch_positions(data, self.layout.has_spans)
            os.replace(self._partial, self.path)
            sync_folder(self.path.parent)
        return self._write_sides(data, batches)

    def _write_sides(self, data: Array, batches: Array) -> ShardInfo:
        lengths = np.concatenate([np.empty((0, 2), np.uint32), *self._lengths])
        tokens = lengths[:, 0]
        bits = np.bincount(np.frexp(tokens.astype(np.float64))[1], minlength=HISTOGRAM_BINS)
        info = ShardInfo(
            file=self.path.name,
            documents=len(lengths),
            batches=len(batches),
            bytes=len(data),
            tokens=int(tokens.sum(dtype=np.int64)),
            trained_tokens=int(lengths[:, 1].sum(dtype=np.int64)),
            text_bytes=self._text_bytes,
            fractional_weights=self._fractional,
            checksum=checksum(data),
            longest=int(tokens.max(initial=0)),
            histogram=tuple(bits.tolist()),
        )
        sides = self.path.parent / UNFINISHED
        with output_errors(sides):
            sides.mkdir(exist_ok=True)
        write_file(sides / f"{info.file}.lengths", lengths)
        write_file(sides / f"{info.file}.batches", batches)
        if self._fractional:
            write_file(sides / f"{info.file}.weights", np.concatenate(self._weight_sums))
        write_json(sides / f"{info.file}.json", asdict(info))
        sync_folder(sides)
        return info


def load_shard(folder: Path, name: str) -> ShardInfo | None:
    """A shard finished before, in a dataset that is not; None when it has to be written (again)."""
    try:
        info = shard_from_json(json.loads((Path(folder) / UNFINISHED / f"{name}.json").read_bytes()))
        complete = (Path(folder) / name).stat().st_size == info.bytes
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return info if complete else None


def batch_positions(data: Array, has_spans: bool) -> Array:
    """The batch table of a finished shard file, read from the file itself.

    Args:
        data: uint8 [bytes], the mapped file.
        has_spans: Whether it should have the spans column.

    Returns:
        uint64 [batches, 9]; see `DocumentTable.batches`.

    Raises:
        FormatError: The file is not such a shard.
    """
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    except (pa.ArrowInvalid, OSError) as error:
        raise FormatError(f"not an Arrow IPC file: {error}") from None
    table = np.zeros((len(batches), k.BATCH_COLUMNS), np.uint64)
    base = address_of(data)
    for line, batch in zip(table, batches, strict=True):
        found = [*batch.column("tokens").buffers()[1:4:2], *batch.column("checksums").buffers()[1:4:2]]
        if has_spans:
            spans = batch.column("spans").buffers()
            found += [spans[0] if batch.column("spans").null_count else None, spans[1], spans[4], spans[6], spans[8]]
        for column, buffer in enumerate(found):
            line[column] = buffer.address - base if buffer is not None and buffer.size else 0
    return table


def _schema(layout: ShardLayout) -> Any:
    import pyarrow as pa

    span = pa.struct([("begin", pa.uint32()), ("end", pa.uint32()), ("loss_weight", pa.float32())])
    fields = [("tokens", pa.large_list(pa.from_numpy_dtype(layout.token_dtype)))]
    fields += [("spans", pa.large_list(span))] if layout.has_spans else []
    fields += [("origin", pa.struct([("file", pa.int32()), ("line", pa.int64())]))]
    fields += [("checksums", pa.large_list(pa.uint64()))]
    return pa.schema(fields + ([("text", pa.large_string())] if layout.has_text else []))


def _large_list(offsets: Array, values: Any, valid: Array | None = None) -> Any:
    import pyarrow as pa

    bitmap = None
    if valid is not None and not valid.all():
        bitmap = pa.py_buffer(np.packbits(valid, bitorder="little"))
    kind = pa.large_list(values.type)
    return pa.Array.from_buffers(kind, len(offsets) - 1, [bitmap, pa.py_buffer(offsets)], children=[values])


def _split_spans(block: SpanBlock | None) -> tuple[Array, Array, Array, tuple[Array, Array, Array]]:
    """(valid, offsets, spans, (begins, ends, weights)) of a batch; no rows in `valid` without spans."""
    if block is None:
        valid, offsets, spans = np.empty(0, np.bool_), np.zeros(1, np.int64), np.empty(0, SPAN)
    else:
        valid, offsets, spans = np.ascontiguousarray(block.valid), block.spans.offsets, block.spans.values
    begins, ends, weights = (np.ascontiguousarray(spans[name]) for name in ("begin", "end", "loss_weight"))
    return valid, offsets, spans, (begins, ends, weights)


def _slice(rows: Ragged, begin: int, end: int) -> Ragged:
    """Rows `begin` to `end`, with offsets that start at 0; values are a view."""
    offsets = rows.offsets[begin : end + 1]
    return Ragged(rows.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def _join(blocks: list[_Block]) -> _Block:
    """Blocks end to end, as one."""
    if len(blocks) == 1:
        return blocks[0]
    import pyarrow as pa

    spans = None
    if blocks[0].spans is not None:
        parts = [block.spans for block in blocks if block.spans is not None]
        spans = SpanBlock(
            spans=_concatenate(part.spans for part in parts), valid=np.concatenate([part.valid for part in parts])
        )
    texts = None
    if blocks[0].texts is not None:
        texts = pa.concat_arrays([block.texts.cast(pa.large_string()) for block in blocks])
    return _Block(
        _concatenate(block.tokens for block in blocks),
        spans,
        np.concatenate([block.files for block in blocks]),
        np.concatenate([block.lines for block in blocks]),
        texts,
    )


def _concatenate(parts: Iterable[Ragged]) -> Ragged:
    rows = list(parts)
    ends = np.cumsum([0, *(len(part.values) for part in rows)])
    offsets = [part.offsets[1:] + end for part, end in zip(rows, ends[:-1], strict=True)]
    return Ragged(np.concatenate([part.values for part in rows]), np.concatenate([np.zeros(1, np.int64), *offsets]))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
