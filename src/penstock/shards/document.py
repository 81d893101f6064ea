"""What a dataset gives: documents with their origin; and what every kind of dataset offers."""

import operator
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np

from penstock.errors import ConfigError
from penstock.shards.manifest import TokenizerInfo
from penstock.shards.table import DocumentTable


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a document came from."""

    file: str
    """Empty when it is not known."""
    line: int
    """Line (from 1) or row (from 0) in the file."""

    def __str__(self) -> str:
        return f"{self.file or '?'}:{self.line}"


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Document:
    """One document of a dataset. Two are equal when all their fields are; they cannot be hashed, as arrays cannot."""

    tokens: np.ndarray[Any, np.dtype[np.uint32]]
    """uint32 [tokens]."""
    loss_weights: np.ndarray[Any, np.dtype[np.float32]]
    """float32 [tokens]: how much each token counts as a target."""
    origin: Origin
    text: str | None = None
    """The raw text, where the dataset keeps it."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Document):
            return NotImplemented
        arrays = ((self.tokens, other.tokens), (self.loss_weights, other.loss_weights))
        same = all(np.array_equal(mine, theirs) for mine, theirs in arrays)
        return same and (self.origin, self.text) == (other.origin, other.text)

    def __repr__(self) -> str:
        """One line, however long the document."""
        trained = int(np.count_nonzero(self.loss_weights))
        text = "" if self.text is None else f", text of {len(self.text)} characters"
        return f"Document({self.origin}, {len(self.tokens)} tokens, {trained} with loss weight{text})"


def choose(index: Any, count: int) -> int | range:
    """The document, or the documents of a slice, that an index means among `count`.

    Raises:
        IndexError: There is no such document; iterating ends by it.
        ConfigError: It is neither a whole number nor a slice.
    """
    if isinstance(index, slice):
        return range(*index.indices(count))
    try:
        number = operator.index(index)
    except TypeError:
        raise ConfigError(f"documents have numbers: expected a whole number or a slice, got {index!r}") from None
    if not -count <= number < count:
        raise IndexError(f"document {number} of {count}")
    return number % count


class Corpus(Protocol):
    """Documents that rows can be made of: a prepared `Dataset`, or a foreign corpus read in place."""

    @property
    def name(self) -> str:
        """Short name, for messages."""

    @property
    def fingerprint(self) -> str:
        """Changes when the content does."""

    @property
    def table(self) -> DocumentTable:
        """Where the bytes lie."""

    @property
    def tokenizer(self) -> TokenizerInfo | None:
        """The tokenizer that made it, where that is known."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""

    @property
    def framed(self) -> tuple[bool, bool]:
        """Whether all documents begin with BOS, and whether all end with EOS, as far as is known."""

    def __len__(self) -> int: ...

    def __getitem__(self, document: int) -> Document: ...
