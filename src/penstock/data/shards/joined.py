"""Several datasets as one corpus: their documents follow one another, and one document table leads to all of them.

Plan and fill see one table, so all that a loader does with a dataset it does with a joined one. Joining copies the
lengths (8 bytes a document, 4 of foreign corpora; of large remote datasets those that come) and the batch tables
(72 bytes for 1,024 documents); tokens stay where they lie.

Opens a dataset of any supported format, or all datasets of a list or a glob as one corpus.
"""

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np

from penstock.core.errors import ConfigError, FormatError
from penstock.core.folders import base_name, is_url, local_path, normal_url
from penstock.core.suggestions import suggests
from penstock.data.shards.dataset import Dataset
from penstock.data.shards.foreign.in_place import InPlaceCorpus
from penstock.data.shards.foreign.megatron import megatron_prefix, open_megatron
from penstock.data.shards.foreign.npy import open_npy
from penstock.data.shards.format.images import MediaInfo
from penstock.data.shards.format.layout import other_places
from penstock.data.shards.format.manifest import ChatInfo, TokenizerInfo
from penstock.data.shards.remote.length_ranges import join_numbers
from penstock.data.shards.tables.columns import ExtraTable
from penstock.data.shards.tables.corpus import documents_at, is_corpus, location_of
from penstock.data.shards.tables.document import Document
from penstock.data.shards.tables.holder import ORIGINS, Holder
from penstock.data.shards.tables.mappings import joined_mappings
from penstock.data.shards.tables.table import DocumentTable
from penstock.data.stores.files import Array
from penstock.media.processor import Processor
from penstock.tokenizers import Tokenizer

Part: TypeAlias = Dataset | InPlaceCorpus


@final
class JoinedCorpus:
    """Datasets whose documents are numbered through, part after part; made by `open_dataset` of a list or a glob.

    The fingerprint is of the parts' fingerprints in their order, so it changes when a part is changed, added, removed
    or moved. Tokenizer and chat template are those of all parts. Pickling keeps the parts' paths.

    Args:
        parts: At least one, in order.
        name: Short name, for messages.

    Raises:
        ConfigError: A part is given twice, or two parts cannot be one corpus; names both.
    """

    def __init__(self, parts: Sequence[Part], name: str) -> None:
        _refuse_twice(parts)
        _refuse_differences(parts)
        self.parts, self.name = tuple(parts), name
        self.table = _join_tables([part.table for part in parts])
        self._starts = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
        # A part without tokens has no ends that could differ.
        framed = [part.framed for part in parts if part.num_tokens] or [(False, False)]
        self.framed = all(begins for begins, _ in framed), all(ends for _, ends in framed)
        self.fingerprint = fingerprint_of_parts([part.fingerprint for part in parts])

    def __reduce__(self) -> tuple[Any, ...]:
        return JoinedCorpus, (self.parts, self.name)

    @property
    def kind(self) -> str:
        """Name of the parts' format."""
        return _kind(self.parts[0])

    @property
    def path(self) -> Path:
        """That of the first part, whose tokenizer and template are those of all."""
        return self.parts[0].path

    @property
    def tokenizer(self) -> TokenizerInfo | None:
        """The tokenizer that made all parts, where that is known."""
        return self.parts[0].tokenizer

    @cached_property
    def loaded_tokenizer(self) -> Tokenizer | None:
        """The tokenizer from the first part's folder; None where there is none."""
        return getattr(self.parts[0], "loaded_tokenizer", None)

    @cached_property
    def chat(self) -> ChatInfo | None:
        """Template, stop ids and settings of the first part, where all parts hold chats."""
        return getattr(self.parts[0], "chat", None)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(part.longest for part in self.parts)

    @cached_property
    def extras(self) -> ExtraTable | None:
        """Trees and columns of all parts; None: they have neither."""
        first = self.parts[0]
        if not isinstance(first, Dataset) or first.extras is None:
            return None
        return ExtraTable(self.table, first.manifest.layout, first.manifest.path_values or ())

    @property
    def media(self) -> MediaInfo | None:
        """How the images of the first part became tokens, where all parts have images."""
        return getattr(self.parts[0], "media", None)

    @property
    def processor(self) -> Processor | None:
        """The processor of the first part's images, which is that of all."""
        return getattr(self.parts[0], "processor", None)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(part.num_tokens for part in self.parts)

    @cached_property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the text that the tokens stand for; None where a part does not know its own."""
        known = [part.text_bytes for part in self.parts if part.num_tokens]
        return sum(filter(None, known)) if all(known) else None

    @property
    def files(self) -> list[str]:
        """Names of the files that the documents came from, part after part."""
        return [name for part in self.parts for name in part.files]

    def part_of(self, document: int) -> tuple[Part, int]:
        """The part that holds a document, and the document's number in it."""
        number = int(np.searchsorted(self._starts, document, side="right")) - 1
        return self.parts[number], document - int(self._starts[number])

    def __len__(self) -> int:
        return self.table.num_documents

    def __eq__(self, other: object) -> bool:
        return self.fingerprint == other.fingerprint if isinstance(other, JoinedCorpus) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"JoinedCorpus({self.name!r}, {len(self.parts)} parts, {len(self)} documents, {self.num_tokens} tokens)"

    __getitem__ = documents_at

    def _read(self, document: int) -> Document:
        part, number = self.part_of(document)
        return part[number]


