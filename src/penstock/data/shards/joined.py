"""Several datasets as one corpus: their documents follow one another, and one document table leads
to all of them.

Plan and fill see one table, so all that a loader does with a dataset it does with a joined one.
Joining copies the lengths (8 bytes a document, 4 of foreign corpora; of large remote datasets those
that come) and the batch tables (72 bytes for 1,024 documents); tokens stay where they lie.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject
from penstock.core.properties import cached_property
from penstock.data.shards.dataset import Dataset
from penstock.data.shards.format.images import MediaInfo
from penstock.data.shards.format.manifest import ChatInfo, TokenizerInfo
from penstock.data.shards.remote.joined_residency import JoinedResidency
from penstock.data.shards.remote.length_ranges import join_numbers
from penstock.data.shards.tables.columns import ExtraTable
from penstock.data.shards.tables.corpus import Corpus, documents_at, location_of
from penstock.data.shards.tables.document import Document
from penstock.data.shards.tables.holder import Holder
from penstock.data.shards.tables.mappings import joined_mappings
from penstock.data.shards.tables.table import DocumentTable
from penstock.media.processor import Processor
from penstock.tokenizers import Tokenizer

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


@final
class JoinedCorpus:
    """Datasets whose documents are numbered through, part after part; made by `open_dataset` of a
    list or a glob.

    The fingerprint is of the parts' fingerprints in their order, so it changes when a part is
    changed, added, removed or moved. Tokenizer and chat template are those of all parts. Pickling
    keeps the parts' paths.

    Args:
        parts: At least one, in order.
        name: Short name, for messages.

    Raises:
        ConfigError: A part is given twice, or two parts cannot be one corpus; names both.
    """

    def __init__(self, parts: Sequence[Corpus], name: str) -> None:
        _refuse_twice(parts)
        _refuse_differences(parts)
        self.parts, self.name = tuple(parts), name
        self.table = _join_tables([part.table for part in parts])
        self._starts = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
        # A part without tokens has no ends that could differ.
        framed = [part.framed for part in parts if part.num_tokens] or [(False, False)]
        self.framed = all(begins for begins, _ in framed), all(ends for _, ends in framed)
        self.fingerprint = fingerprint_of_parts([part.fingerprint for part in parts])

    def __reduce__(self) -> tuple[object, ...]:
        return JoinedCorpus, (self.parts, self.name)

    @property
    def kind(self) -> str:
        """Name of the parts' format."""
        return self.parts[0].kind

    url = None

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
        return self.parts[0].loaded_tokenizer

    @cached_property
    def chat(self) -> ChatInfo | None:
        """Template, stop ids and settings of the first part, where all parts hold chats."""
        return self.parts[0].chat

    @property
    def sampling(self) -> Mapping[str, object]:
        """That of the first part; each part has its own."""
        return self.parts[0].sampling

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
        return self.parts[0].media

    @property
    def processor(self) -> Processor | None:
        """The processor of the first part's images, which is that of all."""
        return self.parts[0].processor

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(part.num_tokens for part in self.parts)

    @cached_property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the text that the tokens stand for; None where a part does not know its
        own.
        """
        known = [part.text_bytes for part in self.parts if part.num_tokens]
        return sum(filter(None, known)) if all(known) else None

    @property
    def files(self) -> list[str]:
        """Names of the files that the documents came from, part after part."""
        return [name for part in self.parts for name in part.files]

    def part_of(self, document: int) -> tuple[Corpus, int]:
        """The part that holds a document, and the document's number in it."""
        number = int(np.searchsorted(self._starts, document, side="right")) - 1
        return self.parts[number], document - int(self._starts[number])

    def __len__(self) -> int:
        return self.table.num_documents

    def __eq__(self, other: object) -> bool:
        return (
            self.fingerprint == other.fingerprint
            if isinstance(other, JoinedCorpus)
            else NotImplemented
        )

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"JoinedCorpus({self.name!r}, {len(self.parts)} parts, {len(self)} documents, "
            f"{self.num_tokens} tokens)"
        )

    __getitem__ = documents_at

    def _read(self, document: int) -> Document:
        part, number = self.part_of(document)
        return part[number]


def fingerprint_of_parts(prints: Sequence[str]) -> str:
    """The fingerprint of a joined corpus by those of its parts."""
    return hashlib.blake2b(repr(list(prints)).encode(), digest_size=16).hexdigest()


def _refuse_twice(parts: Sequence[Corpus]) -> None:
    places = [part.url or part.path.resolve() for part in parts]
    if len(set(places)) < len(places):
        twice = next(place for place in places if places.count(place) > 1)
        raise ConfigError(
            f"{twice}: is given twice in one corpus; leave one out (a larger share reads it "
            "more often)"
        )


def _refuse_differences(parts: Sequence[Corpus]) -> None:
    """Refuse parts that one table, one tokenizer or one template cannot stand for."""
    first: dict[str, tuple[Corpus, Any]] = {}
    for part in parts:
        for fact, value in _facts(part).items():
            other, expected = first.setdefault(fact, (part, value))
            if value != expected:
                raise ConfigError(
                    f"{location_of(other)} and {location_of(part)} cannot be one corpus: "
                    f"{fact}: {_shown(expected)} and {_shown(value)}; {_CURES[fact]}, or make "
                    "them two sources"
                )


def _facts(part: Corpus) -> JsonObject:
    table, chat, info = part.table, part.chat, part.tokenizer
    facts: JsonObject = {
        "format": part.kind,
        "bytes of a stored token": table.token_bytes,
        "tokenizer": info and replace(info, name=""),
        "loss weights": table.has_spans,
        "chat template": chat and (chat.template_name, chat.template_fingerprint, chat.stop_ids),
    }
    if isinstance(part, Dataset):
        facts["columns"] = part.manifest.columns and (
            "of",
            ", ".join(map(str, part.manifest.columns)),
        )
        media = part.media
        facts["images"] = media and (media.processor, media.fingerprint)
        names = part.manifest.path_values
        facts["prefix trees"] = (
            names if names is None else ("with", ", ".join(names) or "no values")
        )
    if part.num_tokens and chat is None:
        # Which ids chats begin and end with is the template's business, and may differ by
        # conversation.
        begins, ends = part.framed
        facts |= {"BOS at the beginning of documents": begins, "EOS at the end of documents": ends}
    return facts


def _shown(value: object) -> str:
    if isinstance(value, TokenizerInfo):
        name = value.fingerprint[:8] or "nameless"
        return f"{name} (vocabulary {value.vocab_size}, BOS {value.bos_id}, EOS {value.eos_id})"
    if isinstance(value, tuple):
        return (
            f"{value[0]} ({value[1][:8]})"
            if value and len(value[1]) == 32
            else " ".join(value) or "none"
        )
    return (
        {True: "yes", False: "no", None: "none"}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )


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
    starts = np.cumsum([0, *(table.num_documents for table in tables)], dtype=np.int64)
    return JoinedResidency(starts.tolist(), [table.holder for table in tables])


def _joined(tables: Sequence[DocumentTable], column: Callable[[DocumentTable], Array]) -> Array:
    return np.concatenate([column(table) for table in tables])


def _cumulated(starts: Sequence[Array]) -> Array:
    """Starts of all parts' entries (int64 [entries + 1]) from starts in each part ([entries of the
    part + 1]).
    """
    offsets = np.cumsum([0, *(int(part[-1]) for part in starts)])
    shifted = [part[:-1] + offset for part, offset in zip(starts, offsets, strict=False)]
    return np.concatenate([*shifted, offsets[-1:]]).astype(np.int64)
