"""Both caches of keys and values: lengths and recurrent states of their sequences, and the new
tokens of some of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.media.prompts import PromptImages
from penstock.media.rows import RowMedia
from penstock.models.attention import AttentionLayer, LayerAttend
from penstock.models.recurrent.borders import Borders
from penstock.plan.inputs.torch_tensors import on_device, together_on_device

Step = Callable[[Tensor, Tensor, LayerAttend], Tensor]
"""Tokens and positions, int64 [B, 1] each, and the attention → logits [B, vocab]."""


class SequenceCache(Protocol):
    """The part of a cache that generation uses."""

    lengths: Tensor
    """int64 [sequences] on the CPU: number of stored tokens of each."""
    capacity: int
    """Maximum tokens of a sequence."""

    def clear(self, sequence: int) -> None:
        """Remove a sequence, so that another can take its place."""

    def truncate(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Make a sequence the first `length` tokens of another."""

    def kept(self, sequence: int, length: int) -> int:
        """How many of the first `length` tokens of a sequence can be kept, or copied, without the
        others.
        """

    def lack(self, growing: Mapping[int, int]) -> str:
        """Why there is no room for new tokens; empty: there is.

        Args:
            growing: Number of new tokens of each sequence that grows.
        """


class HeldSequences:
    """What a cache knows of its sequences besides keys and values.

    Attributes:
        lengths: int64 [sequences] on the CPU: number of stored tokens of each.
        capacity: Maximum tokens of a sequence.
        device: Where keys, values and states are.
        states: Of recurrent layers: inputs and state, [sequences, ...] each.
    """

    def __init__(
        self, sequences: int, capacity: int, device: torch.device, *, recurrent: bool
    ) -> None:
        self.lengths = torch.zeros(sequences, dtype=torch.int64)
        self.capacity, self.device = capacity, device
        self._recurrent = recurrent
        self.states: dict[int, tuple[Tensor, ...]] = {}

    def kept(self, sequence: int, length: int) -> int:
        """How many of the first `length` tokens of a sequence can be kept, or copied, without the
        others.
        """
        return length if not self._recurrent or length == int(self.lengths[sequence]) else 0

    def _require(self, sequence: int, length: int) -> None:
        if self.kept(sequence, length) != length:
            raise ConfigError(
                f"sequence {sequence} of the cache has recurrent states after "
                f"{int(self.lengths[sequence])} tokens, which cannot be cut back to {length}; "
                "read it again"
            )

    def clear(self, sequence: int) -> None:
        """Remove a sequence, so that another can take its place."""
        self.truncate(sequence, 0)

    def truncate(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence.

        Raises:
            ConfigError: It has fewer, or recurrent states after more.
        """
        if length:
            self._require(sequence, length)
        shorten(self.lengths, sequence, length)

    def _copy_states(self, source: int, target: int, length: int) -> None:
        """The part of `copy` that is not about keys and values.

        Raises:
            ConfigError: The other has fewer.
        """
        check_copy(self.lengths, source, length)
        self._require(source, length)
        for states in self.states.values():
            for state in states:
                state[target] = state[source]
        self.lengths[target] = length


class NewTokens(ABC):
    """One extension of a cache: which tokens are new, and the states of recurrent layers."""

    tokens: Tensor
    """int64 [B, n] on the device."""
    positions: Tensor
    """int64 [B, n]: position of each token in its sequence."""

    def __init__(
        self, cache: HeldSequences, sequences: Tensor, lengths: Tensor, width: int
    ) -> None:
        self._cache, self._sequences, self._lengths = cache, sequences, lengths
        self._width = width
        self._starts = cache.lengths[sequences]
        self._borders: Borders | None = None

    @abstractmethod
    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`LayerAttend`: store the new keys and values, and attend to all of the sequences."""

    @abstractmethod
    def step(self, function: Step) -> Tensor | None:
        """See `PagedGrowth.step`."""

    @abstractmethod
    def at_last(self, hidden: Tensor) -> Tensor:
        """[B, n, width] → [B, width]: those of each row's last new token."""

    @cached_property
    def _new(self) -> tuple[Tensor, Tensor]:
        """Row and column of each new token, on the device."""
        row, column = (torch.arange(self._width) < self._lengths[:, None]).nonzero(as_tuple=True)
        sent = together_on_device({"row": row, "column": column}, self._cache.device)
        return sent["row"], sent["column"]

    @cached_property
    def _held_at(self) -> Tensor:
        """The rows' sequences, on the device."""
        return on_device(self._sequences, self._cache.device)

    keeps = True

    @property
    def borders(self) -> Borders:
        """The new tokens of each row, as a document: this and the following are the `Carried` of
        recurrent blocks.
        """
        if self._borders is None:
            self._borders = Borders([0, *self._lengths.cumsum(0).tolist()], self._cache.device)
        return self._borders

    def row(self, x: Tensor) -> Tensor:
        """[B, n, width] → [T, width], without padding."""
        return x[self._new]

    def back(self, row: Tensor, like: Tensor) -> Tensor:
        """[T, width] → [B, n, width], with zeros in the padding."""
        return torch.zeros_like(like).index_put(self._new, row)

    def state(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """States of the rows' sequences; zeros for those that begin here."""
        states = self._cache.states.get(layer)
        if states is None:
            return None
        begun = on_device(self._starts > 0, self._cache.device)
        inputs, state = (held[self._held_at] for held in states)
        return inputs * begun[:, None, None], state * begun[:, None, None, None]

    def keep(self, layer: int, state: tuple[Tensor, Tensor]) -> None:
        """Store the states of the rows' sequences."""
        held = self._cache.states.get(layer)
        if held is None:
            count = len(self._cache.lengths)
            held = tuple(one.new_zeros(count, *one.shape[1:]) for one in state)
            self._cache.states[layer] = held
        for stored, new in zip(held, state, strict=True):
            stored[self._held_at] = new

    def parts(self, images: Sequence[PromptImages | None]) -> list[RowMedia | None]:
        """The images among each row's new tokens; None: its prompt has none."""
        rows = zip(images, self._starts.tolist(), self._lengths.tolist(), strict=True)
        return [
            None if one is None else one.part(start, start + count) for one, start, count in rows
        ]

    def done(self) -> None:
        """Count the new tokens, after the last layer."""
        self._cache.lengths[self._sequences] += self._lengths


def check_copy(held: Tensor, source: int, length: int) -> None:
    """Refuse to copy more tokens than a sequence has; `held`, int64 [sequences].

    Raises:
        ConfigError: It has fewer.
    """
    if not 0 <= length <= int(held[source]):
        raise ConfigError(
            f"sequence {source} of the cache has {int(held[source])} tokens, cannot copy the "
            f"first {length}"
        )


def shorten(held: Tensor, sequence: int, length: int) -> None:
    """Reduce the length of one sequence in `held`, int64 [sequences].

    Raises:
        ConfigError: It has fewer.
    """
    before = int(held[sequence])
    if not 0 <= length <= before:
        raise ConfigError(
            f"sequence {sequence} of the cache has {before} tokens, cannot keep the first {length}"
        )
    held[sequence] = length


def check_growth(
    held: Tensor, capacity: int, tokens: Tensor, lengths: Tensor, sequences: Tensor | None
) -> Tensor:
    """Check the arguments of `Cache.growth`; returns the sequence of each row, int64 [B] on the
    CPU.

    Args:
        held: int64 [sequences]: stored tokens of each.
        capacity: Maximum tokens of a sequence.

    Raises:
        ConfigError: Shapes do not fit, or a sequence would exceed the capacity.
    """
    lengths = lengths.cpu()
    chosen = torch.arange(len(held)) if sequences is None else sequences.cpu()
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1] or chosen.shape != lengths.shape:
        raise ConfigError(
            f"extend needs tokens [B, n], lengths [B] and one sequence per row; got tokens "
            f"{list(tokens.shape)}, lengths {list(lengths.shape)} and {len(chosen)} sequences"
        )
    if not bool(((lengths >= 0) & (lengths <= tokens.shape[1])).all()):
        raise ConfigError(
            f"lengths must be 0 to {tokens.shape[1]}, the width of tokens; got {lengths.tolist()}"
        )
    ends = held[chosen] + lengths
    if int(ends.max()) > capacity:
        worst = int(ends.argmax())
        raise ConfigError(
            f"sequence {int(chosen[worst])} would have {int(ends[worst])} tokens, but the "
            f"capacity of the cache is {capacity}; make it larger, or shorten the prompt"
        )
    return chosen
