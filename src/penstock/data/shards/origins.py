"""Reads where all documents of a dataset came from, a few microseconds for a batch of 1,024."""

from typing import Annotated

import numpy as np

from penstock.core.arrays import Array, Int32, Int64
from penstock.data.shards.dataset import Dataset
from penstock.data.shards.format.layout import other_places
from penstock.data.shards.joined import JoinedCorpus
from penstock.data.shards.tables.corpus import Corpus
from penstock.data.shards.tables.holder import ORIGINS
from penstock.data.shards.tables.table import DocumentTable

_TOGETHER = 1 << 16
"""Documents of which the origins are fetched together."""
_SHARDS_TOGETHER = 1 << 10
"""Shards, at most, that these may lie in."""

Origins = tuple[Annotated[Int32, "documents"], Annotated[Int64, "documents"]]


def knows_origins(corpus: Corpus) -> bool:
    """Whether a corpus says which record each of its documents was made from: `prepare` notes it,
    others do not.
    """
    return all(isinstance(part, Dataset) for part in corpus.parts)


def read_origins(corpus: Dataset | JoinedCorpus) -> Origins:
    """Number of each document's file in `corpus.files` (−1 where it is not known), int32 [N], and
    its line or row in that file, int64 [N]; of a corpus that `knows_origins`.
    """
    if isinstance(corpus, Dataset):
        return _read_origins(corpus)
    files, lines, names = [], [], 0
    for part in corpus.parts:
        assert isinstance(part, Dataset)
        found, found_lines = _read_origins(part)
        files.append(np.where(found < 0, found, found + np.int32(names)))
        lines.append(found_lines)
        names += len(part.files)
    return np.concatenate(files), np.concatenate(lines)


def _read_origins(dataset: Dataset) -> Origins:
    table, manifest = dataset.table, dataset.manifest
    files, lines = np.empty(len(dataset), np.int32), np.empty(len(dataset), np.int64)
    if table.holder is not None:
        return _read_remote_origins(table, files, lines)
    for shard, data in enumerate(table.mappings[: len(manifest.shards)]):
        first, last = table.shard_starts[shard : shard + 2].tolist()
        for batch, begin in enumerate(
            range(first, last, manifest.documents_per_batch), table.shard_first_batch[shard]
        ):
            rows = min(manifest.documents_per_batch, last - begin)
            file_place, line_place, _ = other_places(data, table.batches[batch], rows)
            files[begin : begin + rows] = data[file_place : file_place + 4 * rows].view(np.int32)
            lines[begin : begin + rows] = data[line_place : line_place + 8 * rows].view(np.int64)
    return files, lines


def _read_remote_origins(table: DocumentTable, files: Array, lines: Array) -> Origins:
    """As `_read_origins`, a few runs of documents at a time."""
    for begin in range(0, table.num_documents, _TOGETHER):
        shard = min(table.locate(begin)[0] + _SHARDS_TOGETHER, len(table.shard_starts) - 1)
        end = min(begin + _TOGETHER, int(table.shard_starts[shard]))
        with table.held(np.arange(begin, end), (ORIGINS,)):
            while begin < end:
                shard, batch, row = table.locate(begin)
                left = int(table.shard_starts[shard + 1]) - begin
                rows = min(table.documents_per_batch, row + left)
                count = min(rows - row, end - begin)
                file_place, line_place, _ = other_places(
                    table.mappings[shard], table.batches[batch], rows
                )
                data = table.mappings[shard]
                files[begin : begin + count] = data[file_place + 4 * row :][: 4 * count].view(
                    np.int32
                )
                lines[begin : begin + count] = data[line_place + 8 * row :][: 8 * count].view(
                    np.int64
                )
                begin += count
    return files, lines
