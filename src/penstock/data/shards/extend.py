"""A dataset with more columns: the same documents in the same order, in a folder of its own."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.errors import ConfigError
from penstock.core.ragged import Ragged
from penstock.core.terminal import Progress
from penstock.data.shards.dataset import Dataset
from penstock.data.shards.format.images import MEDIA, PROCESSOR_FOLDER
from penstock.data.shards.format.layout import Column, ShardLayout
from penstock.data.shards.format.manifest import (
    CHAT,
    CHAT_TEMPLATE,
    TOKENIZER_FOLDER,
    ShardInfo,
    TokenizerInfo,
)
from penstock.data.shards.tables.corpus import Corpus
from penstock.data.shards.writing.blocks import spans_of
from penstock.data.shards.writing.finish import finish_dataset
from penstock.data.shards.writing.writer import ShardWriter
from penstock.data.stores.files import new_folder

_TOGETHER = 256
SIDE_DOCUMENTS = 1_000_000
"""Documents of a shard of a side dataset."""


def extend_dataset(
    dataset: Dataset,
    output: str | Path,
    columns: Mapping[str, Iterable[Any]],
    *,
    progress: bool = False,
) -> Dataset:
    """Copy a dataset and add columns.

    Args:
        dataset: The documents.
        output: A new or empty folder.
        columns: Name → for each document, in order, a float32 number for each of its tokens.
        progress: Show a bar.

    Raises:
        ConfigError: The dataset has such a column, or numbers do not fit a document.
        OutputError: The folder is not empty, or cannot be written.
    """
    manifest = dataset.manifest
    if there := {column.name for column in manifest.columns} & set(columns):
        raise ConfigError(
            f"{dataset.path}: has a column {min(there)!r} already; start from the dataset "
            "without it"
        )
    more = (Column(name=name, dtype="float32") for name in columns)
    layout = replace(manifest.layout, columns=(*manifest.columns, *more))
    numbers = {name: iter(values) for name, values in columns.items()}
    names = {name: number for number, name in enumerate(dataset.files)}
    shards: list[ShardInfo] = []
    begin = 0
    with (
        new_folder(output) as folder,
        Progress("writing", total=len(dataset), enabled=progress) as bar,
    ):
        for shard in manifest.shards:
            with ShardWriter(folder, shard.file, layout) as writer:
                for first in range(begin, begin + shard.documents, _TOGETHER):
                    part = dataset[first : min(first + _TOGETHER, begin + shard.documents)]
                    _write(
                        writer,
                        part,
                        names,
                        {name: [next(values) for _ in part] for name, values in numbers.items()},
                    )
                    bar.advance(len(part))
                shards.append(writer.finish())
            begin += shard.documents
        sealed = [name for name in (CHAT, CHAT_TEMPLATE, MEDIA) if (dataset.path / name).is_file()]
        for name in sealed:
            shutil.copyfile(dataset.path / name, folder / name)
        for name in (TOKENIZER_FOLDER, PROCESSOR_FOLDER):
            if (dataset.path / name).is_dir():
                shutil.copytree(dataset.path / name, folder / name)
        finish_dataset(
            folder,
            shards=shards,
            layout=layout,
            tokenizer=manifest.tokenizer,
            configuration=manifest.configuration,
            files=dataset.files,
            sealed=sealed,
            damaged=manifest.damaged,
            duplicates=manifest.duplicates,
            path_values=manifest.path_values or (),
            sampling=manifest.sampling,
        )
    return Dataset.open(output)


def write_side(
    dataset: Corpus,
    output: str | Path,
    columns: Mapping[str, Iterable[Any]],
    *,
    fills: Mapping[str, float] | None = None,
) -> Dataset:
    """Write columns of a dataset into a folder of their own, a side dataset: `Source(…, sides=[…])`
    reads both.

    It has the documents' lengths, no tokens of theirs (2 bytes a token of zeros), and belongs to
    that dataset alone.

    Args:
        dataset: The documents: a dataset, a foreign corpus, or several joined.
        output: A new or empty folder.
        columns: Name → for each document, in order, a float32 number for each of its tokens.
        fills: Name → value in slots without such a token; 0 by default.

    Raises:
        ConfigError: Numbers do not fit a document.
        OutputError: The folder is not empty, or cannot be written.
    """
    made = tuple(
        Column(name=name, dtype="float32", fill=(fills or {}).get(name, 0.0)) for name in columns
    )
    layout = ShardLayout(vocab_size=1, columns=made)
    numbers = {name: iter(values) for name, values in columns.items()}
    lengths = dataset.table.lengths[:, 0].astype(np.int64)
    shards: list[ShardInfo] = []
    with new_folder(output) as folder:
        for begin in range(0, len(lengths), SIDE_DOCUMENTS):
            with ShardWriter(folder, f"{len(shards):05}.arrow", layout) as writer:
                for first in range(begin, min(begin + SIDE_DOCUMENTS, len(lengths)), _TOGETHER):
                    sizes = lengths[first : min(first + _TOGETHER, begin + SIDE_DOCUMENTS)]
                    tokens = Ragged(
                        np.zeros(int(sizes.sum()), np.uint16),
                        np.concatenate([[0], np.cumsum(sizes)]),
                    )
                    rows = {
                        name: Ragged.from_rows([next(values) for _ in sizes], np.float32)
                        for name, values in numbers.items()
                    }
                    writer.write(
                        tokens, files=0, lines=np.arange(first, first + len(sizes)), columns=rows
                    )
                shards.append(writer.finish())
        finish_dataset(
            folder,
            shards=shards,
            layout=layout,
            files=[str(dataset.path)],
            configuration=side_of(dataset),
            tokenizer=TokenizerInfo(name="", fingerprint="", vocab_size=1),
        )
    return Dataset.open(output)


def side_of(dataset: Corpus) -> str:
    """What the manifest of a side dataset notes of the dataset that it belongs to."""
    return f"side of {dataset.fingerprint}"


def open_side(path: str | Path, dataset: Corpus) -> Dataset:
    """Open a side dataset.

    Raises:
        ConfigError: It belongs to another dataset, or to none.
    """
    side = Dataset.open(path)
    if side.manifest.configuration != side_of(dataset):
        raise ConfigError(
            f"{side.path}: is no side dataset of {dataset.path}, or of an earlier version of "
            "it; write it again with penstock.shards.write_side"
        )
    return side


def _write(
    writer: ShardWriter, part: list[Any], names: Mapping[str, int], more: Mapping[str, list[Any]]
) -> None:
    layout = writer.layout
    columns = {
        column.name: Ragged.from_rows(
            more[column.name]
            if column.name in more
            else [one.columns[column.name] for one in part],
            column.dtype,
        )
        for column in layout.columns
    }
    weights = Ragged.from_rows([one.loss_weights for one in part], np.float32)
    writer.write(
        Ragged.from_rows([one.tokens for one in part], np.int64),
        files=np.array([names.get(one.origin.file, 0) for one in part], np.int32),
        lines=np.array([one.origin.line for one in part], np.int64),
        spans=spans_of(weights) if layout.has_spans else None,
        texts=pa.array([one.text for one in part], pa.large_string()) if layout.has_text else None,
        trees=[one.tree for one in part] if layout.has_trees else None,
        columns=columns,
        images=[one.images for one in part] if layout.has_images else None,
    )