def fingerprint_of_parts(prints: Sequence[str]) -> str:
    """The fingerprint of a joined corpus by those of its parts."""
    return hashlib.blake2b(repr(list(prints)).encode(), digest_size=16).hexdigest()


def part_of(corpus: Any, document: int) -> tuple[Any, int]:
    """The dataset whose folder holds a document, and the document's number in it."""
    return corpus.part_of(document) if isinstance(corpus, JoinedCorpus) else (corpus, document)


def _refuse_twice(parts: Sequence[Part]) -> None:
    places = [getattr(part, "url", None) or part.path.resolve() for part in parts]
    if len(set(places)) < len(places):
        twice = next(place for place in places if places.count(place) > 1)
        raise ConfigError(f"{twice}: is given twice in one corpus; leave one out (a larger share reads it more often)")


_CURES = {
    "format": "convert one of them (penstock convert)",
    "bytes of a stored token": "store both with the same type",
    "tokenizer": "prepare both with one tokenizer",
    "loss weights": "prepare both with loss weights, or both without",
    "chat template": "prepare both with one template",
    "columns": "prepare both with the same columns",
    "images": "prepare both with one processor and the same settings of images, or both without",
    "prefix trees": "prepare both with trees and the same values of paths, or both without",
    "BOS at the beginning of documents": "prepare both with the same add_bos",
    "EOS at the end of documents": "prepare both with the same add_eos",
}
"""What all parts have in common → what to do where two do not."""


def _refuse_differences(parts: Sequence[Part]) -> None:
    """Refuse parts that one table, one tokenizer or one template cannot stand for."""
    first: dict[str, tuple[Part, Any]] = {}
    for part in parts:
        for fact, value in _facts(part).items():
            other, expected = first.setdefault(fact, (part, value))
            if value != expected:
                raise ConfigError(
                    f"{location_of(other)} and {location_of(part)} cannot be one corpus: {fact}: {_shown(expected)} "
                    f"and {_shown(value)}; {_CURES[fact]}, or make them two sources"
                )


def _facts(part: Part) -> dict[str, Any]:
    table, chat, info = part.table, getattr(part, "chat", None), part.tokenizer
    facts: dict[str, Any] = {
        "format": _kind(part),
        "bytes of a stored token": table.token_bytes,
        "tokenizer": info and replace(info, name=""),
        "loss weights": table.has_spans,
        "chat template": chat and (chat.template_name, chat.template_fingerprint, chat.stop_ids),
    }
    if isinstance(part, Dataset):
        facts["columns"] = part.manifest.columns and ("of", ", ".join(map(str, part.manifest.columns)))
        media = part.media
        facts["images"] = media and (media.processor, media.fingerprint)
        names = part.manifest.path_values
        facts["prefix trees"] = names if names is None else ("with", ", ".join(names) or "no values")
    if part.num_tokens and chat is None:
        # Which ids chats begin and end with is the template's business, and may differ by conversation.
        begins, ends = part.framed
        facts |= {"BOS at the beginning of documents": begins, "EOS at the end of documents": ends}
    return facts


