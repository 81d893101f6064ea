"""The cache of sequences during generation: their keys and values in slots of a fixed capacity.

`Cache` stores rotated keys and never modifies them: a sequence grows at its end, and rotary
positions count from its beginning, so nothing ever moves. `clear` frees a sequence's place for
another; `copy` gives one sequence the beginning of another. Memory: 2 × layers × sequences ×
capacity × kv_heads × head_width numbers at most. On the CPU the system provides a page when it is
first written, so memory follows what was stored; on a GPU all sequences have room for the longest
so far, doubled when it is full.

The cost of a step follows the tokens attended: sequences in adjacent slots share a call of the
attention only where that costs less than a call for each.
"""

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.models.attention import AttentionLayer
from penstock.models.attention.backends import flash, plain_heads
from penstock.models.attention.kernels import sdpa
from penstock.models.attention.sinks import add_sinks
from penstock.models.attention.softcap import capped_attention
from penstock.models.growth import Growth, States

FIRST_ROOM = 256
"""GPU: tokens for which each sequence has room at first."""
CALL_BYTES_CPU, CALL_BYTES_GPU = 200_000, 30_000_000
"""Keys and values that are read in the time that one more call of the attention takes: about 15 µs,
at 13 GB/s on a core, at 2 TB/s on a GPU (not measured).
"""
Past = list[tuple[int, int, int]]
"""Of each row: its sequence, the number of its stored tokens, the number of its new tokens."""


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
        windows: Sequence[int | None] = (),
        softcap: float | None = None,
        recurrent: bool = False,
    ) -> None:
        """An empty cache.

        Args:
            layers: Layers with attention.
            sequences: Sequences at a time.
            capacity: Maximum tokens of a sequence.
            kv_heads: Heads of keys and values.
            head_width: Numbers of a head.
            device: Where it is kept.
            dtype: Of keys and values.
            windows: For each layer, the maximum tokens that a token sees, including itself, or
                None; empty: no limits.
            softcap: Scores are kept within ± this number; None: they are as they come.
            recurrent: Whether other layers keep states, which know a sequence only at its full
                length.
        """
        self._recurrent, self._softcap = recurrent, softcap
        self._states: States = {}
        # Each head's keys lie side by side: attention reads them a third faster than token by
        # token.
        self._shape = (layers, sequences, kv_heads, head_width)
        self._device, self._dtype = device, dtype
        self._windows = tuple(windows) or (None,) * layers
        self.lengths = torch.zeros(sequences, dtype=torch.int64)
        self.capacity = capacity
        room = capacity if device.type == "cpu" else min(capacity, FIRST_ROOM)
        self._keys, self._values = self._new(room), self._new(room)
        token_bytes = 2 * kv_heads * head_width * dtype.itemsize
        call_bytes = CALL_BYTES_CPU if device.type == "cpu" else CALL_BYTES_GPU
        self._slack = call_bytes // token_bytes

    def _new(self, room: int) -> Tensor:
        """Zeros [layers, sequences, kv_heads, room, head_width]: 0 times uninitialised memory (NaN)
        would not be 0.
        """
        layers, sequences, kv_heads, head_width = self._shape
        shape = (max(layers, 1), sequences, kv_heads, room, head_width)
        if self._device.type != "cpu":
            return torch.zeros(shape, device=self._device, dtype=self._dtype)
        return torch.frombuffer(
            _zeros_on_demand(math.prod(shape) * self._dtype.itemsize), dtype=self._dtype
        ).view(shape)

    def reserve(self, longest: int) -> None:
        """Make room for sequences of up to `longest` tokens."""
        room = self._keys.shape[3]
        if longest <= room:
            return
        wider = min(self.capacity, max(2 * room, longest))
        for name in ("_keys", "_values"):
            held, new = getattr(self, name), self._new(wider)
            new[:, :, :, :room] = held
            setattr(self, name, new)

    def copy(self, source: int, target: int, length: int) -> None:
        """Make a sequence the first `length` tokens of another.

        Raises:
            ConfigError: The other has fewer.
        """
        check_copy(self.lengths, source, length)
        self._require(source, length)
        for held in (self._keys, self._values):
            held[:, target, :, :length] = held[:, source, :, :length]
        for states in self._states.values():
            for state in states:
                state[target] = state[source]
        self.lengths[target] = length

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

    def growth(self, tokens: Tensor, lengths: Tensor, sequences: Tensor | None) -> "SlotGrowth":
        """Prepare for new tokens at the ends of sequences.

        Args:
            tokens: int64 [B, n], right-padded.
            lengths: int64 [B]: number of tokens in each row, from 0 to n.
            sequences: int64 [B]: the cache's sequence of each row, none twice; None: all, in order.

        Raises:
            ConfigError: Shapes do not fit, or a sequence would exceed the capacity.
        """
        chosen = check_growth(self.lengths, self.capacity, tokens, lengths, sequences)
        self.reserve(int((self.lengths[chosen] + lengths.cpu()).max()))
        return SlotGrowth(self, chosen, lengths.cpu(), tokens.shape[1])


