"""The cache of sequences whose keys alone would be wrong: their tokens, which are read again.

`TextCache` stores tokens, for models that need more than keys and values. Each new token then reads
its whole sequence again, alone: exact for every causal model, but slow. If keys are valid up to
some length (`keys`), they are used up to that length; the tokens remain the reference.
"""

import copy
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from penstock.models.cache import Cache, check_copy, check_growth, shorten
from penstock.models.paged_cache import PagedCache


@final
@dataclass(slots=True)
class ReadText:
    """A cache of transformers after a number of tokens of a sequence."""

    count: int
    cache: dict[str, Any]
    kept: bool = False
    """Whether it is a copy that stays at this place: the end of a prompt, before its last token."""

    def copy(self, *, kept: bool = False) -> "ReadText":
        """One that grows on its own."""
        return ReadText(self.count, copy.deepcopy(self.cache), kept)


@final
class TextCache:
    """Tokens that `HuggingFaceModel.extend` keeps between calls if a `Cache` alone would be wrong.

    Attributes:
        lengths: int64 [sequences] on the CPU: number of stored tokens of each.
        capacity: Maximum tokens of a sequence.
        keys: Keys and values of sequences up to its own capacity; None: none. It may lag behind,
            never be ahead.
        states: Caches of transformers by sequence, by rising count of tokens; they may lag behind
            too.
    """

    def __init__(
        self,
        sequences: int,
        capacity: int,
        device: torch.device,
        keys: Cache | PagedCache | None = None,
    ) -> None:
        shape = (sequences, capacity)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(sequences, dtype=torch.int64)
        self.capacity, self.keys = capacity, keys
        self.states: dict[int, list[ReadText]] = {}

    def clear(self, sequence: int) -> None:
        """Remove a sequence, so that another can take its place."""
        self.truncate(sequence, 0)

    def truncate(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence.

        Raises:
            ConfigError: It has fewer.
        """
        shorten(self.lengths, sequence, length)
        if self.keys is not None:
            self.keys.truncate(sequence, min(length, int(self.keys.lengths[sequence])))
        self.states[sequence] = [
            state for state in self.states.get(sequence, []) if state.count <= length
        ]

    def copy(self, source: int, target: int, length: int) -> None:
        """Make a sequence the first `length` tokens of another.

        Raises:
            ConfigError: The other has fewer.
        """
        check_copy(self.lengths, source, length)
        self._tokens[target, :length] = self._tokens[source, :length]
        self.lengths[target] = length
        if self.keys is not None:
            self.keys.copy(source, target, min(length, int(self.keys.lengths[source])))
        usable = [state for state in self.states.get(source, []) if state.count <= length]
        self.states[target] = [state.copy(kept=state.kept) for state in usable[-1:]]

    def kept(self, sequence: int, length: int) -> int:
        """All: the tokens are the reference."""
        return length

    def append(self, tokens: Tensor, lengths: Tensor, sequences: Tensor | None) -> list[int]:
        """Append new tokens, with the arguments of `Cache.growth`; returns the sequence of each
        row.

        Raises:
            ConfigError: Shapes do not fit, or a sequence would exceed the capacity.
        """
        chosen = check_growth(self.lengths, self.capacity, tokens, lengths, sequences).tolist()
        for row, (sequence, count) in enumerate(zip(chosen, lengths.tolist(), strict=True)):
            begin = int(self.lengths[sequence])
            self._tokens[sequence, begin : begin + count] = tokens[row, :count]
            self.lengths[sequence] += count
        return chosen

    def text(self, sequence: int, begin: int = 0) -> Tensor:
        """int64 [n]: the tokens of a sequence from `begin` on."""
        return self._tokens[sequence, begin : int(self.lengths[sequence])]
