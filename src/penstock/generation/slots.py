"""Places in the cache: which are free, and which tokens each still has from the sequence before.

A new sequence takes the free slot whose tokens begin as its prompt does, and only the rest of the prompt is computed:
so a chat's next reply costs its new turns alone, and a prompt that is asked again costs one token.
"""

from collections.abc import Sequence
from typing import Protocol, final


class Truncated(Protocol):
    """What of a cache is used here."""

    def truncate(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence."""


@final
class Slots:
    """The slots of one cache."""

    def __init__(self, cache: Truncated, count: int) -> None:
        self._cache = cache
        self._free: dict[int, list[int]] = {slot: [] for slot in range(count)}

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self, prompt: Sequence[int]) -> tuple[int, int]:
        """The best free slot, and how many of the prompt's tokens it has: at most all but the last."""
        same = {slot: _same(tokens, prompt) for slot, tokens in self._free.items()}
        # Where none fits better, the one that holds least, so that long prompts stay.
        slot = max(self._free, key=lambda slot: (same[slot], -len(self._free[slot]), -slot))
        del self._free[slot]
        self._cache.truncate(slot, same[slot])
        return slot, same[slot]

    def give_back(self, slot: int, tokens: list[int]) -> None:
        """A slot is free; the cache has these tokens in it."""
        self._free[slot] = tokens


def _same(tokens: Sequence[int], prompt: Sequence[int]) -> int:
    most = min(len(tokens), len(prompt) - 1)
    return next((at for at in range(most) if tokens[at] != prompt[at]), most)
