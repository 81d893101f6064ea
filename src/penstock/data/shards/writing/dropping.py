"""A finished shard without some of its documents: written again, in place of the old one.

The result is byte for byte what `ShardWriter` makes of the remaining documents. If this is killed,
either the old shard is there, or the new one without valid side files, which counts as missing.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.core.arrays import Array
from penstock.core.arrow import to_numpy
from penstock.core.ragged import Ragged
from penstock.data.shards.format.images import WORDS, assets_path, image_of, records_of
from penstock.data.shards.format.layout import IMAGES, SPAN, TREE, ShardLayout
from penstock.data.shards.format.manifest import ShardInfo
from penstock.data.shards.format.trees import Tree
from penstock.data.shards.writing.blocks import SpanBlock
from penstock.data.shards.writing.writer import ShardWriter
from penstock.data.stores.files import output_errors


def drop_documents(
    folder: Path,
    name: str,
    layout: ShardLayout,
    dropped: Array,
    *,
    text_bytes: int,
    path_values: tuple[str, ...] = (),
) -> ShardInfo | None:
    """Write a shard of an unfinished dataset again without some documents.

    Args:
        folder: Folder of the dataset.
        name: Name of the shard.
        layout: Its layout.
        dropped: Numbers of the documents in the shard, in order; at least one.
        text_bytes: UTF-8 bytes that the remaining documents represent.
        path_values: Names of the values of paths, if the layout has trees.

    Returns:
        The new shard; None if no document remains, in which case its files are removed.

    Raises:
        OutputError: The folder cannot be written.
    """
    path, begin, remaining = folder / name, 0, 0
    with ShardWriter(folder, name, layout) as writer:
        for batch in _batches(path):
            keep = np.ones(len(batch), np.bool_)
            keep[_inside(dropped, begin, len(batch))] = False
            if keep.any():
                # The writer counts the bytes of texts itself.
                count = text_bytes if not remaining and not layout.has_text else 0
                _write(writer, _chosen(batch, keep), path, count, path_values)
            begin, remaining = begin + len(batch), remaining + int(keep.sum())
        info = writer.finish() if remaining else None
    if info is None:
        with output_errors(path):
            for one in (path, assets_path(path)):
                one.unlink(missing_ok=True)
    return info


def count_origins(path: Path, documents: Array) -> dict[int, int]:
    """Number of an origin file → how many of some documents of a shard come from it."""
    found, begin = [np.empty(0, np.int32)], 0
    for batch in _batches(path):
        found.append(to_numpy(batch["origin"].field("file"))[_inside(documents, begin, len(batch))])
        begin += len(batch)
    numbers, counts = np.unique(np.concatenate(found), return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def _inside(documents: Array, begin: int, count: int) -> Array:
    return documents[(documents >= begin) & (documents < begin + count)] - begin


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    # The old file stays mapped although its name gets the new one.
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _chosen(batch: pa.RecordBatch, keep: Array) -> pa.RecordBatch:
    return batch if keep.all() else batch.filter(pa.array(keep))


def _write(
    writer: ShardWriter,
    batch: pa.RecordBatch,
    path: Path,
    text_bytes: int,
    path_values: tuple[str, ...],
) -> None:
    layout = writer.layout
    tokens = _rows(batch["tokens"])
    origin = batch["origin"]
    lengths = tokens.lengths.tolist()
    trees = images = None
    if layout.has_trees:
        words = _rows(batch[TREE])
        trees = [
            Tree.of_words(words[row], path_values, length) if len(words[row]) else None
            for row, length in enumerate(lengths)
        ]
    if layout.has_images:
        words = _rows(batch[IMAGES])
        assert words.lengths.max(initial=0) % WORDS == 0
        images = [
            [image_of(record, path) for record in records_of(words[row], length)]
            for row, length in enumerate(lengths)
        ]
    writer.write(
        tokens,
        files=to_numpy(origin.field("file")),
        lines=to_numpy(origin.field("line")),
        spans=_spans(batch["spans"]) if layout.has_spans else None,
        texts=batch["text"] if layout.has_text else None,
        text_bytes=text_bytes,
        trees=trees,
        columns={column.name: _rows(batch[column.name]) for column in layout.columns},
        images=images,
    )


def _spans(lists: pa.LargeListArray) -> SpanBlock:
    offsets, values = _parts(lists)
    spans = np.empty(len(values), SPAN)
    for name in SPAN.names or ():
        spans[name] = to_numpy(values.field(name))
    return SpanBlock(spans=Ragged(spans, offsets), valid=to_numpy(lists.is_valid()))


def _rows(lists: pa.LargeListArray) -> Ragged:
    offsets, values = _parts(lists)
    return Ragged(to_numpy(values), offsets)


def _parts(lists: pa.LargeListArray) -> tuple[Array, pa.Array]:
    """Offsets from 0, and the values between the first and the last."""
    offsets = to_numpy(lists.offsets)
    return offsets - offsets[0], lists.values[int(offsets[0]) : int(offsets[-1])]
