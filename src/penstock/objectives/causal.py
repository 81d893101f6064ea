"""Next-token prediction: a document is its own input, and each token is the target of the one before it."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from penstock.objectives.objective import Int64, Keys, Written


@final
@dataclass(frozen=True, slots=True)
class Causal:
    """Predict the token at distance 1, 2, … (multi-token prediction) inside the document, under causal attention."""

    name: str = "causal"

    def document_limit(self, sequence_length: int) -> int:
        """A document takes as many slots as it has tokens."""
        return sequence_length

    def measure(self, lengths: Int64, keys: Keys) -> Int64:
        """The lengths themselves; nothing is drawn."""
        return lengths

    def write(
        self,
        tokens: np.ndarray[Any, np.dtype[np.int32]],
        weights: np.ndarray[Any, np.dtype[np.float32]] | None,
        key: int,
    ) -> Written:
        """The document as it is."""
        return Written(tokens=tokens, weights=weights)
