"""Attention document by document: the calls that a row takes, and running them as torch's own
attention on any device.

A document takes a causal call. One with a prefix takes two: the prefix in full, and the rest, which
sees the whole document up to itself. With a sliding window, each block of queries as long as the
window takes one, over at most two windows of keys. A document that is a prefix tree takes a causal
call for each node, and one for what stands below each node.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.arrays import Int64
from penstock.models.attention.compiling import outside_graphs
from penstock.models.attention.kernels import attend_heads
from penstock.models.attention.softcap import capped_attention
from penstock.plan.inputs import AttentionRule


class Attend(Protocol):
    """Attention of a row."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q [T, heads, dim], k [T, kv_heads, dim], v as k, sinks [heads] → [T, heads, dim]."""


@final
@dataclass(frozen=True, slots=True)
class Scores:
    """What becomes of scores besides the rule of the row."""

    window: int | None = None
    """Maximum tokens that a token sees, including itself, as in transformers (`key > query -
    window`); None: all before it. Source: Mistral 7B, arXiv:2310.06825.
    """
    softcap: float | None = None
    """Scores are kept within ± this number; None: they are as they come."""


PLAIN = Scores()


@final
@dataclass(frozen=True, slots=True)
class Call:
    """Queries and keys of one attention call."""

    queries: slice
    keys: slice
    causal: bool
    masked: bool = False
    """Whether queries see keys up to their own slot, and not beyond the window."""
    adds: bool = False
    """Whether its keys come on top of those of earlier calls, instead of being all that its queries
    see.
    """

    @property
    def shape(self) -> tuple[int, int, int]:
        """What its mask depends on: queries, keys, and keys before the first query."""
        queries, keys = self.queries, self.keys
        return queries.stop - queries.start, keys.stop - keys.start, queries.start - keys.start

    def mask(self, window: int | None, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """[queries, keys] to be added to the scores, 0 or minus infinity; None: nothing is."""
        if not self.masked:
            return None
        queries, keys, before = self.shape
        hidden = torch.full((queries, keys), -torch.inf, dtype=dtype, device=device)
        later = hidden.triu(before + 1)
        return later if window is None else later + hidden.tril(before - window)


def calls(pieces: list[list[int]], window: int | None = None) -> Iterator[Call]:
    """The calls for a row, in the order of their queries, from [begin, end of prefix, end, end of
    subtree] of pieces.

    Calls that add keys come last: to each query, those of the root before those of nodes below it.
    """
    for begin, prefix_end, end, _ in pieces:
        if window is not None and end - begin > window:
            for first in range(begin, end, window):
                last = min(first + window, end)
                seen = max(first - window + 1, begin)
                yield Call(slice(first, last), slice(seen, last), causal=False, masked=True)
            continue
        if prefix_end <= begin + 1:
            yield Call(slice(begin, end), slice(begin, end), causal=True)
            continue
        yield Call(slice(begin, prefix_end), slice(begin, prefix_end), causal=False)
        if prefix_end < end:
            yield Call(slice(prefix_end, end), slice(begin, end), causal=False, masked=True)
    for begin, _, end, reach in pieces:
        if reach > end:
            yield Call(slice(end, reach), slice(begin, end), causal=False, adds=True)


def with_reach(rule: AttentionRule) -> Int64:
    """[pieces, 4] int64: those of the rule, and the end of each one's subtree."""
    return np.column_stack([rule.pieces, rule.ends]).astype(np.int64)


def prepare_calls(
    rule: AttentionRule, device: torch.device, dtype: torch.dtype, scores: Scores = PLAIN
) -> Attend:
    """Attention per document, as calls of torch's own attention, on any device.

    Queries, keys and values are split, and outputs joined, in one operation each; each slice would
    instead have a backward pass over the whole row.
    """
    made = (_Paths if rule.forked else _Calls)(rule, device, dtype, scores)
    run = outside_graphs(_run)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        out: Tensor = run(made, q, k, v, sinks)
        return out

    return attend


def _run(made: "_Calls | _Paths", q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    return made.run(q, k, v, sinks)


def _attend_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scores: Scores,
    sinks: Tensor | None,
) -> Tensor:
    """`attend_heads` with all that scores may need."""
    if scores.softcap is None and sinks is None:
        return attend_heads(q, k, v, mask=mask, causal=causal)
    seen = None if mask is None else mask == 0
    if causal:
        seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril()
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return capped_attention(q, k, v, seen, scores.softcap, sinks).transpose(0, 1)


@final
class _Calls:
    """The calls of a row of plain documents."""

    def __init__(
        self, rule: AttentionRule, device: torch.device, dtype: torch.dtype, scores: Scores
    ) -> None:
        self._made = list(calls(with_reach(rule).tolist(), scores.window))
        made: dict[tuple[int, int, int], Tensor | None] = {}
        # Most blocks of a window have the same mask.
        for call in self._made:
            if call.masked and call.shape not in made:
                made[call.shape] = call.mask(scores.window, device, dtype)
        self._masks = [made[call.shape] if call.masked else None for call in self._made]
        self._counts = [call.queries.stop - call.queries.start for call in self._made]
        begins = rule.pieces[:, 0]
        self._lengths = (rule.pieces[:, 2] - begins).tolist()
        self._begins = begins.tolist()
        keys = [call.keys.start for call in self._made]
        self._documents = (np.searchsorted(begins, keys, "right") - 1).tolist()
        self._scores = scores

    def run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        keys, values = k.split(self._lengths), v.split(self._lengths)
        outputs = []
        for call, mask, number, queries in zip(
            self._made, self._masks, self._documents, q.split(self._counts), strict=True
        ):
            begin = self._begins[number]
            seen = slice(call.keys.start - begin, call.keys.stop - begin)
            given = (queries, keys[number][seen], values[number][seen], mask, call.causal)
            outputs.append(_attend_once(*given, self._scores, sinks))
        return torch.cat(outputs)


@final
class _Paths:
    """Prefix trees: each node sees its path, whose keys are concatenated."""

    def __init__(
        self, rule: AttentionRule, device: torch.device, dtype: torch.dtype, scores: Scores
    ) -> None:
        self._lengths = (rule.pieces[:, 2] - rule.pieces[:, 0]).tolist()
        self._paths: list[list[int]] = []
        self._masks: list[Tensor | None] = []
        self._scores = scores
        above: list[int] = []
        for number, begin in enumerate(rule.pieces[:, 0].tolist()):
            above = [other for other in above if rule.ends[other] > begin]
            past, count = sum(self._lengths[other] for other in above), self._lengths[number]
            self._paths.append([*above, number])
            prefix = int(rule.pieces[number, 1]) - begin
            mask = torch.full((count, past + count), -torch.inf, dtype=dtype, device=device)
            mask = mask.triu(past + 1)
            mask[:prefix, past : past + prefix] = 0
            self._masks.append(mask if past or prefix > 1 else None)
            above.append(number)

    def run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        keys, values = k.split(self._lengths), v.split(self._lengths)
        outputs = []
        for queries, path, mask in zip(
            q.split(self._lengths), self._paths, self._masks, strict=True
        ):
            seen, carried = (
                torch.cat([parts[number] for number in path]) for parts in (keys, values)
            )
            given = (queries, seen, carried, mask, mask is None)
            outputs.append(_attend_once(*given, self._scores, sinks))
        return torch.cat(outputs)
