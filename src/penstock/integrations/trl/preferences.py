"""Pairs of a better and a worse answer, from documents that are prefix trees, as TRL's DPOTrainer
reads them.

TRL trains all tokens of an answer behind one prompt, and both answers of a pair have the same
prompt. So the trained tokens of a path must be its end, but for what follows the last of them,
which is left out: no trained token sees it.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import ConfigError, MissingExtraError
from penstock.data.shards.format.trees import odd_weight
from penstock.data.shards.opening import open_dataset
from penstock.data.shards.tables.document import Document

REFERENCE_COLUMN = "reference_log_probabilities"
"""The column that `penstock reference` writes."""
PAIR_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")


def preference_pairs(data: str | Path | Any, *, num_documents: int | None = None) -> Any:
    """Every pair of answers of different rank, as a `datasets.Dataset` for
    `penstock.trl.DPOTrainer`.

    Columns are `prompt_ids`, `chosen_ids` and `rejected_ids`; and `ref_chosen_logps` and
    `ref_rejected_logps` where the data have log-probabilities of a reference model (`penstock
    reference`). Costs 8 bytes a token, in memory, and some 100 µs a document.

    Args:
        data: A dataset prepared with `answers="tree"` or `"separate"`, or its path.
        num_documents: Only the first documents; None: all.

    Raises:
        ConfigError: A document has no answers of different rank, or what is trained is not the end
            of each answer.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "huggingface") from error

    corpus = open_dataset(data) if isinstance(data, (str, Path)) else data
    count = len(corpus) if num_documents is None else min(num_documents, len(corpus))
    rows = [pair for number in range(count) for pair in pairs_of_document(corpus[number])]
    if not rows:
        raise ConfigError(f"{corpus.name}: no document has two answers of different rank")
    return datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in rows[0]})


def pairs_of_document(document: Document) -> Iterator[dict[str, Any]]:
    """The pairs of one document, better and worse answer each; see `preference_pairs`.

    Raises:
        ConfigError: It has none, TRL cannot express one, or a loss weight is neither 0 nor 1.
    """
    tree = document.tree
    if tree is None or not tree.num_pairs:
        raise ConfigError(
            f"{document.origin}: has no answers of different rank, so there is no pair; "
            "prepare with answers='tree' from records with chosen and rejected answers, or "
            "with ranks or scores"
        )
    if len(np.unique(tree.answers)) < len(tree.paths):
        raise ConfigError(
            f"{document.origin}: an answer has several paths, which TRL's pairs cannot express; "
            "train them with ps.train(preference=…)"
        )
    places, times = np.unique(
        np.concatenate([_behind(tree.slots(path), 1) for path in range(len(tree.paths))]),
        return_counts=True,
    )
    if (odd := odd_weight(document.loss_weights[places], times)) is not None:
        raise ConfigError(
            f"{document.origin}: a token has loss weight {odd:g}, which pairs of whole "
            "answers cannot express; prepare the data with weights 0 and 1"
        )
    values = document.columns.get(REFERENCE_COLUMN)
    for chosen, rejected in tree.pairs().tolist():
        better, worse = (_answer(document, path) for path in (chosen, rejected))
        prompt = document.tokens[better[0][: better[1]]]
        if not np.array_equal(prompt, document.tokens[worse[0][: worse[1]]]):
            raise ConfigError(
                f"{document.origin}: answers {chosen} and {rejected} have different prompts "
                "before their first trained tokens, which TRL's pairs cannot express; train "
                "them with ps.train(preference=…)"
            )
        pair = {"prompt_ids": prompt.tolist()}
        for name, (slots, begin) in (("chosen", better), ("rejected", worse)):
            pair[f"{name}_ids"] = document.tokens[slots[begin:]].tolist()
            if values is not None:
                pair[f"ref_{name}_logps"] = float(
                    values[_behind(slots, begin)].sum(dtype=np.float64)
                )
        yield pair


def _answer(document: Document, path: int) -> tuple[Any, int]:
    """Slots of a path up to its last trained token, and the place of its first trained token among
    them.
    """
    assert document.tree is not None
    slots = document.tree.slots(path)
    trained = 1 + np.flatnonzero(document.loss_weights[_behind(slots, 1)] != 0)
    if not len(trained):
        raise ConfigError(f"{document.origin}: answer {path} has no trained token")
    begin, end = int(trained[0]), int(trained[-1]) + 1
    if len(trained) != end - begin:
        raise ConfigError(
            f"{document.origin}: answer {path} has tokens between its trained ones that are "
            "not trained (a later message of the user, say), and TRL would train them; train "
            "it with ps.train(preference=…)"
        )
    return slots[:end], begin


def _behind(slots: Any, begin: int) -> Any:
    """Where a tree stores weight and columns of tokens `begin` … of a path: behind the slot whose
    target each is.
    """
    return slots[begin - 1 : -1] + 1


def digest(pairs: Any) -> str:
    """Changes with anything in a `datasets.Dataset` of pairs, and with their order."""
    found = blake2b(digest_size=8)
    for table in pairs.with_format("arrow").iter(batch_size=1000):
        for name, column in zip(table.column_names, table.itercolumns(), strict=True):
            found.update(name.encode())
            for chunk in column.chunks:
                if name in PAIR_COLUMNS:
                    found.update(
                        chunk.value_lengths()
                        .to_numpy(zero_copy_only=False)
                        .astype(np.int64)
                        .tobytes()
                    )
                    found.update(
                        chunk.flatten().to_numpy(zero_copy_only=False).astype(np.int64).tobytes()
                    )
                else:
                    found.update(repr(chunk.to_pylist()).encode())
    return found.hexdigest()


def longest(rows: Sequence[dict[str, Any]]) -> int:
    """Tokens of the longest prompt with an answer."""
    sizes = (
        len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))
        for row in rows
    )
    return max(sizes, default=0)
