"""The protocol of all datasets that rows can be made of, whatever their format, and what it takes to be one."""

import operator
from pathlib import Path
from typing import Any, Protocol, overload

from penstock.core.errors import ConfigError
from penstock.data.shards.format.manifest import TokenizerInfo
from penstock.data.shards.tables.document import Document
from penstock.data.shards.tables.table import DocumentTable
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
        CorruptionError: They are not what was written; names the shard. Foreign corpora have no checksums.
        IndexError: There is no such document; iterating ends by it.
        ConfigError: The index is neither a whole number nor a slice.
    """
    count = len(corpus)
    if isinstance(index, slice):
        return [corpus._read(document) for document in range(*index.indices(count))]
    try:
        number = operator.index(index)
    except TypeError:
        raise ConfigError(f"documents have numbers: expected a whole number or a slice, got {index!r}") from None
    if not -count <= number < count:
        raise IndexError(f"document {number} of {count}")
    return corpus._read(number % count)


class Corpus(Protocol):
    """Documents that rows can be made of: a prepared `Dataset`, or a foreign corpus read in place."""

    @property
    def name(self) -> str:
        """Short name, for messages."""

    @property
    def fingerprint(self) -> str:
        """Changes when the content does."""

    @property
    def path(self) -> Path:
        """Its folder, or its first file, for messages."""

    @property
    def table(self) -> DocumentTable:
        """Where the bytes lie."""

    @property
    def tokenizer(self) -> TokenizerInfo | None:
        """The tokenizer that made it, where that is known."""

    @property
    def loaded_tokenizer(self) -> Tokenizer | None:
        """The tokenizer itself, ready to use; None where the corpus has none."""

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
        """Whether all documents begin with BOS, and whether all end with EOS, as far as is known."""

    def __len__(self) -> int: ...

    def __getitem__(self, document: int) -> Document: ...


def location_of(corpus: Any) -> str:
    """Where a corpus is, for messages: its URL or path."""
    return str(getattr(corpus, "url", None) or corpus.path)


def is_corpus(value: Any) -> bool:
    """Whether a value is an opened dataset, rather than a path to one."""
    return hasattr(value, "table")
