"""Keys and values of sequences that are being written, in slots of a fixed capacity.

Keys come in already rotated and are never modified: a sequence grows at its end, and rotary positions count from its
beginning, so nothing that was stored ever has to move. `clear` frees a sequence for another to take its place.
Memory: 2 × layers × sequences × capacity × kv_heads × head_width numbers, taken at once.
"""

from collections.abc import Callable
from typing import Protocol, final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.errors import ConfigError

LayerAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, rotated q [..., heads, dim], rotated k [..., kv_heads, dim], v as k) → [..., heads, dim]."""


class SequenceCache(Protocol):
    """What those who write sequences know of a cache."""

    lengths: Tensor
    """int64 [sequences] on the CPU: tokens held of each."""
    capacity: int
    """Most tokens a sequence can have."""

    def clear(self, sequence: int) -> None:
        """Forget a sequence, so that another can begin in its place."""

    def truncate(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence."""


@final
class Cache:
    """What `extend` keeps between calls.

    Attributes:
        lengths: int64 [sequences] on the CPU: tokens held of each.
        capacity: Most tokens a sequence can have.
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
        """Args: as the attributes and shapes say; `window`: tokens that a token sees, itself among them."""
        shape = (layers, sequences, capacity, kv_heads, head_width)
        # Zeros, because weights of 0 times what uninitialised memory may hold are not 0.
        self._keys = torch.zeros(shape, device=device, dtype=dtype)
        self._values = torch.zeros(shape, device=device, dtype=dtype)
        self._window = window
        self.lengths = torch.zeros(sequences, dtype=torch.int64)
        self.capacity = capacity

    def clear(self, sequence: int) -> None:
        """Forget a sequence, so that another can begin in its place."""
        self.truncate(sequence, 0)

    def truncate(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence.

        Raises:
            ConfigError: It has fewer.
        """
        shorten(self.lengths, sequence, length)

    def growth(self, tokens: Tensor, lengths: Tensor, sequences: Tensor | None) -> "Growth":
        """Make ready for new tokens at the ends of sequences.

        Args:
            tokens: int64 [B, n], right-padded.
            lengths: int64 [B]: how many of each row are tokens, from 0 to n.
            sequences: int64 [B]: which sequences of the cache the rows are, none twice; None: all, in order.

        Raises:
            ConfigError: Shapes do not fit, or a sequence would outgrow the capacity.
        """
        chosen = check_growth(self.lengths, self.capacity, tokens, lengths, sequences)
        return Growth(self, chosen, lengths.cpu(), tokens.shape[1], whole=sequences is None)


def shorten(held: Tensor, sequence: int, length: int) -> None:
    """Count only the first `length` tokens of a sequence; `held`: int64 [sequences].

    Raises:
        ConfigError: It has fewer.
    """
    before = int(held[sequence])
    if not 0 <= length <= before:
        raise ConfigError(f"sequence {sequence} of the cache has {before} tokens, cannot keep the first {length}")
    held[sequence] = length


def check_growth(held: Tensor, capacity: int, tokens: Tensor, lengths: Tensor, sequences: Tensor | None) -> Tensor:
    """The sequences [B] that the rows of tokens [B, n] are of, on the CPU; the arguments of `Cache.growth`.

    Args:
        held: int64 [sequences]: tokens of each so far.
        capacity: Most tokens a sequence can have.

    Raises:
        ConfigError: Shapes do not fit, or a sequence would outgrow the capacity.
    """
    lengths = lengths.cpu()
    chosen = torch.arange(len(held)) if sequences is None else sequences.cpu()
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1] or chosen.shape != lengths.shape:
        raise ConfigError(
            f"extend needs tokens [B, n], lengths [B] and as many sequences as rows; got tokens "
            f"{list(tokens.shape)}, lengths {list(lengths.shape)} and {len(chosen)} sequences"
        )
    if not bool(((lengths >= 0) & (lengths <= tokens.shape[1])).all()):
        raise ConfigError(f"lengths must be 0 to {tokens.shape[1]}, the width of tokens; got {lengths.tolist()}")
    ends = held[chosen] + lengths
    if int(ends.max()) > capacity:
        worst = int(ends.argmax())
        raise ConfigError(
            f"sequence {int(chosen[worst])} would have {int(ends[worst])} tokens, and the cache was made for "
            f"{capacity}; make it larger, or shorten the prompt"
        )
    return chosen


@final
class Growth:
    """One growth of a cache: where new keys go and what new tokens see. The same for all layers."""

    def __init__(self, cache: Cache, sequences: Tensor, lengths: Tensor, width: int, *, whole: bool) -> None:
        """Args: `whole`: the sequences are all of the cache, in order, so that keys are read without a copy."""
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
        # A token of padding may see nothing in the window; it sees the first key then, as softmax needs one.
        seen[..., 0] |= ~seen.any(-1)
        self._seen = seen[:, None].to(device)
        # What is padding has the place of the last token: tables of positions end at the capacity, and some rotary
        # frequencies depend on the highest place of the batch.
        self.positions = places.minimum((starts + lengths - 1).clamp(min=0)[:, None]).to(device)
        """int64 [B, n]: of each token in its sequence."""
        self.last = (torch.arange(len(sequences), device=device), (lengths - 1).clamp(min=0).to(device))
        """Where each row's last token is, as an index of [B, n]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new keys and values, and attend to all that the sequences have (`LayerAttend`)."""
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
