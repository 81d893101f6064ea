"""What an objective is: it turns a document into tokens with targets, and says beforehand how many.

The plan sees only lengths, so an objective answers from (length, key) alone: `measure`. It must then write exactly
that many tokens, or it is a bug. Documents are split before they are measured.
"""

from typing import Any, Protocol

import numpy as np


class Objective(Protocol):
    """The protocol of objectives."""

    @property
    def name(self) -> str:
        """A short name, shown in plans and kept in states."""

    def document_limit(self, sequence_length: int) -> int:
        """The longest document, in tokens, whose measured length still fits a row of `sequence_length`."""

    def measure(
        self, lengths: np.ndarray[Any, np.dtype[np.int64]], keys: np.ndarray[Any, np.dtype[np.uint64]]
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Row slots that each document takes, int64 [documents], from its length and its key alone."""
