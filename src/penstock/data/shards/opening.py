"""Opens a dataset of any supported format, or all datasets of a list or a glob as one corpus."""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, FormatError
from penstock.core.folders import base_name, is_url, local_path, normal_url
from penstock.core.suggestions import suggests
from penstock.core.system import without_collector
from penstock.data.shards.dataset import Dataset
from penstock.data.shards.foreign.in_place import InPlaceCorpus
from penstock.data.shards.foreign.megatron import megatron_prefix, open_megatron
from penstock.data.shards.foreign.npy import open_npy
from penstock.data.shards.joined import JoinedCorpus
from penstock.data.shards.tables.corpus import Corpus, is_corpus

_IN_PLACE = (".npy", ".bin", ".idx")
"""Endings of foreign corpora, which are read only from local files."""


@suggests
def open_dataset(
    path: str | os.PathLike[str] | Corpus | Sequence[Any],
    *,
    dtype: str | None = None,
    eos_id: int | None = None,
    cache: str | Path | None = None,
) -> Dataset | InPlaceCorpus | JoinedCorpus:
    """Open a dataset in place, or several as one corpus.

    ```python
    open_dataset("data/web")
    open_dataset(["data/web-00", "data/web-01"])  # the documents of both, in this order
    open_dataset("data/web-*")  # those of all that match, sorted by path
    open_dataset("s3://bucket/web")  # in a store: documents come when they are read
    ```

    Args:
        path: A folder that `penstock prepare` made, or its URL in a store; a Megatron corpus (its
            prefix, `.bin` or `.idx`); an `.npy` file of bare tokens; a glob of these; an opened
            dataset; or a list of these. Parts of one corpus have one format, tokenizer and
            template.
        dtype: Type of the tokens in `.npy` files: "uint16" or "uint32".
        eos_id: The token that ends each document in `.npy` files, or in Megatron corpora if all
            documents have it.
        cache: Where copies of remote datasets are kept; None: the environment's `PENSTOCK_CACHE`,
            else the user's cache folder.

    Raises:
        FormatError: There is nothing that penstock can read, or nothing matches a glob.
        StoreError: A store cannot be read.
        CorruptionError: A dataset is damaged.
        ConfigError: An `.npy` file without `dtype` and `eos_id`, an empty list, a part that is
            given twice, or two parts that cannot be one corpus.
    """
    if isinstance(path, os.PathLike) and not isinstance(path, Path):
        path = Path(path)
    if isinstance(path, (str, Path)) and not _is_glob(path):
        return _open_one(path, dtype, eos_id, cache)
    found = list(
        _expanded(path if isinstance(path, Sequence) and not isinstance(path, str) else [path])
    )
    if not found:
        raise ConfigError("a corpus needs at least one dataset, got an empty list")
    parts: list[Any] = []
    with without_collector():
        for one in found:
            opened = one if is_corpus(one) else _open_one(one, dtype, eos_id, cache)
            parts += opened.parts
    return parts[0] if len(parts) == 1 else JoinedCorpus(parts, corpus_name(path))


def corpus_name(path: object) -> str:
    """The name that a dataset has by default: the last part of its path, or of a glob; a list is
    named by its first entry and the number of others.
    """
    if isinstance(path, (str, Path)):
        return base_name(path)
    if isinstance(path, Sequence) and not is_corpus(path):
        others = f" and {len(path) - 1} more" if len(path) > 1 else ""
        return f"{corpus_name(path[0])}{others}" if path else ""
    return str(path.name if is_corpus(path) else None)


def dataset_paths(path: str | Path) -> list[str | Path]:
    """The path or URL itself, or what a glob matches, sorted by path; of a Megatron corpus its
    prefix, once.

    A path that exists is no glob, whatever characters it has.

    Raises:
        FormatError: Nothing matches the glob.
    """
    if is_url(path):
        return [normal_url(path)]
    if not _is_glob(path):
        return [Path(path)]
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    if not matches:
        raise FormatError(f"{path}: no dataset matches this glob; is it spelled right?")
    return list(
        dict.fromkeys(match if match.is_dir() else megatron_prefix(match) for match in matches)
    )


def _expanded(entries: Sequence[object]) -> Iterator[Any]:
    """Opened datasets as they are, and the path of each other dataset."""
    for entry in entries:
        if is_corpus(entry):
            yield entry
        elif not isinstance(entry, (str, os.PathLike)):
            raise ConfigError(
                f"a part of a corpus must be a path, a glob or an opened dataset, got {entry!r}"
            )
        else:
            yield from dataset_paths(entry if isinstance(entry, str) else Path(entry))


def _is_glob(path: str | Path) -> bool:
    return (
        glob.has_magic(str(path))
        and not is_url(path)
        and not Path(path).exists()
        and not _has_index(Path(path))
    )


def _has_index(path: Path) -> bool:
    prefix = megatron_prefix(path)
    return prefix.with_name(prefix.name + ".idx").is_file()


def _open_one(
    path: str | Path, dtype: str | None, eos_id: int | None, cache: str | Path | None
) -> Dataset | InPlaceCorpus:
    if is_url(path) and Path(path).suffix not in _IN_PLACE:
        return Dataset.open(path, cache=cache)
    path = local_path(path, "a dataset")
    if path.suffix == ".npy":
        if dtype is None or eos_id is None:
            raise ConfigError(
                f"{path}: a file of bare tokens does not record their type or where documents end; "
                "set dtype ('uint16' or 'uint32') and eos_id"
            )
        return open_npy(path, dtype, eos_id)
    if not os.path.isdir(path):
        if _has_index(path):
            return open_megatron(megatron_prefix(path), eos_id)
        found = "not a dataset" if path.exists() else "nothing there"
        raise FormatError(
            f"{path}: {found}; give a folder that `penstock prepare` made, a Megatron prefix, "
            "or an .npy file"
        )
    return Dataset.open(path)
