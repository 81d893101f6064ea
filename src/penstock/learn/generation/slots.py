"""Which slot of a cache a new sequence gets, and what slots still hold from earlier sequences."""

from typing import Protocol, final

from penstock.learn.generation.sequence import Sequence


class Truncated(Protocol):
    """The part of a cache that `Slots` uses."""

    def truncate(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence."""

    def kept(self, sequence: int, length: int) -> int:
        """How many of the first `length` tokens of a sequence can be kept, or copied, without the
        others.
        """


@final
class Slots:
    """The free slots of a cache, and the tokens that each still holds from its last sequence."""

    def __init__(self, cache: Truncated, count: int) -> None:
        self._cache = cache
        self._free: dict[int, list[int]] = {slot: [] for slot in range(count)}

    def __len__(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self, sequence: Sequence) -> None:
        """Give a sequence the best free slot, and the tokens that this holds already: at most all
        but the last.
        """
        common = {
            slot: self._cache.kept(slot, sequence.common(keys)) for slot, keys in self._free.items()
        }
        # Of equally good slots, the one with the fewest tokens, so that long prompts stay.
        slot = max(self._free, key=lambda slot: (common[slot], -len(self._free[slot]), -slot))
        del self._free[slot]
        self._cache.truncate(slot, common[slot])
        sequence.slot, sequence.held = slot, common[slot]

    def forget(self) -> bool:
        """Remove what a free slot holds, the longest; returns whether there was any."""
        held = [slot for slot, keys in self._free.items() if keys]
        if held:
            slot = max(held, key=lambda slot: len(self._free[slot]))
            self._cache.truncate(slot, 0)
            self._free[slot] = []
        return bool(held)

    def give_back(self, sequence: Sequence) -> None:
        """Make the slot of a sequence free; the cache still holds its tokens."""
        self._free[sequence.slot] = sequence.keys[: sequence.held]
