"""The cache of sequences during generation: their keys and values in slots of a fixed capacity.

`Cache` stores rotated keys and never modifies them: a sequence grows at its end, and rotary
positions count from its beginning, so nothing ever moves. `clear` frees a sequence's place for
another; `copy` gives one sequence the beginning of another. Memory: 2 × layers × sequences ×
capacity × kv_heads × head_width numbers at most. On the CPU the system provides a page when it is
first written, so memory follows what was stored; on CUDA there are pages of our own
(`PagedCache`). On other devices all sequences have room for the longest so far, doubled when it is
full.

The cost of a step follows the tokens attended: sequences in adjacent slots share a call of the
attention only where that costs less than a call for each.
"""

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.models.attention import AttentionLayer
from penstock.models.attention.backends import flash, plain_heads
from penstock.models.attention.kernels import sdpa
from penstock.models.attention.sinks import add_sinks
from penstock.models.attention.softcap import capped_attention
from penstock.models.new_tokens import HeldSequences, NewTokens, Step, check_growth
from penstock.plan.inputs.torch_tensors import together_on_device

FIRST_ROOM = 256
"""Not on the CPU: tokens for which each sequence has room at first."""
CALL_BYTES_CPU, CALL_BYTES_GPU = 200_000, 30_000_000
"""Keys and values that are read in the time that one more call of the attention takes: about 15 µs,
at 13 GB/s on a core, at 2 TB/s on a GPU (not measured).
"""
Past = list[tuple[int, int, int]]
"""Of each row: its sequence, the number of its stored tokens, the number of its new tokens."""


@final
class Cache(HeldSequences):
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
        super().__init__(sequences, capacity, device, recurrent=recurrent)
        self._softcap = softcap
        # Each head's keys lie side by side: attention reads them a third faster than token by
        # token.
        self._shape = (layers, sequences, kv_heads, head_width)
        self._dtype = dtype
        self._windows = tuple(windows) or (None,) * layers
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
        if self.device.type != "cpu":
            return torch.zeros(shape, device=self.device, dtype=self._dtype)
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
        self._copy_states(source, target, length)
        for held in (self._keys, self._values):
            held[:, target, :, :length] = held[:, source, :, :length]

    def lack(self, growing: Mapping[int, int]) -> str:
        """Nothing: each sequence has room up to the capacity."""
        return ""

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
        self.reserve(int((self.lengths[chosen] + lengths.cpu()).max()))
        return Growth(self, chosen, lengths.cpu(), tokens)


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


@final
@dataclass(slots=True)
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
class Growth(NewTokens):
    """One extension of a cache: where new keys go, and what new tokens see."""

    def __init__(self, cache: Cache, sequences: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        super().__init__(cache, sequences, lengths, tokens.shape[1])
        self._keys, self._values, self._windows = cache._keys, cache._values, cache._windows
        self._softcap = cache._softcap
        starts, width = self._starts, tokens.shape[1]
        offsets = torch.arange(width)
        places = starts[:, None] + offsets
        row, column = (offsets < lengths[:, None]).nonzero(as_tuple=True)
        past = list(zip(sequences.tolist(), starts.tolist(), lengths.tolist(), strict=True))
        calls = _single_tokens if width == 1 else _texts
        self._calls = {window: list(calls(cache, past, window)) for window in set(cache._windows)}
        parts = {
            "row": row,
            "column": column,
            "sequences": sequences[row],
            "places": places[row, column],
            # Padding has the position of the last token: tables of positions end at the capacity,
            # and some rotary frequencies depend on the highest position of the batch.
            "positions": places.minimum((starts + lengths - 1).clamp(min=0)[:, None]),
            "rows": torch.arange(len(sequences)),
            "last": (lengths - 1).clamp(min=0),
        }
        if tokens.device.type == "cpu":
            parts["tokens"] = tokens
        single = [call for calls in self._calls.values() for call in calls if width == 1]
        masked = [call for call in single if call.mask is not None]
        for number, call in enumerate(masked):
            assert call.mask is not None
            parts[f"mask {number}"] = call.mask.view(torch.uint8)
        sent = together_on_device(parts, cache.device)
        for number, call in enumerate(masked):
            call.mask = sent[f"mask {number}"].view(torch.bool)
        self._new = (sent["row"], sent["column"])
        self._into = (sent["sequences"], sent["places"])
        self.tokens, self.positions = sent.get("tokens", tokens), sent["positions"]
        self._last = (sent["rows"], sent["last"])

    def step(self, function: Step) -> Tensor | None:
        """See `PagedGrowth.step`: here it is never done."""
        return None

    def at_last(self, hidden: Tensor) -> Tensor:
        """[B, n, width] → [B, width]: those of each row's last new token."""
        return hidden[self._last]

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`LayerAttend`: store the new keys and values, and attend to all of the sequences."""
        keys, values = self._keys[layer.place], self._values[layer.place]
        sequences, places = self._into
        keys[sequences, :, places], values[sequences, :, places] = k[self._new], v[self._new]
        out = torch.zeros_like(q)
        for call in self._calls[self._windows[layer.place]]:
            seen, held = (x[call.sequences, :, call.keys] for x in (keys, values))
            queries = q[call.rows, call.queries].transpose(1, 2)
            found = _attend(queries, seen, held, call, self._softcap, layer.sinks)
            out[call.rows, call.queries] = found.transpose(1, 2)
        return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, call: Call, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """One call of the attention: q [rows, heads, n, dim], k and v [rows, kv_heads, keys, dim] → as
    q.
    """
    if softcap is None and sinks is None:
        if q.shape[2] == 1 and not call.causal and q.device.type == "cpu":
            # The query heads of a group see the same keys: as queries of one head, they read them
            # once.
            groups = q.unflatten(1, (k.shape[1], -1))[:, :, :, 0]
            return sdpa(groups, k, v, mask=call.mask).flatten(1, 2)[:, :, None]
        return sdpa(q, k, v, mask=call.mask, causal=call.causal)
    if softcap is None and sinks is not None and q.device.type == "cpu":
        mask = None
        if call.mask is not None:
            mask = q.new_zeros(call.mask.shape).masked_fill(~call.mask, -torch.inf)
        q, k, v = (plain_heads(x) for x in (q, k, v))
        found, sums = flash(q, k, v, 0.0, call.causal, attn_mask=mask)
        return add_sinks(found.transpose(1, 2), sums, sinks)[0].transpose(1, 2)
    seen = call.mask
    if call.causal:
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
            queries = torch.arange(start, end, device=cache.device)[:, None]
            keys = torch.arange(first, end, device=cache.device)
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            mask = mask[None, None]
        yield Call(
            slice(row, row + 1),
            slice(sequence, sequence + 1),
            slice(first, end),
            slice(0, count),
            causal=plain,
            mask=mask,
        )


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
            mask = ((keys < own) & (keys >= own - seen))[:, None, None]
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
