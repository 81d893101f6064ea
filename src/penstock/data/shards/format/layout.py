"""The columns of a shard, an Arrow IPC file, and the places of their buffers in its batches."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np
import pyarrow as pa

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError, CorruptionError, FormatError
from penstock.data.shards.format import _kernels as k
from penstock.data.shards.format.arrow_file import BatchPlaces, read_places
from penstock.data.stores.files import reading

SPAN = np.dtype([("begin", "<u4"), ("end", "<u4"), ("loss_weight", "<f4")])
"""A half-open range of a document's tokens, and their loss weight."""

# Arrays of a shard, children after their parent, with the number of buffers of each: a validity
# bitmap, then offsets or values.
_TOKENS, _SPANS, _ORIGIN, _CHECKSUMS, _TEXT, _LIST = (
    (2, 2),
    (2, 1, 2, 2, 2),
    (1, 2, 2),
    (2, 2),
    (3,),
    (2, 2),
)

TREE, IMAGES, COLUMN_CHECKSUMS = "tree", "images", "column_checksums"
_OWN_FIELDS = {"tokens", "spans", "origin", "checksums", "text", TREE, IMAGES, COLUMN_CHECKSUMS}
MAX_COLUMNS = 32
"""Of a dataset."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A number for each token of each document."""

    name: str
    dtype: str
    """float32 or int32."""
    fill: float = 0.0
    """Value in slots that hold no such token, such as padding."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in _OWN_FIELDS:
            raise ConfigError(
                f"a column's name must be a word other than {', '.join(sorted(_OWN_FIELDS))}; "
                f"got {self.name!r}"
            )
        if self.dtype not in ("float32", "int32"):
            raise ConfigError(
                f"column {self.name!r}: dtype must be float32 or int32, got {self.dtype!r}"
            )
        if self.dtype == "int32" and not (
            self.fill == int(self.fill) and -(2**31) <= self.fill < 2**31
        ):
            raise ConfigError(f"column {self.name!r}: fill must be an int32, got {self.fill}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """What all shards of a dataset have in common."""

    vocab_size: int
    """One more than the highest token id; tokens take two bytes each up to 65,536 ids, otherwise
    four.
    """
    has_spans: bool = False
    has_text: bool = False
    columns: tuple[Column, ...] = ()
    has_trees: bool = False
    """Whether documents may be prefix trees, or have paths with values
    (`penstock.data.shards.format.trees`).
    """
    has_images: bool = False
    """Whether documents may have images (`penstock.data.shards.format.images`)."""

    def __post_init__(self) -> None:
        if not 1 <= self.vocab_size <= 2**32:
            raise ConfigError(f"vocab_size must be between 1 and 2^32, got {self.vocab_size}")
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names) or len(names) > MAX_COLUMNS:
            raise ConfigError(
                f"columns must have different names and be at most {MAX_COLUMNS}, got "
                f"{', '.join(names)}"
            )
        if self.has_trees and not self.has_spans:
            raise ConfigError("a dataset with trees has loss weights: has_trees needs has_spans")

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """uint16 or uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    @property
    def first_column(self) -> int:
        """Number of the first column among `extras`."""
        return self.has_trees + self.has_images

    @property
    def extras(self) -> tuple[tuple[str, str], ...]:
        """(name, dtype) of the lists behind the texts: trees, images, columns, checksums of
        columns.
        """
        trees = [(TREE, "uint32")] if self.has_trees else []
        images = [(IMAGES, "uint32")] if self.has_images else []
        columns = [(column.name, column.dtype) for column in self.columns]
        return (*trees, *images, *columns, *([(COLUMN_CHECKSUMS, "uint64")] if columns else []))


def schema_of(layout: ShardLayout) -> pa.Schema:
    """The Arrow schema of a shard."""
    span = pa.struct([("begin", pa.uint32()), ("end", pa.uint32()), ("loss_weight", pa.float32())])
    fields = [("tokens", pa.large_list(pa.from_numpy_dtype(layout.token_dtype)))]
    fields += [("spans", pa.large_list(span))] if layout.has_spans else []
    fields += [("origin", pa.struct([("file", pa.int32()), ("line", pa.int64())]))]
    fields += [("checksums", pa.large_list(pa.uint64()))]
    fields += [("text", pa.large_string())] if layout.has_text else []
    return pa.schema(
        fields
        + [(name, pa.large_list(pa.from_numpy_dtype(dtype))) for name, dtype in layout.extras]
    )


