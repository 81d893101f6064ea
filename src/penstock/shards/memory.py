"""Writes a dataset from token lists in memory, in one call: for tests, small data, and import from other programs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.arrays import Ragged
from penstock.core.errors import ConfigError
from penstock.shards.dataset import Dataset
from penstock.shards.files import new_folder
from penstock.shards.finish import finish_dataset
from penstock.shards.layout import SPAN, ShardLayout
from penstock.shards.manifest import ShardInfo, TokenizerInfo
from penstock.shards.writer import ShardWriter, SpanBlock, slice_rows

Span = tuple[int, int, float]
"""(begin, end, loss weight) of a range of tokens."""


def write_dataset(
    path: str | Path,
    documents: Sequence[Any] | Ragged,
    *,
    spans: Sequence[Sequence[Span] | None] | None = None,
    texts: Sequence[str] | None = None,
    vocab_size: int | None = None,
    tokenizer: TokenizerInfo | None = None,
    documents_per_shard: int = 1_000_000,
) -> Dataset:
    """Write a complete dataset from documents in memory, and open it.

    Args:
        path: A new or empty folder.
        documents: Token ids of each document, whole numbers.
        spans: For each document its loss-weight spans, or None for all weights 1; tokens outside spans have weight 0.
        texts: The raw text of each document, to be stored with it.
        vocab_size: One more than the highest id, if no tokenizer is given; None: from the ids.
        tokenizer: The tokenizer of the ids; None: a nameless one.
        documents_per_shard: Documents after which a new shard begins.

    Raises:
        OutputError: The folder is not empty, or cannot be written.
        ConfigError: Values that are not ids or outside the vocabulary, or spans that do not fit their documents.
    """
    import pyarrow as pa

    if documents_per_shard < 1 or (vocab_size is not None and vocab_size < 1):
        raise ConfigError(
            f"documents_per_shard ({documents_per_shard}) and vocab_size ({vocab_size}) must be 1 or more"
        )
    rows = documents if isinstance(documents, Ragged) else _flat_rows(documents)
    if not len(rows) == len(spans if spans is not None else rows) == len(texts if texts is not None else rows):
        raise ConfigError(f"{len(rows)} documents, but another number of spans or texts")
    if any(not weight >= 0 for row in spans or () for _, _, weight in row or ()):
        raise ConfigError("spans: a weight must be 0 or more")
    if tokenizer is None:
        size = vocab_size or int(rows.values.max(initial=0)) + 1
        tokenizer = TokenizerInfo(name="", fingerprint="", vocab_size=size)
    layout = ShardLayout(vocab_size=tokenizer.vocab_size, has_spans=spans is not None, has_text=texts is not None)
    shards: list[ShardInfo] = []
    with new_folder(path) as folder:
        for begin in range(0, len(rows), documents_per_shard):
            part = slice(begin, min(begin + documents_per_shard, len(rows)))
            with ShardWriter(folder, f"{len(shards):05}.arrow", layout) as writer:
                writer.write(
                    slice_rows(rows, part.start, part.stop),
                    files=0,
                    lines=np.arange(part.start, part.stop),
                    spans=None if spans is None else span_block(spans[part]),
                    texts=None if texts is None else pa.array(texts[part], pa.large_string()),
                    text_bytes=sum(len(text.encode()) for text in texts[part]) if texts is not None else 0,
                )
                shards.append(writer.finish())
        finish_dataset(folder, shards=shards, layout=layout, tokenizer=tokenizer, configuration="", files=["memory"])
    return Dataset.open(Path(path))


def _flat_rows(documents: Sequence[Any]) -> Ragged:
    """Documents as int64; NumPy alone would truncate fractions and accept nested rows."""
    arrays = []
    for number, document in enumerate(documents):
        try:
            array = np.asarray(document)
        except (ValueError, TypeError, RuntimeError):
            array = np.empty(1, np.object_)
        if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
            raise ConfigError(f"document {number}: expected a flat list of token ids, whole numbers of at most 64 bits")
        arrays.append(array)
    return Ragged.from_rows(arrays, np.int64)


def span_block(spans: Sequence[Sequence[Span] | None]) -> SpanBlock:
    """Spans of several documents as arrays; None: all weights are 1."""
    rows = Ragged.from_rows([np.array(list(map(tuple, row or ())), SPAN) for row in spans], SPAN)
    return SpanBlock(spans=rows, valid=np.array([row is not None for row in spans], np.bool_))
