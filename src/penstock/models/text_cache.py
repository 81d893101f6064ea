"""Sequences that are kept as tokens, for models of which keys and values do not hold all that there is to keep.

Each new token then reads its whole sequence again, alone: exact for every causal model, and slow. Where keys are right
up to some length (`keys`), they are used up to it; the tokens are the truth, and keys only what is remembered of it.
"""

from typing import final

import torch
from torch import Tensor

from penstock.models.cache import Cache, check_growth, shorten


@final
class TextCache:
    """What `HuggingFaceModel.extend` keeps between calls where a `Cache` alone would be wrong.

    Attributes:
        lengths: int64 [sequences] on the CPU: tokens held of each.
        capacity: Most tokens a sequence can have.
        keys: Of sequences up to its own capacity; None: of none. It may be behind, never ahead.
    """

    def __init__(self, sequences: int, capacity: int, device: torch.device, keys: Cache | None = None) -> None:
        self._tokens = torch.zeros((sequences, capacity), dtype=torch.int64, device=device)
        self.lengths = torch.zeros(sequences, dtype=torch.int64)
        self.capacity, self.keys = capacity, keys

    def clear(self, sequence: int) -> None:
        """Forget a sequence, so that another can begin in its place."""
        self.truncate(sequence, 0)

    def truncate(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence.

        Raises:
            ConfigError: It has fewer.
        """
        shorten(self.lengths, sequence, length)
        if self.keys is not None:
            self.keys.truncate(sequence, min(length, int(self.keys.lengths[sequence])))

    def append(self, tokens: Tensor, lengths: Tensor, sequences: Tensor | None) -> list[int]:
        """Keep new tokens at the ends of sequences; the sequence of each row. The arguments of `Cache.growth`.

        Raises:
            ConfigError: Shapes do not fit, or a sequence would outgrow the capacity.
        """
        chosen = check_growth(self.lengths, self.capacity, tokens, lengths, sequences).tolist()
        for row, (sequence, count) in enumerate(zip(chosen, lengths.tolist(), strict=True)):
            begin = int(self.lengths[sequence])
            self._tokens[sequence, begin : begin + count] = tokens[row, :count]
            self.lengths[sequence] += count
        return chosen

    def text(self, sequence: int, begin: int = 0) -> Tensor:
        """int64 [n]: a sequence's tokens from `begin` on."""
        return self._tokens[sequence, begin : int(self.lengths[sequence])]