def _kind(part: Part) -> str:
    return part.kind if isinstance(part, InPlaceCorpus) else "penstock"


def _shown(value: Any) -> str:
    if isinstance(value, TokenizerInfo):
        name = value.fingerprint[:8] or "nameless"
        return f"{name} (vocabulary {value.vocab_size}, BOS {value.bos_id}, EOS {value.eos_id})"
    if isinstance(value, tuple):
        return f"{value[0]} ({value[1][:8]})" if value and len(value[1]) == 32 else " ".join(value) or "none"
    return {True: "yes", False: "no", None: "none"}[value] if value is None or isinstance(value, bool) else str(value)


def _join_tables(tables: Sequence[DocumentTable]) -> DocumentTable:
    """One table over the documents of several, which have the same layout."""
    shards = [len(table.shard_addresses) for table in tables]
    mappings = [table.mappings[:count] for table, count in zip(tables, shards, strict=True)]
    others = [table.mappings[count:] for table, count in zip(tables, shards, strict=True)]
    lengths, sums = join_numbers([(table.lengths, table.weight_sums) for table in tables])
    return replace(
        tables[0],
        num_documents=sum(table.num_documents for table in tables),
        lengths=lengths,
        weight_sums=sums,
        # In place, a shard is one batch of any size.
        documents_per_batch=max(table.documents_per_batch for table in tables),
        shard_starts=_cumulated([table.shard_starts for table in tables]),
        shard_first_batch=_cumulated([table.shard_first_batch for table in tables]),
        shard_addresses=_joined(tables, lambda table: table.shard_addresses),
        shard_bytes=_joined(tables, lambda table: table.shard_bytes),
        batches=_joined(tables, lambda table: table.batches),
        paths=[path for table in tables for path in table.paths],
        mappings=joined_mappings([*mappings, *others]),
        holder=_joined_holder(tables),
    )


def _joined_holder(tables: Sequence[DocumentTable]) -> Holder | None:
    if all(table.holder is None for table in tables):
        return None
    from penstock.data.shards.remote.joined_residency import JoinedResidency

    starts = np.cumsum([0, *(table.num_documents for table in tables)], dtype=np.int64)
    return JoinedResidency(starts.tolist(), [table.holder for table in tables])


def _joined(tables: Sequence[DocumentTable], column: Callable[[DocumentTable], Array]) -> Array:
    return np.concatenate([column(table) for table in tables])


def _cumulated(starts: Sequence[Array]) -> Array:
    """Starts of all parts' entries (int64 [entries + 1]) from starts in each part ([entries of the part + 1])."""
    offsets = np.cumsum([0, *(int(part[-1]) for part in starts)])
    shifted = [part[:-1] + offset for part, offset in zip(starts, offsets, strict=False)]
    return np.concatenate([*shifted, offsets[-1:]]).astype(np.int64)


_IN_PLACE = (".npy", ".bin", ".idx")
"""Endings of foreign corpora, which are read only from local files."""
_TOGETHER = 1 << 16
"""Documents of which the origins are fetched together."""
_SHARDS_TOGETHER = 1 << 10
"""Shards, at most, that these may lie in."""

Origins = tuple[np.ndarray[Any, np.dtype[np.int32]], np.ndarray[Any, np.dtype[np.int64]]]


def knows_origins(corpus: Any) -> bool:
    """Whether a corpus says which record each of its documents was made from: `prepare` notes it, others do not."""
    parts = corpus.parts if isinstance(corpus, JoinedCorpus) else (corpus,)
    return all(isinstance(part, Dataset) for part in parts)


