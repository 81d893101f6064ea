"""Caches for sequences during generation: their keys and values in slots of a fixed capacity, or their tokens.

`Cache` stores rotated keys and never modifies them: a sequence grows at its end, and rotary positions count from its
beginning, so nothing ever moves. `clear` frees a sequence's place for another. Memory: 2 × layers × sequences ×
capacity × kv_heads × head_width numbers, allocated at once.

`TextCache` stores tokens, for models that need more than keys and values. Each new token then reads its whole sequence
again, alone: exact for every causal model, but slow. If keys are valid up to some length (`keys`), they are used up to
that length; the tokens remain the reference.
"""

from collections.abc import Callable
from typing import Protocol, final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.core.errors import ConfigError

LayerAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, rotated q [..., heads, dim], rotated k [..., kv_heads, dim], v as k) → [..., heads, dim]."""


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


@final
class Cache:
    """Keys and values that `extend` keeps between calls.

    Attributes:
        lengths: int64 [sequences] on the CPU: number of stored tokens of each.
        capacity: Maximum tokens of a sequence.
    """

    def __init__(
        self,
        *,
        layers: int,
        sequences: int,
        capacity: int,
        kv_heads: int,
        head_width: int,
        device: torch.device,
        dtype: torch.dtype,
        window: int | None = None,
    ) -> None:
        """Args: `window`: maximum tokens that a token sees, including itself; the others are sizes of the arrays."""
        shape = (layers, sequences, capacity, kv_heads, head_width)
        # Zeros: a weight of 0 times uninitialised memory (NaN) would not be 0.
        self._keys = torch.zeros(shape, device=device, dtype=dtype)
        self._values = torch.zeros(shape, device=device, dtype=dtype)
        self._window = window
        self.lengths = torch.zeros(sequences, dtype=torch.int64)
        self.capacity = capacity

    def clear(self, sequence: int) -> None:
        """Remove a sequence, so that another can take its place."""
        self.truncate(sequence, 0)

    def truncate(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence.

        Raises:
            ConfigError: It has fewer.
        """
        shorten(self.lengths, sequence, length)

    def growth(self, tokens: Tensor, lengths: Tensor, sequences: Tensor | None) -> "Growth":
        """Prepare for new tokens at the ends of sequences.

        Args:
            tokens: int64 [B, n], right-padded.
            lengths: int64 [B]: number of tokens in each row, from 0 to n.
            sequences: int64 [B]: the cache's sequence of each row, none twice; None: all, in order.

        Raises:
            ConfigError: Shapes do not fit, or a sequence would exceed the capacity.
        """
        chosen = check_growth(self.lengths, self.capacity, tokens, lengths, sequences)
        return Growth(self, chosen, lengths.cpu(), tokens.shape[1], whole=sequences is None)


def shorten(held: Tensor, sequence: int, length: int) -> None:
    """Reduce the length of one sequence in `held`, int64 [sequences].

    Raises:
        ConfigError: It has fewer.
    """
    before = int(held[sequence])
    if not 0 <= length <= before:
        raise ConfigError(f"sequence {sequence} of the cache has {before} tokens, cannot keep the first {length}")
    held[sequence] = length


def check_growth(held: Tensor, capacity: int, tokens: Tensor, lengths: Tensor, sequences: Tensor | None) -> Tensor:
    """Check the arguments of `Cache.growth`; returns the sequence of each row, int64 [B] on the CPU.

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
        raise ConfigError(f"lengths must be 0 to {tokens.shape[1]}, the width of tokens; got {lengths.tolist()}")
    ends = held[chosen] + lengths
    if int(ends.max()) > capacity:
        worst = int(ends.argmax())
        raise ConfigError(
            f"sequence {int(chosen[worst])} would have {int(ends[worst])} tokens, but the capacity of the cache is "
            f"{capacity}; make it larger, or shorten the prompt"
        )
    return chosen


@final
class Growth:
    """One extension of a cache: where new keys go, and what new tokens see; the same for all layers."""

    def __init__(self, cache: Cache, sequences: Tensor, lengths: Tensor, width: int, *, whole: bool) -> None:
        """Args: `whole`: the sequences are all those of the cache, in order, so keys are read without a copy."""
        device = cache._keys.device
        self._cache, self._sequences, self._lengths, self._whole = cache, sequences, lengths, whole
        starts = cache.lengths[sequences]
        offsets = torch.arange(width)
        places = starts[:, None] + offsets
        row, column = (offsets < lengths[:, None]).nonzero(as_tuple=True)
        self._new = (row.to(device), column.to(device))
        self._into = (sequences[row].to(device), places[row, column].to(device))
        self._read = sequences.to(device)
        self._longest = max(int((starts + lengths).max()), 1)
        seen = torch.arange(self._longest) <= places[..., None]
        if cache._window is not None:
            seen &= torch.arange(self._longest) > places[..., None] - cache._window
        # A padding token may see nothing within the window; it sees the first key then, because softmax needs one.
        seen[..., 0] |= ~seen.any(-1)
        self._seen = seen[:, None].to(device)
        # Padding has the position of the last token: tables of positions end at the capacity, and some rotary
        # frequencies depend on the highest position of the batch.
        self.positions = places.minimum((starts + lengths - 1).clamp(min=0)[:, None]).to(device)
        """int64 [B, n]: position of each token in its sequence."""
        self.last = (torch.arange(len(sequences), device=device), (lengths - 1).clamp(min=0).to(device))
        """Index of each row's last token in [B, n]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`LayerAttend`: store the new keys and values, and attend to all of the sequences."""
        keys, values = self._cache._keys[layer], self._cache._values[layer]
        keys[self._into], values[self._into] = k[self._new], v[self._new]
        chosen = slice(None) if self._whole else self._read
        seen_keys, seen_values = (x[:, : self._longest][chosen].transpose(1, 2) for x in (keys, values))
        grouped = q.shape[2] != k.shape[2]
        out = scaled_dot_product_attention(
            q.transpose(1, 2), seen_keys, seen_values, attn_mask=self._seen, enable_gqa=grouped
        )
        return out.transpose(1, 2)

    def done(self) -> None:
        """Count the new tokens, after the last layer."""
        self._cache.lengths[self._sequences] += self._lengths


@final
class TextCache:
    """Tokens that `HuggingFaceModel.extend` keeps between calls if a `Cache` alone would be wrong.

    Attributes:
        lengths: int64 [sequences] on the CPU: number of stored tokens of each.
        capacity: Maximum tokens of a sequence.
        keys: Keys and values of sequences up to its own capacity; None: none. It may lag behind, never be ahead.
    """

    def __init__(self, sequences: int, capacity: int, device: torch.device, keys: Cache | None = None) -> None:
        self._tokens = torch.zeros((sequences, capacity), dtype=torch.int64, device=device)
        self.lengths = torch.zeros(sequences, dtype=torch.int64)
        self.capacity, self.keys = capacity, keys

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

    def append(self, tokens: Tensor, lengths: Tensor, sequences: Tensor | None) -> list[int]:
        """Append new tokens, with the arguments of `Cache.growth`; returns the sequence of each row.

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
