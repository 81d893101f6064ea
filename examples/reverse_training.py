"""An objective of your own: some documents are read from back to front, behind a token that says
so.

After "Reverse Training to Nurse the Reversal Curse" (Golovneva et al. 2024, arXiv:2403.13799), by
tokens. `python examples/reverse_training.py` tries the contract; use it as `ps.Source("data/web",
objective=ReverseTraining(marker=128002))`.
"""

from dataclasses import dataclass

import numpy as np

from penstock.plan.objectives import Written, check_objective


@dataclass(frozen=True)
class ReverseTraining:
    """One document in `every` is reversed; its marker is read and not predicted."""

    marker: int
    every: int = 2
    name: str = "reverse"

    def document_limit(self, sequence_length):
        """Of the longest document a row keeps one slot for the marker."""
        return sequence_length - 1

    def measure(self, lengths, keys):
        """One slot more where a document is reversed."""
        return lengths + self.is_reversed(keys)

    def write(self, tokens, weights, key):
        """The document as it is, or the marker and the document from back to front, each token with
        its weight.
        """
        if not self.is_reversed(np.uint64(key)):
            return Written(tokens=tokens, weights=weights)
        counts = np.ones(len(tokens)) if weights is None else weights[::-1]
        return Written(
            tokens=np.append(self.marker, tokens[::-1]),
            weights=np.append(0, counts).astype(np.float32),
        )

    def is_reversed(self, keys):
        """Everything random comes from the key, which is another in each epoch."""
        return keys % np.uint64(self.every) == 0


if __name__ == "__main__":
    check_objective(ReverseTraining(marker=999))
    print("the contract holds")
