"""Writes a dataset from token lists in memory, in one call: for tests, small data, and import from
other programs.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping
from penstock.core.ragged import Ragged
from penstock.core.suggestions import suggests
from penstock.data.shards.dataset import Dataset
from penstock.data.shards.format.images import ImageOf, save_processor
from penstock.data.shards.format.layout import SPAN, Column, ShardLayout
from penstock.data.shards.format.manifest import (
    TOKENIZER_FOLDER,
    ChatInfo,
    ShardInfo,
    TokenizerInfo,
)
from penstock.data.shards.format.trees import Tree
from penstock.data.shards.writing.blocks import SpanBlock, slice_rows
from penstock.data.shards.writing.finish import finish_dataset
from penstock.data.shards.writing.writer import ShardWriter
from penstock.data.stores.files import new_folder
from penstock.media.images import ImageSettings
from penstock.media.processor import Processor
from penstock.tokenizers import Tokenizer

Span = tuple[int, int, float]
"""(begin, end, loss weight) of a range of tokens."""


@suggests
def write_dataset(
    output: str | Path,
    documents: Sequence[Any] | Ragged,
    *,
    spans: Sequence[Sequence[Span] | None] | None = None,
    texts: Sequence[str] | None = None,
    vocab_size: int | None = None,
    tokenizer: TokenizerInfo | Tokenizer | None = None,
    documents_per_shard: int = 1_000_000,
    columns: Mapping[str, Sequence[Any]] | None = None,
    fills: Mapping[str, float] | None = None,
    trees: Sequence[Tree | None] | None = None,
    chat: ChatInfo | None = None,
    sampling: JsonMapping | None = None,
    images: Sequence[Sequence[ImageOf]] | None = None,
    processor: Processor | None = None,
    image_settings: ImageSettings | None = None,
) -> Dataset:
    """Write a complete dataset from documents in memory, and open it.

    Args:
        output: A new or empty folder.
        documents: Token ids of each document, whole numbers.
        spans: For each document its loss-weight spans, or None for all weights 1; tokens outside
            spans have weight 0.
        texts: The raw text of each document, to be stored with it.
        vocab_size: One more than the highest id, if no tokenizer is given; None: from the ids.
        tokenizer: The tokenizer of the ids; a whole one is saved with the dataset. None: a nameless
            one.
        documents_per_shard: Documents after which a new shard begins.
        columns: Name → for each document a number for each token, such as advantages: int32 if all
            are whole numbers of an integer type, else float32. The loader packs them:
            `row.columns[name]`.
        fills: Name of a column → its value in slots without such a token; 0 by default.
        trees: For each document its branches and paths, as `build_tree` makes them; None: an
            ordinary document. The values of paths must have the same names in all.
        chat: Template and stop ids of a dataset of chats.
        sampling: Of sampled answers: settings of the sampler that change what is drawn, such as
            top_k, as JSON holds them. Temperature is a value of each path (`temperature`).
        images: Those of each document, in the order of their tokens; None: there are none.
        processor: Of the model that reads them; saved with the dataset.
        image_settings: How they become RGB; None: the defaults.

    Raises:
        OutputError: The folder is not empty, or cannot be written.
        ConfigError: Values that are not ids or outside the vocabulary, or spans that do not fit
            their documents.
    """
    if documents_per_shard < 1 or (vocab_size is not None and vocab_size < 1):
        raise ConfigError(
            f"documents_per_shard ({documents_per_shard}) and vocab_size ({vocab_size}) must "
            "be 1 or more"
        )
    rows = documents if isinstance(documents, Ragged) else _flat_rows(documents)
    if (
        not len(rows)
        == len(spans if spans is not None else rows)
        == len(texts if texts is not None else rows)
    ):
        raise ConfigError(f"{len(rows)} documents, but another number of spans or texts")
    if any(not weight >= 0 for row in spans or () for _, _, weight in row or ()):
        raise ConfigError("spans: a weight must be 0 or more")
    if images is not None and (processor is None or len(images) != len(rows)):
        raise ConfigError(
            f"images: {len(images)} lists for {len(rows)} documents, and "
            f"{'no ' if processor is None else 'a '}processor; expected a list for each, and the "
            "processor of the model that reads them"
        )
    whole = tokenizer if isinstance(tokenizer, Tokenizer) else None
    if tokenizer is None:
        size = vocab_size or int(rows.values.max(initial=0)) + 1
        tokenizer = TokenizerInfo(name="", fingerprint="", vocab_size=size)
    elif isinstance(tokenizer, Tokenizer):
        tokenizer = TokenizerInfo.of(tokenizer)
    if trees is not None:
        trees, spans = _with_trees(trees, len(rows), spans)
    of_columns = {
        name: _column_rows(name, values, len(rows)) for name, values in (columns or {}).items()
    }
    layout = ShardLayout(
        vocab_size=tokenizer.vocab_size,
        has_spans=spans is not None,
        has_text=texts is not None,
        columns=tuple(
            Column(
                name=name,
                dtype="int32" if one.values.dtype.kind in "iu" else "float32",
                fill=float((fills or {}).get(name, 0)),
            )
            for name, one in of_columns.items()
        ),
        has_trees=trees is not None,
        has_images=processor is not None,
    )
    pictures = [[]] * len(rows) if images is None else images
    path_values = next((tree.names for tree in trees or () if tree is not None), ())
    shards: list[ShardInfo] = []
    with new_folder(output) as folder:
        for begin in range(0, len(rows), documents_per_shard):
            part = slice(begin, min(begin + documents_per_shard, len(rows)))
            with ShardWriter(folder, f"{len(shards):05}.arrow", layout) as writer:
                writer.write(
                    slice_rows(rows, part.start, part.stop),
                    files=0,
                    lines=np.arange(part.start, part.stop),
                    spans=None if spans is None else span_block(spans[part]),
                    texts=None if texts is None else pa.array(texts[part], pa.large_string()),
                    text_bytes=sum(len(text.encode()) for text in texts[part])
                    if texts is not None
                    else 0,
                    trees=None if trees is None else trees[part],
                    columns={
                        name: slice_rows(one, part.start, part.stop)
                        for name, one in of_columns.items()
                    },
                    images=pictures[part] if layout.has_images else None,
                )
                shards.append(writer.finish())
        if whole is not None:
            whole.save(folder / TOKENIZER_FOLDER)
        sealed = () if chat is None else chat.save(folder)
        if processor is not None:
            saved = save_processor(folder, processor, image_settings or ImageSettings())
            sealed = (*sealed, *saved)
        finish_dataset(
            folder,
            shards=shards,
            layout=layout,
            tokenizer=tokenizer,
            configuration="",
            files=["memory"],
            path_values=path_values,
            sealed=sealed,
            sampling=sampling or {},
        )
    return Dataset.open(Path(output))


def _with_trees(
    trees: Sequence[Tree | None], count: int, spans: Sequence[Sequence[Span] | None] | None
) -> tuple[Sequence[Tree | None], Sequence[Sequence[Span] | None]]:
    """Checked trees, and the spans that they need."""
    if len(trees) != count:
        raise ConfigError(
            f"{len(trees)} trees for {count} documents; give None for an ordinary document"
        )
    names = {tree.names for tree in trees if tree is not None}
    if len(names) > 1:
        shown = " and ".join(sorted(", ".join(some) or "none" for some in names))
        raise ConfigError(
            f"paths have different values in two documents: {shown}; give all the same (NaN: "
            "not known)"
        )
    if spans is None:
        spans = [None] * count
    for number, (tree, row) in enumerate(zip(trees, spans, strict=True)):
        begins = [] if tree is None else tree.branches[1:, 0].tolist()
        if begins and (
            row is None or any(begin <= at < end for begin, end, _ in row for at in begins)
        ):
            raise ConfigError(
                f"document {number}: the first token of a later branch of a tree is not a "
                "target and must have weight 0; give the loss weights that build_tree returns"
            )
    return trees, spans


def _column_rows(name: str, values: Sequence[object], count: int) -> Ragged:
    if len(values) != count:
        raise ConfigError(f"column {name!r}: {len(values)} lists for {count} documents")
    arrays = [np.asarray(one) for one in values]
    wrong = next(
        (one for one in arrays if one.ndim != 1 or (one.size and one.dtype.kind not in "fiu")), None
    )
    if wrong is not None:
        raise ConfigError(
            f"column {name!r}: expected a flat list of numbers for each document, got {wrong!r:.60}"
        )
    whole = all(one.dtype.kind in "iu" for one in arrays if one.size)
    return Ragged.from_rows(
        arrays, np.int64 if whole and any(one.size for one in arrays) else np.float32
    )


def weight_spans(weights: object) -> list[Span]:
    """Loss weights of a document's tokens as spans of equal weight."""
    values = np.asarray(weights, np.float32)
    edges = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return [
        (begin, end, float(values[begin]))
        for begin, end in pairwise(edges)
        if end > begin and values[begin] != 0
    ]


def _flat_rows(documents: Sequence[object]) -> Ragged:
    """Documents as int64; NumPy alone would truncate fractions and accept nested rows."""
    arrays = []
    for number, document in enumerate(documents):
        try:
            array = np.asarray(document)
        except (ValueError, TypeError, RuntimeError):
            array = np.empty(1, np.object_)
        if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
            raise ConfigError(
                f"document {number}: expected a flat list of token ids, whole numbers of at "
                "most 64 bits"
            )
        arrays.append(array)
    return Ragged.from_rows(arrays, np.int64)


def span_block(spans: Sequence[Sequence[Span] | None]) -> SpanBlock:
    """Spans of several documents as arrays; None: all weights are 1."""
    rows = Ragged.from_rows([np.array(list(map(tuple, row or ())), SPAN) for row in spans], SPAN)
    return SpanBlock(spans=rows, valid=np.array([row is not None for row in spans], np.bool_))