def read_origins(corpus: Dataset | JoinedCorpus) -> Origins:
    """Number of each document's file in `corpus.files` (−1 where it is not known), int32 [N], and its line or row in
    that file, int64 [N]; of a corpus that `knows_origins`."""
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
        for batch, begin in enumerate(range(first, last, manifest.documents_per_batch), table.shard_first_batch[shard]):
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
                file_place, line_place, _ = other_places(table.mappings[shard], table.batches[batch], rows)
                data = table.mappings[shard]
                files[begin : begin + count] = data[file_place + 4 * row :][: 4 * count].view(np.int32)
                lines[begin : begin + count] = data[line_place + 8 * row :][: 8 * count].view(np.int64)
                begin += count
    return files, lines


@suggests
def open_dataset(
    path: str | os.PathLike[str] | Sequence[Any],
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
        path: A folder that `penstock prepare` made, or its URL in a store; a Megatron corpus (its prefix, `.bin` or
            `.idx`); an `.npy` file of bare tokens; a glob of these; or a list of paths, globs and opened datasets.
            Parts of one corpus have one format, tokenizer and template.
        dtype: Type of the tokens in `.npy` files: "uint16" or "uint32".
        eos_id: The token that ends each document in `.npy` files, or in Megatron corpora if all documents have it.
        cache: Where copies of remote datasets are kept; None: the environment's `PENSTOCK_CACHE`, else the user's cache
            folder.

    Raises:
        FormatError: There is nothing that penstock can read, or nothing matches a glob.
        StoreError: A store cannot be read.
        CorruptionError: A dataset is damaged.
        ConfigError: An `.npy` file without `dtype` and `eos_id`, a remote dataset with images, an empty list, a part
            that is given twice, or two parts that cannot be one corpus.
    """
    if isinstance(path, os.PathLike):
        path = Path(path)
    if isinstance(path, (str, Path)) and not _is_glob(path):
        return _open_one(path, dtype, eos_id, cache)
    found = list(_expanded([path] if isinstance(path, (str, Path)) else path))
    if not found:
        raise ConfigError("a corpus needs at least one dataset, got an empty list")
    parts: list[Any] = []
    for one in found:
        opened = one if is_corpus(one) else _open_one(one, dtype, eos_id, cache)
        parts += opened.parts if isinstance(opened, JoinedCorpus) else [opened]
    return parts[0] if len(parts) == 1 else JoinedCorpus(parts, corpus_name(path))


def corpus_name(path: Any) -> str:
    """The name that a dataset has by default: the last part of its path, or of a glob; a list is named by its first
    entry and the number of others."""
    if isinstance(path, (str, Path)):
        return base_name(path)
    if isinstance(path, Sequence) and not is_corpus(path):
        others = f" and {len(path) - 1} more" if len(path) > 1 else ""
        return f"{corpus_name(path[0])}{others}" if path else ""
    return str(getattr(path, "name", None))


def dataset_paths(path: str | Path) -> list[str | Path]:
    """The path or URL itself, or what a glob matches, sorted by path; of a Megatron corpus its prefix, once.

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
    return list(dict.fromkeys(match if match.is_dir() else megatron_prefix(match) for match in matches))


def _expanded(entries: Sequence[Any]) -> Iterator[Any]:
    """Opened datasets as they are, and the path of each other dataset."""
    for entry in entries:
        if is_corpus(entry):
            yield entry
        elif not isinstance(entry, (str, os.PathLike)):
            raise ConfigError(f"a part of a corpus must be a path, a glob or an opened dataset, got {entry!r}")
        else:
            yield from dataset_paths(entry if isinstance(entry, str) else Path(entry))


def _is_glob(path: str | Path) -> bool:
    return glob.has_magic(str(path)) and not is_url(path) and not Path(path).exists() and not _has_index(Path(path))


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
    if not path.is_dir():
        if _has_index(path):
            return open_megatron(megatron_prefix(path), eos_id)
        found = "not a dataset" if path.exists() else "nothing there"
        raise FormatError(
            f"{path}: {found}; give a folder that `penstock prepare` made, a Megatron prefix, or an .npy file"
        )
    return Dataset.open(path)
