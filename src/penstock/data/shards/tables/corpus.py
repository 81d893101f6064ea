"""The protocol of all datasets that rows can be made of, whatever their format, and what it takes
to be one.
"""

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeGuard, overload

from penstock.core.errors import ConfigError
from penstock.data.shards.format.images import MediaInfo
from penstock.data.shards.format.manifest import ChatInfo, TokenizerInfo
from penstock.data.shards.tables.columns import ExtraTable
from penstock.data.shards.tables.document import Document
from penstock.data.shards.tables.table import DocumentTable
from penstock.media.processor import Processor
from penstock.tokenizers import Tokenizer


class _Documents(Protocol):
    """What `documents_at` needs of a corpus."""

    def __len__(self) -> int: ...

    def _read(self, document: int) -> Document: ...


@overload
def documents_at(corpus: _Documents, index: int) -> Document: ...
@overload
def documents_at(corpus: _Documents, index: slice) -> list[Document]: ...
def documents_at(corpus: _Documents, index: int | slice) -> Document | list[Document]:
    """One document, or a list of those of a slice: the `__getitem__` of each corpus.

    Raises:
        CorruptionError: They are not what was written; names the shard. Foreign corpora have no
            checksums.
        IndexError: There is no such document; iterating ends by it.
        ConfigError: The index is neither a whole number nor a slice.
    """
    count = len(corpus)
    if isinstance(index, slice):
        return [corpus._read(document) for document in range(*index.indices(count))]
    try:
        number = operator.index(index)
    except TypeError:
        raise ConfigError(
            f"documents have numbers: expected a whole number or a slice, got {index!r}"
        ) from None
    if not -count <= number < count:
        raise IndexError(f"document {number} of {count}")
    return corpus._read(number % count)


class Corpus(Protocol):
    """Documents that rows can be made of: a prepared `Dataset`, a foreign corpus in place, or
    several as one.
    """

    @property
    def name(self) -> str:
        """Short name, for messages."""

    @property
    def kind(self) -> str:
        """Name of its format."""

    @property
    def fingerprint(self) -> str:
        """Changes when the content does."""

    @property
    def path(self) -> Path:
        """Its folder on this machine, or its first file, for messages."""

    @property
    def url(self) -> str | None:
        """Where it is, if that is a store, as it is shown."""

    @property
    def table(self) -> DocumentTable:
        """Where the bytes lie."""

    @property
    def parts(self) -> "Sequence[Corpus]":
        """The datasets of which it consists: itself, or those that are joined."""

    def part_of(self, document: int) -> "tuple[Corpus, int]":
        """The part that holds a document, and the document's number in it."""

    @property
    def files(self) -> Sequence[str]:
        """Names of the files that the documents came from."""

    @property
    def tokenizer(self) -> TokenizerInfo | None:
        """The tokenizer that made it, where that is known."""

    @property
    def loaded_tokenizer(self) -> Tokenizer | None:
        """The tokenizer itself, ready to use; None where the corpus has none."""

    @property
    def chat(self) -> ChatInfo | None:
        """Template, stop ids and settings of a dataset of chats; None for others."""

    @property
    def media(self) -> MediaInfo | None:
        """How its images became tokens; None: it has no images."""

    @property
    def processor(self) -> Processor | None:
        """The processor of its images; None: it has no images."""

    @property
    def extras(self) -> ExtraTable | None:
        """Its trees and columns; None: it has neither."""

    @property
    def sampling(self) -> Mapping[str, object]:
        """How the responses of its documents were sampled, as far as it was said."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""

    @property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the text that the tokens stand for; None where that is not known."""

    @property
    def framed(self) -> tuple[bool, bool]:
        """Whether all documents begin with BOS, and whether all end with EOS, as far as is
        known.
        """

    def __len__(self) -> int: ...

    def __getitem__(self, document: int, /) -> Document: ...


def location_of(corpus: Corpus) -> str:
    """Where a corpus is, for messages: its URL or path."""
    return corpus.url or str(corpus.path)


def is_corpus(value: object) -> TypeGuard[Corpus]:
    """Whether a value is an opened dataset, rather than a path to one."""
    return hasattr(value, "table")
