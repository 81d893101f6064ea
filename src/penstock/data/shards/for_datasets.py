"""A prepared dataset as a `datasets.Dataset` of Hugging Face, for trainers and tools that take
nothing else.

The column `input_ids` lies where it lies: its Arrow arrays point into the mapped shards, so a
dataset of any size costs no memory for its tokens. What says which tokens are trained is made in
memory, a byte to four for each token. Tokens are compared with their checksums once, when the
dataset is made (a pass at the speed of the disk).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from penstock.core.arrays import Array
from penstock.core.arrow import from_numpy
from penstock.core.errors import ConfigError, CorruptionError, MissingExtraError
from penstock.core.ragged import Ragged
from penstock.core.system import mappings_cure
from penstock.data.shards.tables.corpus import Corpus
from penstock.data.shards.tables.document import loss_weights_at
from penstock.data.shards.tables.mappings import MappedShards

if TYPE_CHECKING:
    from datasets import Dataset as TheirDataset

IGNORE = -100
TargetColumn = Literal["assistant_masks", "labels", "loss_weights"]
"""`assistant_masks`: 1 for tokens that are trained, uint8; only in data with loss weights.
`labels`: the token if it is trained, else −100, int32, not shifted. `loss_weights`: how much each
token counts, float32.
"""
TARGET_COLUMNS: tuple[str, ...] = ("assistant_masks", "labels", "loss_weights")
_TYPES = {"assistant_masks": pa.uint8(), "labels": pa.int32(), "loss_weights": pa.float32()}


def to_datasets(dataset: Corpus, targets: TargetColumn, *, verify: bool) -> "TheirDataset":
    """See `Dataset.to_datasets`."""
    try:
        import datasets
        from datasets.table import InMemoryTable
    except ImportError as error:
        raise MissingExtraError("datasets", "huggingface") from error

    _refuse(dataset, targets)
    made = targets != "assistant_masks" or dataset.table.has_spans
    ids, marks = [], []
    for shard, batch, first, last in _batches(dataset):
        if verify or made:
            tokens = dataset.table.read(first, last)
            if made:
                marks.append(_marks(dataset, targets, (shard, batch), tokens))
        ids.append(_in_place(dataset, shard, batch, last - first))
    kind = pa.large_list(pa.uint16() if dataset.table.token_bytes == 2 else pa.uint32())
    columns = {"input_ids": pa.chunked_array(ids, kind)}
    if made:
        columns[targets] = pa.chunked_array(marks, pa.large_list(_TYPES[targets]))
    # Without a fingerprint of our own, `datasets` would read everything to make one.
    return datasets.Dataset(
        InMemoryTable(pa.table(columns)), fingerprint=f"{dataset.fingerprint[:24]}-{targets[:7]}"
    )


def _refuse(dataset: Corpus, targets: str) -> None:
    if targets not in TARGET_COLUMNS:
        raise ConfigError(f"targets must be one of {', '.join(TARGET_COLUMNS)}, got {targets!r}")
    if dataset.extras is not None and dataset.extras.has_trees:
        raise ConfigError(
            f"{dataset.path}: its documents are answers with a common beginning, which are no "
            "single sequences; penstock.trl.preference_pairs makes pairs of them"
        )
    if isinstance(dataset.table.mappings, MappedShards):
        raise ConfigError(
            f"{dataset.path}: these columns need all of its {len(dataset.table.paths):,} "
            f"shards mapped at once: {mappings_cure()}"
        )
    if dataset.media is not None:
        raise ConfigError(
            f"{dataset.path}: its documents have images, which these columns cannot hold"
        )
    if targets != "loss_weights" and dataset.table.weight_sums is not None:
        raise ConfigError(
            f"{dataset.path}: has loss weights other than 0 and 1, which {targets} cannot "
            "express; take targets='loss_weights' and a loss that reads them, or prepare "
            "with weights of 0 and 1"
        )


def _batches(dataset: Corpus) -> Iterator[tuple[int, int, int, int]]:
    """(shard, batch, first document, one after the last) of all batches in order."""
    table = dataset.table
    for shard, first in enumerate(table.shard_starts[:-1].tolist()):
        end = int(table.shard_starts[shard + 1])
        batches = range(
            int(table.shard_first_batch[shard]), int(table.shard_first_batch[shard + 1])
        )
        for number, batch in enumerate(batches):
            begin = first + number * table.documents_per_batch
            yield shard, batch, begin, min(begin + table.documents_per_batch, end)


def _in_place(dataset: Corpus, shard: int, batch: int, rows: int) -> pa.LargeListArray:
    """Token lists of one batch, on the mapped file; offsets are checked, so that nothing outside is
    ever read.
    """
    table, line = dataset.table, dataset.table.batches[batch]
    data, size = table.mappings[shard], table.token_bytes
    begin = int(line["token_offsets"])
    offsets = np.frombuffer(data, "<i8", rows + 1, begin)
    start = int(line["tokens"])
    room = (len(data) - start) // size
    if offsets[0] < 0 or offsets[-1] > room or (np.diff(offsets) < 0).any():
        raise CorruptionError(
            f"{table.paths[shard]}: token offsets of batch {batch} leave the file; copy it "
            "again, or prepare again"
        )
    whole = pa.py_buffer(data)
    kind = pa.uint16() if size == 2 else pa.uint32()
    values = pa.Array.from_buffers(
        kind, int(offsets[-1]), [None, whole.slice(start, int(offsets[-1]) * size)]
    )
    lists = [None, whole.slice(begin, 8 * (rows + 1))]
    return pa.LargeListArray.from_buffers(pa.large_list(kind), rows, lists, children=[values])


def _marks(
    dataset: Corpus, targets: str, place: tuple[int, int], tokens: Ragged
) -> pa.LargeListArray:
    """What is trained in one batch, whose `tokens` were read, and so checked."""
    table, (shard, batch) = dataset.table, place
    sizes = np.diff(tokens.offsets).tolist()
    weights = np.ones(len(tokens.values), np.float32)
    if table.has_spans and len(weights):
        data, line = table.mappings[shard], table.batches[batch]
        weights = np.concatenate(
            [loss_weights_at(data, line, row, size) for row, size in enumerate(sizes)]
        )
    if targets == "labels":
        marked: Array = np.where(weights != 0, tokens.values.astype(np.int32), np.int32(IGNORE))
    else:
        marked = weights if targets == "loss_weights" else (weights != 0).astype(np.uint8)
    values = from_numpy(marked)
    buffers = [None, pa.py_buffer(np.ascontiguousarray(tokens.offsets))]
    return pa.LargeListArray.from_buffers(
        pa.large_list(values.type), len(sizes), buffers, children=[values]
    )
