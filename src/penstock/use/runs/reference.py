"""Log-probabilities of a reference model, computed once and stored next to the data as a column.

Training with `reference: cached` then holds no second model. The value of a token is its
log-probability after all tokens before it in its path, at the temperature at which the path was
sampled; tokens that are no target have 0.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.core.errors import ConfigError
from penstock.data.shards import Document, extend_dataset
from penstock.data.shards.dataset import Dataset
from penstock.data.shards.opening import open_dataset
from penstock.learn.training.distributed import local_device
from penstock.learn.training.path_losses import slot_temperatures
from penstock.learn.training.path_settings import REFERENCE_COLUMN, TRAINER_COLUMN
from penstock.plan.inputs.model_input import IGNORE, ModelInput
from penstock.plan.inputs.paths import RowPaths
from penstock.use.runs.opening import load_model

COLUMNS = (REFERENCE_COLUMN, TRAINER_COLUMN)
"""What may be written."""
SLOTS = 4096
"""Slots of a pass, if a document is not longer."""


def cache_reference(
    model: str | Path,
    data: str | Path | Dataset,
    output: str | Path,
    *,
    column: str = REFERENCE_COLUMN,
    device: str = "auto",
    threads: int | None = None,
    progress: bool = True,
) -> Dataset:
    """Write a dataset with a column of a model's log-probabilities; see `Run.reference`.

    Args:
        model: A run, a model's folder, or a name on the hub.
    """
    if column not in COLUMNS:
        raise ConfigError(f"column must be one of {', '.join(COLUMNS)}, got {column!r}")
    if threads is not None:
        torch.set_num_threads(threads)
    dataset = open_dataset(data)
    if not isinstance(dataset, Dataset):
        raise ConfigError(f"{data}: give one dataset that penstock prepare made")
    if dataset.media is not None:
        raise ConfigError(
            f"{data}: documents have images, which are not scored yet; do not cache the reference"
        )
    opened = load_model(model, device=local_device(device))
    assert isinstance(opened, torch.nn.Module)
    opened.eval()
    return extend_dataset(
        dataset, output, {column: score_documents(opened, dataset)}, progress=progress
    )


def score_documents(model: Any, dataset: Dataset) -> Iterator[Any]:
    """float32 [tokens] of each document: log-probability of each trained token; 0 elsewhere."""
    from penstock.learn.training.reference_model import log_probabilities
    from penstock.models.head import Head

    group: list[Document] = []
    used = 0

    def score() -> Iterator[Any]:
        row = document_row(group)
        places = np.flatnonzero(row.targets[0] != IGNORE)
        values = np.zeros(len(row.tokens), np.float32)
        if len(places):
            with torch.no_grad():
                tensors = model.tensors(row)
                slots = torch.from_numpy(places).to(tensors.targets.device)
                temperatures = np.concatenate([_temperatures(one) for one in group])[places]
                hidden, targets = model(tensors)[0][slots], tensors.targets[0][slots]
                found = log_probabilities(Head.of_model(model), hidden, targets, temperatures)
            values[places + 1] = found.float().cpu().numpy()
        at = 0
        for one in group:
            yield values[at : at + len(one.tokens)]
            at += len(one.tokens)

    for number in range(len(dataset)):
        document = dataset[number]
        if group and used + len(document.tokens) > SLOTS:
            yield from score()
            group, used = [], 0
        group.append(document)
        used += len(document.tokens)
    if group:
        yield from score()


def _temperatures(document: Document) -> Any:
    """float64 [tokens] temperature at which the target of each slot was sampled."""
    tree = document.tree
    if tree is None or not tree.names:
        return np.ones(len(document.tokens))
    slots = [tree.slots(path) for path in range(len(tree.paths))]
    paths = RowPaths(
        slots=np.concatenate(slots),
        starts=np.cumsum([0, *map(len, slots)]),
        documents=np.zeros(len(slots), np.int64),
        values={name: tree.value(name) for name in tree.names},
    )
    return slot_temperatures(paths, np.append(document.loss_weights[1:] != 0, False))


def document_row(documents: Sequence[Document]) -> ModelInput:
    """Documents, some of them trees, end to end in one row without padding; targets have weights of
    1.
    """
    tokens, targets, positions, borders, reach = [], [], [], [], []
    at, forked = 0, False
    for document in documents:
        count = len(document.tokens)
        starts, ends, places = [0][:count], [count][:count], np.arange(count)
        if document.tree is not None:
            starts, ends, places = document.tree.nodes(count)
            forked |= document.tree.forked
        follow = np.full(count, IGNORE, np.int32)
        follow[:-1] = np.where(
            document.loss_weights[1:] != 0, document.tokens[1:].astype(np.int32), IGNORE
        )
        tokens.append(document.tokens.astype(np.int32))
        targets.append(follow)
        positions.append(places.astype(np.int32))
        borders += [at + start for start in starts]
        reach += [at + end for end in ends]
        at += count
    borders.append(at)
    return ModelInput(
        tokens=np.concatenate(tokens) if at else np.zeros(1, np.int32),
        targets=np.concatenate(targets)[None] if at else np.full((1, 1), IGNORE, np.int32),
        loss_weights=None,
        positions=np.concatenate(positions) if at else np.zeros(1, np.int32),
        document_ids=None,
        cu_seqlens=np.array(borders if at else [0, 1], np.int32),
        max_seqlen=int(np.diff(borders).max(initial=1)),
        num_tokens=at,
        source_ids=np.zeros(len(borders) - 1, np.int32),
        reach=np.array(reach, np.int32) if forked else None,
    )
