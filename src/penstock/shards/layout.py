"""The columns of a shard file, and where their buffers lie in it."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np

from penstock.errors import ConfigError, CorruptionError, FormatError
from penstock.shards import _kernels as k
from penstock.shards.arrow_file import BatchPlaces, read_places
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


def batch_positions(data: Array, layout: ShardLayout, documents: int) -> Array:
    """The batch table of a finished shard, read from the file itself.

    Args:
        data: uint8 [bytes], the mapped file.
        layout: What its columns should be.
        documents: How many documents it should hold.

    Returns:
        uint64 [batches, 9]; see `DocumentTable.batches`. Its places lie in the file.

    Raises:
        FormatError: The file is not such a shard.
    """
    batches = read_places(data, schema_of(layout))
    expected = [min(k.DOCUMENTS_PER_BATCH, documents - at) for at in range(0, documents, k.DOCUMENTS_PER_BATCH)]
    if [batch.rows for batch in batches] != expected:
        raise FormatError(f"its batches are not those of {documents:,} documents; was the Arrow library changed?")
    table = np.zeros((len(batches), k.BATCH_COLUMNS), np.uint64)
    for line, batch in zip(table, batches, strict=True):
        _read_line(data, layout, batch, line)
    return table


# Arrays of a shard, children after their parent, and how many buffers each has: whether values are there, then offsets
# or values.
_TOKENS, _SPANS, _ORIGIN, _CHECKSUMS, _TEXT = (2, 2), (2, 1, 2, 2, 2), (1, 2, 2), (2, 2), (3,)


def _read_line(data: Array, layout: ShardLayout, batch: BatchPlaces, line: Array) -> None:
    """Write the line of one batch, from where Arrow's own numbers say that its buffers are.

    Raises:
        FormatError: They say something else than our format does.
    """
    spans = _SPANS if layout.has_spans else ()
    arrays = [*_TOKENS, *spans, *_ORIGIN, *_CHECKSUMS, *(_TEXT if layout.has_text else ())]
    if len(batch.nodes) != len(arrays) or len(batch.buffers) != sum(arrays):
        raise FormatError(f"a batch of {len(batch.nodes)} arrays, expected {len(arrays)}")
    nulls, rows = batch.nodes[:, 1].tolist(), batch.rows
    tops = [0, *([2] if spans else []), 2 + len(spans), 5 + len(spans), *([7 + len(spans)] if layout.has_text else [])]
    if rows < 1 or (batch.nodes[tops, 0] != rows).any() or any(nulls[:2] + nulls[2 + bool(spans) :]):
        raise FormatError(f"a batch of {rows} documents whose columns have other lengths, or nulls")
    places = np.where(batch.buffers[:, 1] > 0, batch.buffers[:, 0], 0).tolist()
    line[:2] = places[1], places[3]
    if spans:
        line[4:] = places[4] if nulls[2] else 0, places[5], places[8], places[10], places[12]
    origin = 4 + sum(spans)
    line[2:4] = places[origin + 6], places[origin + 8]
    found = [places[origin + 2], places[origin + 4], *([places[origin + 10]] if layout.has_text else [])]
    if k.wrong_batch(line[None], rows, len(data), layout.has_spans) >= 0:
        raise FormatError("buffers do not lie one after another; was the Arrow library changed?")
    if found != other_places(data, line, rows)[: len(found)]:
        raise FormatError("origins and texts are not where this format has them; was the Arrow library changed?")


def other_places(data: Array, line: Array, rows: int) -> list[int]:
    """Where a batch has what its table does not list: origin files (int32), origin lines (int64), offsets of texts.

    Columns lie in the order of the schema, buffers one after another at multiples of 8, and nothing is null but spans:
    origins come just before the offsets of checksums, and texts just after the checksums. So no metadata need be read,
    which may be damaged.

    Args:
        data: uint8 [bytes], the mapped shard.
        line: uint64 [9], the batch's line in the batch table, which `wrong_batch` found sound.
        rows: Documents in the batch.

    Raises:
        CorruptionError: The checksums leave the file, so the place of the texts is not known.
    """
    offsets, words = int(line[2]), int(line[3])
    lines = offsets - 8 * rows
    count = int(data[offsets + 8 * rows : offsets + 8 * rows + 8].view(np.int64)[0])
    texts = words + 8 * count if words else offsets + 8 * (rows + 1)
    if count < 0 or texts > len(data):
        raise CorruptionError(f"{count} checksums in a batch, the file ends before; copy it again, or prepare again")
    return [lines - (4 * rows + 7) // 8 * 8, lines, texts]


def read_texts(data: Array, place: int, rows: int, first: int, last: int) -> list[str]:
    """Texts `first` to `last` of a batch.

    Args:
        data: uint8 [bytes], the mapped shard.
        place: Where the offsets of the batch's texts begin.
        rows: Documents in the batch.
        first: First row.
        last: One after the last row.

    Raises:
        ValueError: They leave the file, or are not UTF-8.
    """
    begin = place + 8 * (rows + 1)
    if begin > len(data):
        raise ValueError("their offsets leave the file")
    offsets = data[place + 8 * first : place + 8 * (last + 1)].view(np.int64)
    if offsets[0] < 0 or (np.diff(offsets) < 0).any() or offsets[-1] > len(data) - begin:
        raise ValueError(f"bytes {offsets.min()} to {offsets.max()} of {len(data) - begin}")
    values = data[begin + offsets[0] : begin + offsets[-1]].tobytes()
    ends = (offsets - offsets[0]).tolist()
    return [values[a:b].decode() for a, b in pairwise(ends)]
