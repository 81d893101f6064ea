"""The cache of sequences on a GPU: keys and values in pages of a pool that all sequences share.

A sequence has a table of its pages, in order. Memory follows what is stored, whatever the longest
sequence has; and sequences with the same beginning share its full pages, so several samples of one
prompt hold it once. A page that others hold, too, is copied before it is written to. When the pool
is full it doubles, a layer at a time, up to the pages of all sequences at full length.

FlashAttention reads pages through the table (torch's `varlen_attn` with `block_table`), in half
precision. Elsewhere (float32, a soft cap, no such kernel) the pages of a sequence are gathered for
each call: exact, and slower.

Source: PagedAttention, Kwon et al. 2023, arXiv:2309.06180, section 4.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError
from penstock.models.attention import AttentionLayer
from penstock.models.attention.kernels import HALF
from penstock.models.attention.sinks import add_sinks
from penstock.models.attention.varlen import find_varlen
from penstock.models.cache import (
    Cache,
    attend_call,
    check_copy,
    check_growth,
    seen_mask,
    shorten,
)
from penstock.models.growth import Growth, States

PAGE = 256
"""Tokens of a page: FlashAttention 2 takes multiples of 256."""
FIRST_PAGES = 64
"""Pages of the pool at first."""


@final
class PagedCache:
    """Keys and values that `extend` keeps between calls.

    Attributes:
        lengths: int64 [sequences] on the CPU: number of stored tokens of each.
        capacity: Maximum tokens of a sequence.
        moved: How often the pool has moved to other memory.
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
        page: int = PAGE,
        kernel: Callable[..., Any] | None = None,
    ) -> None:
        """An empty cache; arguments as those of `Cache`.

        Args:
            layers: Layers with attention.
            sequences: Sequences at a time.
            capacity: Maximum tokens of a sequence.
            kv_heads: Heads of keys and values.
            head_width: Numbers of a head.
            device: Where it is kept.
            dtype: Of keys and values.
            windows: For each layer, the maximum tokens that a token sees, or None.
            softcap: Scores are kept within ± this number; None: they are as they come.
            recurrent: Whether other layers keep states.
            page: Tokens of a page.
            kernel: Attention over pages, as `varlen_attn`; None: torch's, where it runs here.
        """
        self.recurrent, self._softcap, self._device = recurrent, softcap, device
        self.steps: object = None
        """Recorded steps; see `decoding_graphs`."""
        self._states: States = {}
        self.windows = tuple(windows) or (None,) * layers
        """Of each layer, maximum tokens that a token sees; None: all before it."""
        self.page = page
        """Tokens of a page."""
        self.lengths = torch.zeros(sequences, dtype=torch.int64)
        self.capacity, self.moved = capacity, 0
        self.pages_of_all = math.ceil(capacity / page)
        """Pages of a sequence at full length."""
        # Page 0 belongs to nobody: rows without a sequence write there.
        pages = min(FIRST_PAGES, 1 + sequences * self.pages_of_all)
        shape = (pages, page, kv_heads, head_width)
        self.keys, self.values = (
            [torch.zeros(shape, device=device, dtype=dtype) for _ in range(max(layers, 1))]
            for _ in range(2)
        )
        """Of each layer [pages, page, kv_heads, head_width]."""
        self._free = list(range(pages - 1, 0, -1))
        self._holders = np.zeros(pages, np.int64)
        self._tables: list[list[int]] = [[] for _ in range(sequences)]
        self.kernel = kernel or _kernel_for(device, dtype, softcap)

    @property
    def used_pages(self) -> int:
        """Pages that sequences hold."""
        return int(np.count_nonzero(self._holders))

    def copy(self, source: int, target: int, length: int) -> None:
        """Make a sequence the first `length` tokens of another: full pages are shared.

        Raises:
            ConfigError: The other has fewer.
        """
        check_copy(self.lengths, source, length)
        self._require(source, length)
        if source == target:
            self.truncate(target, length)
            return
        self._release(target, 0)
        full, rest = divmod(length, self.page)
        table = self._tables[source][:full]
        self._holders[table] += 1
        self._tables[target] = list(table)
        if rest:
            last = self._tables[source][full]
            new = self._take(1)[0]
            self._copy_page(last, new, rest)
            self._tables[target].append(new)
        for states in self._states.values():
            for state in states:
                state[target] = state[source]
        self.lengths[target] = length

    def kept(self, sequence: int, length: int) -> int:
        """How many of the first `length` tokens of a sequence can be kept, or copied, without the
        others.
        """
        return length if not self.recurrent or length == int(self.lengths[sequence]) else 0

    def clear(self, sequence: int) -> None:
        """Remove a sequence, so that another can take its place."""
        self.truncate(sequence, 0)

    def truncate(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence; its other pages are free again.

        Raises:
            ConfigError: It has fewer, or recurrent states after more.
        """
        if length:
            self._require(sequence, length)
        shorten(self.lengths, sequence, length)
        self._release(sequence, math.ceil(length / self.page))

    def growth(self, tokens: Tensor, lengths: Tensor, sequences: Tensor | None) -> "PagedGrowth":
        """Prepare for new tokens at the ends of sequences; arguments and errors as those of
        `Cache.growth`.
        """
        chosen = check_growth(self.lengths, self.capacity, tokens, lengths, sequences)
        counts = lengths.cpu()
        for sequence, count in zip(chosen.tolist(), counts.tolist(), strict=True):
            if count:
                self._make_room(sequence, count)
        return PagedGrowth(self, chosen, counts, tokens.shape[1])

    @property
    def device_of_keys(self) -> torch.device:
        """Where keys and values are."""
        return self._device

    def make_room_for_one(
        self, tokens: Tensor, lengths: Tensor, sequences: Tensor | None
    ) -> Tensor:
        """Pages for one more token of each row's sequence; returns the sequences, int64 [B] on the
        CPU. Errors as those of `growth`.
        """
        chosen = check_growth(self.lengths, self.capacity, tokens, lengths, sequences)
        for sequence in chosen.tolist():
            self._make_room(sequence, 1)
        return chosen

    def table(self, sequences: Sequence[int], width: int) -> Int64:
        """int64 [B, width]: the pages of sequences, with page 0 behind the last."""
        found = np.zeros((len(sequences), width), np.int64)
        for row, sequence in enumerate(sequences):
            pages = self._tables[sequence]
            found[row, : len(pages)] = pages[:width]
        return found

    def pages_of(self, sequence: int) -> int:
        """Number of pages of a sequence."""
        return len(self._tables[sequence])

    def _make_room(self, sequence: int, count: int) -> None:
        """Pages for more tokens of a sequence; of those that are written to, nobody else's."""
        begin = int(self.lengths[sequence])
        table = self._tables[sequence]
        needed = math.ceil((begin + count) / self.page) - len(table)
        table += self._take(needed)
        place, rest = divmod(begin, self.page)
        if rest and self._holders[table[place]] > 1:
            new = self._take(1)[0]
            self._copy_page(table[place], new, rest)
            self._holders[table[place]] -= 1
            table[place] = new

    def _take(self, count: int) -> list[int]:
        """Free pages."""
        if count <= 0:
            return []
        while len(self._free) < count:
            self._grow()
        found = [self._free.pop() for _ in range(count)]
        self._holders[found] = 1
        return found

    def _grow(self) -> None:
        """Twice as many pages."""
        before = len(self._holders)
        # Pages that two sequences wrote to, each its own copy, may be one more than the sum.
        most = 1 + len(self._tables) * (self.pages_of_all + 1)
        after = min(2 * before, most)
        assert after > before
        for held in (self.keys, self.values):
            for layer, old in enumerate(held):
                held[layer] = old.new_zeros(after, *old.shape[1:])
                held[layer][:before] = old
        self._holders = np.concatenate([self._holders, np.zeros(after - before, np.int64)])
        self._free = [*range(after - 1, before - 1, -1), *self._free]
        self.moved += 1

    def _release(self, sequence: int, pages: int) -> None:
        """Give back the pages of a sequence behind the first ones."""
        table = self._tables[sequence]
        for page in table[pages:]:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
        del table[pages:]

    def _copy_page(self, source: int, target: int, count: int) -> None:
        for held in (*self.keys, *self.values):
            held[target, :count] = held[source, :count]

    def _require(self, sequence: int, length: int) -> None:
        if self.kept(sequence, length) != length:
            raise ConfigError(
                f"sequence {sequence} of the cache has recurrent states after "
                f"{int(self.lengths[sequence])} tokens, which cannot be cut back to {length}; "
                "read it again"
            )


@final
class PagedGrowth(Growth):
    """An extension of a `PagedCache`."""

    def __init__(self, cache: PagedCache, sequences: Tensor, lengths: Tensor, width: int) -> None:
        self._cache = cache
        starts, counts = cache.lengths[sequences].numpy(), lengths.numpy()
        self._past = list(zip(starts.tolist(), counts.tolist(), strict=True))
        self._longest = int(counts.max(initial=0)), int((starts + counts).max(initial=0))
        given = sequences.tolist()
        table = cache.table(given, max([1, *(cache.pages_of(one) for one in given)]))
        ends = starts + counts
        owners = np.repeat(np.arange(len(counts)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        places = np.repeat(starts, counts) + np.arange(len(owners)) - first
        pages, inside = table[owners, places // cache.page], places % cache.page
        bounds = [np.concatenate([[0], np.cumsum(one)]) for one in (counts, ends)]
        more = [pages, inside, *bounds, ends, table]
        super().__init__(
            cache.lengths, cache._states, sequences, lengths, width, cache._device, more
        )
        self._into = (self.sent[0], self.sent[1])
        # The kernel wants these in int32.
        self._queries, self._keys, self._used, self._table = (one.int() for one in self.sent[2:])
        self.pages = table

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`LayerAttend`: store the new keys and values, and attend to all of the sequences."""
        cache = self._cache
        keys, values = cache.keys[layer.place], cache.values[layer.place]
        keys[self._into], values[self._into] = k[self._new], v[self._new]
        window = cache.windows[layer.place]
        out = torch.zeros_like(q)
        if cache.kernel is not None:
            given = (self._queries, self._keys, *self._longest, self._used, self._table)
            found = attend_pages(
                cache.kernel, q[self._new], keys, values, *given, window, layer.sinks
            )
            return out.index_put(self._new, found)
        for row, (start, count) in enumerate(self._past):
            if count:
                end = start + count
                first = 0 if window is None else max(0, start - window + 1)
                pages = self._table[row, : math.ceil(end / cache.page)].long()
                seen, held = (
                    x[pages].flatten(0, 1)[first:end].transpose(0, 1)[None] for x in (keys, values)
                )
                mask = seen_mask(first, start, end, window, q.device)
                queries = q[row, :count].transpose(0, 1)[None]
                one = attend_call(queries, seen, held, mask, False, cache._softcap, layer.sinks)
                out[row, :count] = one[0].transpose(0, 1)
        return out


def attend_pages(
    kernel: Callable[..., Any],
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    longest_queries: int,
    longest_keys: int,
    used: Tensor,
    table: Tensor,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of new tokens to the pages of their sequences, causal from the end.

    Args:
        kernel: As `varlen_attn`.
        q: [t, heads, dim].
        keys: [pages, page, kv_heads, dim].
        values: As `keys`.
        cu_queries: int32 [B + 1].
        cu_keys: int32 [B + 1].
        longest_queries: Of a row.
        longest_keys: Of a row.
        used: int32 [B]: tokens of each sequence.
        table: int32 [B, n]: its pages.
        window: Maximum tokens that a token sees; None: all before it.
        sinks: [heads]; None: none.
    """
    more: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != keys.shape[2] else {}
    if sinks is not None:
        more["return_aux"] = _with_sums()
    found = kernel(
        q,
        keys,
        values,
        cu_queries,
        cu_keys,
        longest_queries,
        longest_keys,
        window_size=(-1 if window is None else window - 1, 0),
        seqused_k=used,
        block_table=table,
        **more,
    )
    if sinks is None:
        return torch.as_tensor(found)
    out, sums = found
    # torch 2.13 says [t, heads] and gives [heads, t].
    sums = sums if sums.shape[0] == q.shape[1] else sums.T
    return add_sinks(out, sums, sinks)[0]


def _with_sums() -> Any:
    from torch.nn.attention.varlen import AuxRequest

    return AuxRequest(lse=True)


def _kernel_for(
    device: torch.device, dtype: torch.dtype, softcap: float | None
) -> Callable[..., Any] | None:
    """torch's kernel for pages; None: it does not run here."""
    function = find_varlen()
    if function is None or device.type != "cuda" or dtype not in HALF or softcap is not None:
        return None
    if "block_table" not in inspect.signature(function).parameters:
        return None
    return function if torch.cuda.get_device_capability(device)[0] >= 8 else None


def new_keys(*, device: torch.device, **given: Any) -> Cache | PagedCache:
    """The cache of keys and values for a device; arguments as those of `Cache`."""
    return (PagedCache if device.type == "cuda" else Cache)(device=device, **given)
