"""The columns of a shard file, and where their buffers lie in it."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from penstock.compiled import address_of
from penstock.errors import ConfigError, FormatError
from penstock.shards import _kernels as k
from penstock.shards.files import Array

TOKENIZER_FOLDER = "tokenizer"
"""Folder of a dataset in which the tokenizer lies that made it."""

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
    def token_dtype(self) -> np.dtype[Any]:
        """uint16 or uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)


def schema_of(layout: ShardLayout) -> Any:
    """The Arrow schema of a shard."""
    import pyarrow as pa

    span = pa.struct([("begin", pa.uint32()), ("end", pa.uint32()), ("loss_weight", pa.float32())])
    fields = [("tokens", pa.large_list(pa.from_numpy_dtype(layout.token_dtype)))]
    fields += [("spans", pa.large_list(span))] if layout.has_spans else []
    fields += [("origin", pa.struct([("file", pa.int32()), ("line", pa.int64())]))]
    fields += [("checksums", pa.large_list(pa.uint64()))]
    return pa.schema(fields + ([("text", pa.large_string())] if layout.has_text else []))


def flat_array(values: Array) -> Any:
    """An Arrow array on the memory of native numbers, not booleans.

    Unlike `pyarrow.array` it does not import pandas, which takes 0.2 s.
    """
    import pyarrow as pa

    buffers = [None, pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def large_list(offsets: Array, values: Any, valid: Array | None = None) -> Any:
    """An Arrow list array on our own buffers.

    Args:
        offsets: int64 [n + 1], from 0.
        values: Arrow array of all rows end to end.
        valid: bool [n], False for null; None for no nulls.
    """
    import pyarrow as pa

    bitmap = None
    if valid is not None and not valid.all():
        bitmap = pa.py_buffer(np.packbits(valid, bitorder="little"))
    buffers = [bitmap, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(pa.large_list(values.type), len(offsets) - 1, buffers, children=[values])


def read_batches(data: Array) -> list[Any]:
    """The record batches of a mapped shard file, uint8 [bytes], without copying.

    Raises:
        FormatError: It is not an Arrow IPC file.
    """
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
        return [reader.get_batch(i) for i in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"not a sound Arrow IPC file: {error}") from None


def batch_positions(data: Array, layout: ShardLayout) -> Array:
    """The batch table of a finished shard, read from the file itself.

    Args:
        data: uint8 [bytes], the mapped file.
        layout: What its columns should be.

    Returns:
        uint64 [batches, 9]; see `DocumentTable.batches`.

    Raises:
        FormatError: The file is not such a shard.
    """
    batches = read_batches(data)
    table = np.zeros((len(batches), k.BATCH_COLUMNS), np.uint64)
    base, schema = address_of(data), schema_of(layout)
    for line, batch in zip(table, batches, strict=True):
        if batch.schema != schema:
            raise FormatError(f"columns are {batch.schema.names}, due are {schema.names}")
        found = [*batch.column("tokens").buffers()[1:4:2], *batch.column("checksums").buffers()[1:4:2]]
        if layout.has_spans:
            spans = batch.column("spans").buffers()
            found += [spans[0] if batch.column("spans").null_count else None, spans[1], spans[4], spans[6], spans[8]]
        for column, buffer in enumerate(found):
            line[column] = buffer.address - base if buffer is not None and buffer.size else 0
        found = [batch.column("origin").field(name).buffers()[1] for name in ("file", "line")]
        found += [batch.column("text").buffers()[1]] if layout.has_text else []
        if [buffer.address - base for buffer in found] != other_places(data, line, batch.num_rows)[: len(found)]:
            raise FormatError("origins and texts are not where this format has them; was the Arrow library changed?")
    return table


def other_places(data: Array, line: Array, rows: int) -> list[int]:
    """Where a batch has what its table does not list: origin files (int32), origin lines (int64), offsets of texts.

    Columns lie in the order of the schema, buffers one after another at multiples of 8, and nothing is null but spans:
    origins come just before the offsets of checksums, and texts just after the checksums. So no metadata need be read,
    which may be damaged.

    Args:
        data: uint8 [bytes], the mapped shard.
        line: uint64 [9], the batch's line in the batch table.
        rows: Documents in the batch.
    """
    offsets, words = int(line[2]), int(line[3])
    lines = offsets - 8 * rows
    count = int(data[offsets + 8 * rows : offsets + 8 * rows + 8].view(np.int64)[0])
    texts = words + 8 * count if words else offsets + 8 * (rows + 1)
    return [lines - (4 * rows + 7) // 8 * 8, lines, texts]