def large_list(offsets: Array, values: pa.Array, valid: Array | None = None) -> pa.LargeListArray:
    """An Arrow list array on our own buffers.

    Args:
        offsets: int64 [n + 1], from 0.
        values: Arrow array of all rows end to end.
        valid: bool [n], False: null; None: no nulls.
    """
    bitmap = None
    if valid is not None and not valid.all():
        bitmap = pa.py_buffer(np.packbits(valid, bitorder="little"))
    buffers = [bitmap, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(
        pa.large_list(values.type), len(offsets) - 1, buffers, children=[values]
    )


def batch_positions(data: Array, layout: ShardLayout, documents: int) -> Array:
    """The batch table of a finished shard, read from the file itself.

    Args:
        data: uint8 [bytes], the mapped file.
        layout: The expected columns.
        documents: The expected number of documents.

    Returns:
        `BATCH` [batches]; all its positions are inside the file.

    Raises:
        FormatError: The file is not such a shard.
    """
    batches = read_places(data, schema_of(layout))
    expected = [
        min(k.DOCUMENTS_PER_BATCH, documents - at)
        for at in range(0, documents, k.DOCUMENTS_PER_BATCH)
    ]
    if [batch.rows for batch in batches] != expected:
        raise FormatError(
            f"its batches are not those of {documents:,} documents; was the Arrow library changed?"
        )
    table = np.zeros(len(batches), k.BATCH)
    for number, batch in enumerate(reading(data, batches)):
        _read_line(data, layout, batch, table[number : number + 1])
    return table


def _read_line(data: Array, layout: ShardLayout, batch: BatchPlaces, line: Array) -> None:
    """Write the line (`BATCH` [1]) of one batch, from Arrow's own positions of its buffers.

    Raises:
        FormatError: They are not those of our format.
    """
    spans = _SPANS if layout.has_spans else ()
    arrays = [
        *_TOKENS,
        *spans,
        *_ORIGIN,
        *_CHECKSUMS,
        *(_TEXT if layout.has_text else ()),
        *_LIST * len(layout.extras),
    ]
    if len(batch.nodes) != len(arrays) or len(batch.buffers) != sum(arrays):
        raise FormatError(f"a batch of {len(batch.nodes)} arrays, expected {len(arrays)}")
    nulls, rows = batch.nodes[:, 1].tolist(), batch.rows
    tops = [
        0,
        *([2] if spans else []),
        2 + len(spans),
        5 + len(spans),
        *([7 + len(spans)] if layout.has_text else []),
    ]
    tops += range(7 + len(spans) + layout.has_text, len(arrays), len(_LIST))
    if (
        rows < 1
        or (batch.nodes[tops, 0] != rows).any()
        or any(nulls[:2] + nulls[2 + bool(spans) :])
    ):
        raise FormatError(
            f"a batch of {rows} documents with columns of other lengths, or with nulls"
        )
    places = np.where(batch.buffers[:, 1] > 0, batch.buffers[:, 0], 0).tolist()
    line["token_offsets"], line["tokens"] = places[1], places[3]
    if spans:
        line["span_bitmap"], line["span_offsets"] = places[4] if nulls[2] else 0, places[5]
        line["span_begins"], line["span_ends"], line["span_weights"] = (
            places[8],
            places[10],
            places[12],
        )
    origin = 4 + sum(spans)
    line["checksum_offsets"], line["checksums"] = places[origin + 6], places[origin + 8]
    found = [
        places[origin + 2],
        places[origin + 4],
        *([places[origin + 10]] if layout.has_text else []),
    ]
    if k.wrong_batch(line, rows, len(data), layout.has_spans) >= 0:
        raise FormatError("buffers are not in order; was the Arrow library changed?")
    if found != other_places(data, line[0], rows)[: len(found)]:
        raise FormatError(
            "origins and texts are not where this format puts them; was the Arrow library changed?"
        )
    if layout.extras:
        first = origin + 9 + (_TEXT[0] if layout.has_text else 0)
        lists = [(places[at + 1], places[at + 3]) for at in range(first, sum(arrays), sum(_LIST))]
        expected = extra_places(data, line[0], rows, layout)
        if [begin for begin, _ in lists] != expected or any(
            values not in (0, begin + 8 * (rows + 1)) for begin, values in lists
        ):
            raise FormatError(
                "trees and columns are not where this format puts them; was the Arrow library "
                "changed?"
            )


def other_places(data: Array, line: np.void, rows: int) -> list[int]:
    """Positions in a batch that its table does not list: origin files (int32), origin lines
    (int64), offsets of texts.

    Columns are in the order of the schema, buffers follow each other at multiples of 8, and only
    spans can be null. So origins come just before the offsets of checksums, and texts just after
    the checksums. No metadata needs to be read, which may be damaged.

    Args:
        data: uint8 [bytes], the mapped shard.
        line: The batch's line in the batch table (`BATCH`), which `wrong_batch` has accepted.
        rows: Documents in the batch.

    Raises:
        CorruptionError: The checksums leave the file, so the position of the texts is unknown.
    """
    offsets, words = int(line["checksum_offsets"]), int(line["checksums"])
    lines = offsets - 8 * rows
    count = int(data[offsets + 8 * rows : offsets + 8 * rows + 8].view(np.int64)[0])
    texts = words + 8 * count if words else offsets + 8 * (rows + 1)
    if count < 0 or texts > len(data):
        raise CorruptionError(
            f"{count} checksums in a batch, but the file ends before; copy it or prepare it again"
        )
    return [lines - (4 * rows + 7) // 8 * 8, lines, texts]


def extra_places(data: Array, line: np.void, rows: int, layout: ShardLayout) -> list[int]:
    """Positions in a batch of the offsets of `layout.extras`, whose values follow them; found as in
    `other_places`.

    Raises:
        CorruptionError: One would leave the file.
    """
    place = other_places(data, line, rows)[2]
    sizes = [np.dtype(dtype).itemsize for _, dtype in layout.extras]
    found = []
    for size in [*([1] if layout.has_text else []), *sizes]:
        found.append(place)
        place += 8 * (rows + 1)
        count = int(data[place - 8 : place].view(np.int64)[0]) if place <= len(data) else -1
        if not 0 <= count * size <= len(data) - place:
            raise CorruptionError(
                f"a column of {count} values, but the file ends before; copy it or prepare it again"
            )
        place += -(-count * size // 8) * 8
    return found[layout.has_text :]


def read_texts(data: Array, place: int, rows: int, first: int, last: int) -> list[str]:
    """Texts `first` to `last` of a batch.

    Args:
        data: uint8 [bytes], the mapped shard.
        place: Position of the offsets of the batch's texts.
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
