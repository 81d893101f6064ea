"""What a dataset gives: documents with their origin; and what every kind of dataset offers."""

from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np

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
@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document of a dataset."""

    tokens: np.ndarray[Any, np.dtype[np.uint32]]
    """uint32 [tokens]."""
    loss_weights: np.ndarray[Any, np.dtype[np.float32]]
    """float32 [tokens]: how much each token counts as a target."""
    origin: Origin
    text: str | None = None
    """The raw text, where the dataset keeps it."""


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

    def __len__(self) -> int: ...

    def __getitem__(self, document: int) -> Document: ...