def _zeros_on_demand(size_bytes: int) -> mmap.mmap:
    """Zeros that the system provides page by page, when they are first used; torch.zeros would
    write all at once.

    Raises:
        ConfigError: The system does not promise as much memory.
    """
    # Not shared with processes that are forked, which is the default.
    private = (
        {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    )
    try:
        empty = mmap.mmap(-1, size_bytes, **private)
    except OSError as error:
        raise ConfigError(
            f"the cache of keys and values could need {size_bytes / 1e9:,.1f} GB twice, which "
            f"the system does not provide: {error.strerror}; lower the context length, or the "
            "number of sequences at a time"
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # A huge page holds the places of several heads: one token in each would take all of the
        # memory.
        empty.madvise(mmap.MADV_NOHUGEPAGE)
    return empty


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


@final
@dataclass(frozen=True, slots=True)
class Call:
    """One call of the attention: some rows of the new tokens, and the keys that they see."""

    rows: slice
    """Rows of the new tokens."""
    sequences: slice
    """The cache's sequences of these rows, in adjacent slots."""
    keys: slice
    """Places of the keys."""
    queries: slice
    """Of the new tokens of a row; the others are padding."""
    causal: bool
    mask: Tensor | None
    """bool [rows, 1, queries, keys]: which keys are seen; None: all, or up to each query's own
    (`causal`).
    """


@final
class SlotGrowth(Growth):
    """An extension of a `Cache`."""

    def __init__(self, cache: Cache, sequences: Tensor, lengths: Tensor, width: int) -> None:
        starts, counts = cache.lengths[sequences].numpy(), lengths.numpy()
        owners = np.repeat(sequences.numpy(), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        places = np.repeat(starts, counts) + np.arange(len(owners)) - first
        device = cache._device
        more = (owners, places)
        super().__init__(cache.lengths, cache._states, sequences, lengths, width, device, more)
        self._cache = cache
        past = list(zip(sequences.tolist(), starts.tolist(), counts.tolist(), strict=True))
        calls = _single_tokens if width == 1 else _texts
        self._calls = {window: list(calls(cache, past, window)) for window in set(cache._windows)}

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`LayerAttend`: store the new keys and values, and attend to all of the sequences."""
        keys, values = self._cache._keys[layer.place], self._cache._values[layer.place]
        sequences, places = self.sent
        keys[sequences, :, places], values[sequences, :, places] = k[self._new], v[self._new]
        out = torch.zeros_like(q)
        for call in self._calls[self._cache._windows[layer.place]]:
            seen, held = (x[call.sequences, :, call.keys] for x in (keys, values))
            queries = q[call.rows, call.queries].transpose(1, 2)
            found = attend_call(
                queries, seen, held, call.mask, call.causal, self._cache._softcap, layer.sinks
            )
            out[call.rows, call.queries] = found.transpose(1, 2)
        return out


def attend_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One call of the attention: q [rows, heads, n, dim], k and v [rows, kv_heads, keys, dim] → as
    q.
    """
    if softcap is None and sinks is None:
        return sdpa(q, k, v, mask=mask, causal=causal)
    if softcap is None and sinks is not None and q.device.type == "cpu":
        added = None
        if mask is not None:
            added = q.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
        q, k, v = (plain_heads(x) for x in (q, k, v))
        found, sums = flash(q, k, v, 0.0, causal, attn_mask=added)
        return add_sinks(found.transpose(1, 2), sums, sinks)[0].transpose(1, 2)
    seen = mask
    if causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return capped_attention(q, k, v, seen, softcap, sinks)


def _texts(cache: Cache, past: Past, window: int | None) -> Iterator[Call]:
    """A call for each row: its new tokens see all of their own past."""
    for row, (sequence, start, count) in enumerate(past):
        if not count:
            continue
        first = 0 if window is None else max(0, start - window + 1)
        end, mask = start + count, None
        plain = start == 0 and (window is None or count <= window)
        if not plain:
            mask = seen_mask(first, start, end, window, cache._device)
        yield Call(
            slice(row, row + 1),
            slice(sequence, sequence + 1),
            slice(first, end),
            slice(0, count),
            causal=plain,
            mask=mask,
        )


def seen_mask(first: int, start: int, end: int, window: int | None, device: torch.device) -> Tensor:
    """bool [1, 1, end - start, end - first]: which keys from `first` on each new token sees."""
    queries = torch.arange(start, end, device=device)[:, None]
    keys = torch.arange(first, end, device=device)
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    return mask[None, None]


def _single_tokens(cache: Cache, past: Past, window: int | None) -> Iterator[Call]:
    """Calls for rows of at most one new token: rows of adjacent slots together, unless they differ
    much in length.
    """
    for rows in _runs(past, cache._slack):
        ends = [past[row][1] + past[row][2] for row in rows]
        seen = window or max(ends)
        first, last = max(0, min(ends) - seen), max(ends)
        mask = None
        if len({*ends}) > 1:
            keys, own = torch.arange(first, last), torch.tensor(ends)[:, None]
            mask = ((keys < own) & (keys >= own - seen))[:, None, None].to(cache._device)
        sequence = past[rows.start][0]
        yield Call(
            slice(rows.start, rows.stop),
            slice(sequence, sequence + len(rows)),
            slice(first, last),
            slice(0, 1),
            causal=False,
            mask=mask,
        )


def _runs(past: Past, slack: int) -> Iterator[range]:
    """Rows that share a call: adjacent slots with a new token, at most `slack` keys of padding for
    each call saved.
    """
    run, longest, total = range(0), 0, 0
    for row, (sequence, start, count) in enumerate(past):
        end = start + count
        highest = max(longest, end)
        adjacent = count and run.stop == row and sequence == past[row - 1][0] + 1
        if run and adjacent and highest * (len(run) + 1) - total - end <= slack * len(run):
            run, longest, total = range(run.start, row + 1), highest, total + end
            continue
        if run:
            yield run
        run, longest, total = range(row, row + 1 if count else row), end, end
    if run:
        yield run
