"""The cache of sequences on a GPU: keys and values in pages of a pool.

A page holds 256 tokens of a sequence, in each layer. A sequence takes a page when it needs one, so
memory follows what is stored, and sequences with the same beginning share its pages: a copy of a
sequence costs nothing until one of the two writes into a page that both use. The pool grows when it
is full, by doubling, until it holds all sequences at full length, or the device has no more memory;
then `lack` says so, and an engine makes sequences wait.

Keys and values are rotated and never change, as in `Cache`. FlashAttention reads pages where they
are (`attention/paged.py`); what it cannot do (float32, soft caps) gathers them first. Steps of one
token for each sequence have fixed shapes, and are replayed as CUDA graphs (`static_steps.py`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import final

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.models.attention import AttentionLayer
from penstock.models.attention.paged import (
    PAGE,
    Tables,
    attend_gathered,
    attend_pages,
    refusal,
    seen_keys,
    try_pages,
)
from penstock.models.new_tokens import HeldSequences, NewTokens, Step, check_growth
from penstock.models.pages import Pages
from penstock.models.static_steps import CudaGraph, Graph, StaticSteps
from penstock.plan.inputs.torch_tensors import on_device

FIRST_PAGES = 16
"""Pages of a new pool."""
_log = logging.getLogger("penstock.models")


_tried = cache(try_pages)


@cache
def _say(reason: str) -> None:
    """Once for each reason."""
    _log.warning(
        "generation gathers the pages of keys and values before it attends to them, which is "
        "slower than FlashAttention in place: %s",
        reason,
    )


@final
class PagedCache(HeldSequences):
    """Keys and values that `extend` keeps between calls, with the methods of `Cache`.

    Attributes:
        pages: Which pages hold what.
        steps: Steps of fixed shapes; None: there are none.
        gathers: Why pages are gathered; empty: FlashAttention reads them in place.
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
        most: int | None = None,
        make_graph: Callable[[], Graph] | None = None,
    ) -> None:
        """An empty cache; see `Cache` for the other arguments.

        Args:
            page: Tokens of a page.
            most: Maximum pages; None: what all sequences can need.
            make_graph: Makes what records a step; None: CUDA graphs on CUDA.
        """
        super().__init__(sequences, capacity, device, recurrent=recurrent)
        self.windows = tuple(windows) or (None,) * layers
        self.softcap = softcap
        self.pages = Pages(sequences, page)
        self.widest = -(-capacity // page)
        self._most = 1 + (sequences * self.widest if most is None else most)
        self._shape, self._dtype = (page, kv_heads, head_width), dtype
        self.pools: list[tuple[Tensor, Tensor]] = [
            (self._new(1), self._new(1)) for _ in range(layers)
        ]
        self.gathers = refusal(device, dtype, head_width, softcap) or _tried(
            kv_heads, head_width, device, dtype, page
        )
        if device.type == "cuda" and self.gathers:
            _say(self.gathers)
        if make_graph is None and device.type == "cuda":
            make_graph = CudaGraph
        self.steps = None if make_graph is None or recurrent else StaticSteps(make_graph, device)

    def _new(self, pages: int) -> Tensor:
        """Zeros [pages, page, kv_heads, head_width]: 0 times uninitialised memory (NaN) would not
        be 0.
        """
        # Also written outside of inference mode.
        with torch.inference_mode(False):
            return torch.zeros((pages, *self._shape), device=self.device, dtype=self._dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, in all layers."""
        page, heads, width = self._shape
        return 2 * len(self.pools) * page * heads * width * self._dtype.itemsize

    def lack(self, growing: Mapping[int, int]) -> str:
        """See `SequenceCache`; the pool grows if it can."""
        lengths = self.lengths.tolist()
        needed = self.pages.needed((one, lengths[one], count) for one, count in growing.items())
        if needed <= self.pages.free or self._grow(needed - self.pages.free):
            return ""
        total = self.pages.total - 1
        return (
            f"the cache of keys and values is full: {total} pages of {self.pages.size} tokens, "
            f"{total * self.page_bytes / 1e9:,.2f} GB; take a shorter context or prompt, fewer "
            "sequences at a time, or leave it more memory of the device"
        )

    def _grow(self, short: int) -> bool:
        """Make the pool larger by at least `short` pages, or not at all."""
        least = self.pages.total + short
        for total in dict.fromkeys((max(2 * self.pages.total, FIRST_PAGES, least), least)):
            total = min(total, self._most)
            if total < least:
                return False
            try:
                # Layer by layer, so that only one of them is there twice.
                for layer, pools in enumerate(self.pools):
                    self.pools[layer] = (self._wider(pools[0], total), self._wider(pools[1], total))
            except torch.OutOfMemoryError:
                continue
            finally:
                if self.steps is not None:
                    self.steps.forget()
            self.pages.add(total)
            return True
        return False

    def _wider(self, pool: Tensor, total: int) -> Tensor:
        if len(pool) >= total:
            return pool
        wider = self._new(total)
        wider[: len(pool)] = pool
        return wider

    def truncate(self, sequence: int, length: int) -> None:
        """See `Cache.truncate`; pages that nobody uses are free for others."""
        super().truncate(sequence, length)
        self.pages.cut(sequence, length)

    def copy(self, source: int, target: int, length: int) -> None:
        """See `Cache.copy`; both use the same pages until one writes."""
        self._copy_states(source, target, length)
        self.pages.share(source, target, length)

    def growth(self, tokens: Tensor, lengths: Tensor, sequences: Tensor | None) -> "PagedGrowth":
        """See `Cache.growth`.

        Raises:
            ConfigError: As there, or the pool is full.
        """
        lengths = lengths.cpu()
        chosen = check_growth(self.lengths, self.capacity, tokens, lengths, sequences)
        rows = dict(zip(chosen.tolist(), lengths.tolist(), strict=True))
        if lack := self.lack(rows):
            raise ConfigError(lack)
        for sequence, count in rows.items():
            copied = self.pages.grow(sequence, int(self.lengths[sequence]), count)
            if copied is not None:
                for pools in self.pools:
                    for pool in pools:
                        pool[copied[1]] = pool[copied[0]]
        return PagedGrowth(self, chosen, lengths, tokens)


@final
@dataclass(frozen=True, slots=True)
class _Sizes:
    """What determines the shapes of a step."""

    rows: int
    width: int
    new: int
    """Number of new tokens, with those of padded rows."""
    pages: int
    """Of the longest sequence, or more."""

    @property
    def ragged(self) -> bool:
        """Whether rows have padding."""
        return self.new < self.rows * self.width

    def split(self, inputs: Tensor) -> list[Tensor]:
        """The inputs of a step, from all in a row."""
        rows, slots = self.rows, self.rows * self.width
        new = self.new if self.ragged else 0
        return list(
            inputs.split(
                [slots, slots, self.new, new, rows, rows, rows * self.pages, rows + 1, rows + 1]
            )
        )


@final
class _Attending:
    """A step's inputs on the device, and its attention."""

    def __init__(self, cache: PagedCache, sizes: _Sizes, inputs: Tensor) -> None:
        self._cache, self._sizes = cache, sizes
        tokens, positions, places, new, last, lengths, pages, queries, keys = sizes.split(inputs)
        shape = (sizes.rows, sizes.width)
        self.tokens, self.positions = tokens.view(shape).long(), positions.view(shape).long()
        self._places, self.last = places.long(), last.long()
        self._new = new.long() if sizes.ragged else None
        self._longest = sizes.pages * cache.pages.size
        self._where = Tables(
            queries, keys, lengths, pages.view(-1, sizes.pages), sizes.width, self._longest
        )
        self._seen: dict[int | None, Tensor] = {}

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`LayerAttend`: store the new keys and values, and attend to all of the sequences."""
        cache = self._cache
        keys, values = cache.pools[layer.place]
        for pool, x in ((keys, k), (values, v)):
            pool.flatten(0, 1).index_copy_(0, self._places, self._flat(x))
        window = cache.windows[layer.place]
        if not cache.gathers:
            found = attend_pages(self._flat(q), keys, values, self._where, window, layer.sinks)
            if self._new is None:
                return found.view_as(q)
            return torch.zeros_like(q).flatten(0, 1).index_copy(0, self._new, found).view_as(q)
        if window not in self._seen:
            self._seen[window] = seen_keys(self.positions, self._longest, window)
        return attend_gathered(
            q, keys, values, self._where.pages, self._seen[window], cache.softcap, layer.sinks
        )

    def _flat(self, x: Tensor) -> Tensor:
        """[B, n, heads, dim] → [new tokens, heads, dim]."""
        flat = x.flatten(0, 1)
        return flat if self._new is None else flat.index_select(0, self._new)


@final
class PagedGrowth(NewTokens):
    """One extension of a cache: where new keys go, and what new tokens see."""

    def __init__(
        self, cache: PagedCache, sequences: Tensor, lengths: Tensor, tokens: Tensor
    ) -> None:
        super().__init__(cache, sequences, lengths, tokens.shape[1])
        self._paged, self._given = cache, tokens

    def step(self, function: Step) -> Tensor | None:
        """Logits [B, vocab] after one token of each row, by a step of fixed shapes; None: nothing
        was done, as rows have more tokens, or there are no such steps.
        """
        steps, count = self._paged.steps, len(self._sequences)
        if self._width != 1 or steps is None or self._given.device.type != "cpu":
            return None
        sizes, inputs = self._packed(1 << (count - 1).bit_length())

        def run(held: Tensor) -> Tensor:
            now = _Attending(self._paged, sizes, held)
            return function(now.tokens, now.positions, now.attend)

        found = steps.run(sizes, inputs, run)[:count].clone()
        self.done()
        return found

    def _packed(self, rows: int) -> tuple[_Sizes, Tensor]:
        """All that the device must know, int32 in a row; rows from B on are padding."""
        page, width, tables = self._paged.pages.size, self._width, self._paged.pages.tables
        count = len(self._sequences)
        starts, lengths = (torch.zeros(rows, dtype=torch.int64) for _ in range(2))
        starts[:count], lengths[:count] = self._starts, self._lengths
        held = [tables[sequence] for sequence in self._sequences.tolist()]
        longest = max(1, *map(len, held))
        if width == 1:
            # Few shapes: 1, 4, 16, 64, … pages.
            longest = min(4 ** -(-(longest - 1).bit_length() // 2), self._paged.widest)
        pages = torch.zeros((rows, longest), dtype=torch.int64)
        for row, table in enumerate(held):
            pages[row, : len(table)] = torch.tensor(table, dtype=torch.int64)
        offsets = torch.arange(width)
        places = starts[:, None] + offsets
        # Padding has the position of the last token: tables of positions end at the capacity, and
        # some rotary frequencies depend on the highest position of the batch.
        positions = places.minimum((starts + lengths - 1).clamp(min=0)[:, None])
        real = offsets < lengths[:, None]
        into = pages.gather(1, positions // page) * page + positions % page
        if width == 1:
            # Padding writes into page 0, which is nobody's.
            into[~real], real = 0, torch.ones_like(real)
        new = real.view(-1).nonzero()[:, 0]
        tokens = torch.zeros((rows, width), dtype=torch.int64)
        if self._given.device.type == "cpu":
            tokens[:count] = self._given
        ends = (starts + lengths).clamp(min=1)
        queries, keys = (
            torch.cat([torch.zeros(1, dtype=torch.int64), x.cumsum(0)]) for x in (real.sum(1), ends)
        )
        sizes = _Sizes(rows, width, len(new), longest)
        last = torch.arange(rows) * width + (lengths - 1).clamp(min=0)
        parts = [tokens, positions, into[real], new if sizes.ragged else new[:0]]
        parts += [last, ends, pages, queries, keys]
        return sizes, torch.cat([x.reshape(-1) for x in parts]).int()

    @cached_property
    def _now(self) -> _Attending:
        sizes, inputs = self._packed(len(self._sequences))
        made = _Attending(self._paged, sizes, on_device(inputs, self._paged.device))
        if self._given.device.type != "cpu":
            made.tokens = self._given
        return made

    @property
    def tokens(self) -> Tensor:  # type: ignore[override]
        """int64 [B, n] on the device."""
        return self._now.tokens

    @property
    def positions(self) -> Tensor:  # type: ignore[override]
        """int64 [B, n]: position of each token in its sequence."""
        return self._now.positions

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`LayerAttend`: store the new keys and values, and attend to all of the sequences."""
        return self._now.attend(layer, q, k, v)

    def at_last(self, hidden: Tensor) -> Tensor:
        """[B, n, width] → [B, width]: those of each row's last new token."""
        return hidden.flatten(0, 1).index_select(0, self._now.last)
