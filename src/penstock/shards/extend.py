"""A dataset with more columns: the same documents in the same order, in a folder of its own."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.arrays import Ragged
from penstock.core.errors import ConfigError
from penstock.core.terminal import Progress
from penstock.shards.dataset import Dataset
from penstock.shards.files import new_folder
from penstock.shards.finish import finish_dataset
from penstock.shards.layout import TOKENIZER_FOLDER, Column, ShardLayout
from penstock.shards.manifest import CHAT, CHAT_TEMPLATE, ShardInfo
from penstock.shards.memory import span_block, weight_spans
from penstock.shards.writer import ShardWriter

_TOGETHER = 256


def extend_dataset(
    dataset: Dataset, output: str | Path, columns: Mapping[str, Iterable[Any]], *, progress: bool = False
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
        raise ConfigError(f"{dataset.path}: has a column {min(there)!r} already; start from the dataset without it")
    layout = ShardLayout(
        vocab_size=manifest.tokenizer.vocab_size,
        has_spans=manifest.has_spans,
        has_text=manifest.has_text,
        columns=(*manifest.columns, *(Column(name=name, dtype="float32") for name in columns)),
        has_trees=manifest.path_values is not None,
    )
    numbers = {name: iter(values) for name, values in columns.items()}
    names = {name: number for number, name in enumerate(dataset.files)}
    shards: list[ShardInfo] = []
    begin = 0
    with new_folder(output) as folder, Progress("writing", total=len(dataset), enabled=progress) as bar:
        for shard in manifest.shards:
            with ShardWriter(folder, shard.file, layout) as writer:
                for first in range(begin, begin + shard.documents, _TOGETHER):
                    part = dataset[first : min(first + _TOGETHER, begin + shard.documents)]
                    _write(
                        writer, part, names, {name: [next(values) for _ in part] for name, values in numbers.items()}
                    )
                    bar.advance(len(part))
                shards.append(writer.finish())
            begin += shard.documents
        sealed = [name for name in (CHAT, CHAT_TEMPLATE) if (dataset.path / name).is_file()]
        for name in sealed:
            shutil.copyfile(dataset.path / name, folder / name)
        if (dataset.path / TOKENIZER_FOLDER).is_dir():
            shutil.copytree(dataset.path / TOKENIZER_FOLDER, folder / TOKENIZER_FOLDER)
        finish_dataset(
            folder, shards=shards, layout=layout, tokenizer=manifest.tokenizer, configuration=manifest.configuration,
            files=dataset.files, sealed=sealed, damaged=manifest.damaged, path_values=manifest.path_values or (),
        )  # fmt: skip
    return Dataset.open(output)


def _write(writer: ShardWriter, part: list[Any], names: Mapping[str, int], more: Mapping[str, list[Any]]) -> None:
    import pyarrow as pa

    layout = writer.layout
    columns = {
        column.name: Ragged.from_rows(
            more[column.name] if column.name in more else [one.columns[column.name] for one in part], column.dtype
        )
        for column in layout.columns
    }
    spans = span_block([weight_spans(one.loss_weights) for one in part]) if layout.has_spans else None
    writer.write(
        Ragged.from_rows([one.tokens for one in part], np.int64),
        files=np.array([names.get(one.origin.file, 0) for one in part], np.int32),
        lines=np.array([one.origin.line for one in part], np.int64),
        spans=spans,
        texts=pa.array([one.text for one in part], pa.large_string()) if layout.has_text else None,
        trees=[one.tree for one in part] if layout.has_trees else None,
        columns=columns,
    )
