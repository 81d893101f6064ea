"""Attention backends: a dense mask, calls per document, and FlashAttention over documents of
different lengths.

A document that is a prefix tree takes a causal call for each node, and one without a mask for each
node with children: its whole subtree, which stands behind it without a gap, sees all of it. The two
are joined by their log-sum-exps, as FlashAttention joins blocks of keys (Dao et al. 2022,
arXiv:2205.14135).

`dense` is one call with a mask of all pairs: T² bytes and T² products, so for tests and small rows.

`varlen` is FlashAttention over all documents in one call, for half precision on CUDA and causal
attention only (`varlen.py`).

`per_document` computes no products between documents, which suits the CPU. A document with a prefix
takes two calls: the prefix in full, and the rest, which sees the whole document up to itself. The
rest has more keys than queries, but torch's `is_causal` is aligned top-left, so it gets a mask that
is aligned bottom-right. (A causal call over the whole document with the prefix written over it
needs no mask, but is 1.0 to 1.7 times slower for prefixes of half a document and more, because
torch's CPU kernel skips little of what is masked.)

With a sliding window, a document takes a call for each block of queries as long as the window,
over at most two windows of keys: O(T × window).

On the CPU, `per_document` is one torch operation with its own backward pass, so documents are data:
a compiled model is not recompiled for each row, and autograd has one node instead of several per
document. Masks live only during their call, so memory is O(row). It calls the kernel that
`scaled_dot_product_attention` uses on the CPU, with results equal bit for bit. On other devices it
is a series of `scaled_dot_product_attention` calls, outside of compiled code; masks for documents
with prefixes are made once per row, with rest × document numbers each.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.arrays import Int64
from penstock.models.attention.compiling import any_number, outside_graphs
from penstock.models.attention.kernels import HALF, attend_heads
from penstock.models.attention.sinks import add_sinks, sink_gradients
from penstock.models.attention.softcap import (
    capped_attention,
    capped_kernel,
    capped_kernel_backward,
)
from penstock.models.attention.varlen import (
    Bounds,
    causal_settings,
    flash_name,
    prepare_varlen,
)
from penstock.models.attention.varlen import find_varlen as _find_varlen
from penstock.plan.inputs import AttentionRule

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Attend(Protocol):
    """Attention of a row."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q [T, heads, dim], k [T, kv_heads, dim], v as k, sinks [heads] → [T, heads, dim]."""


@final
@dataclass(frozen=True, slots=True)
class Scores:
    """What becomes of scores besides the rule of the row."""

    window: int | None = None
    """Maximum tokens that a token sees, including itself; None: all before it."""
    softcap: float | None = None
    """Scores are kept within ± this number; None: they are as they come."""


PLAIN = Scores()


class Refusal(Protocol):
    """Whether a backend supports such a row."""

    def __call__(
        self,
        rule: AttentionRule,
        device: torch.device,
        dtype: torch.dtype,
        scores: Scores = PLAIN,
    ) -> str | None:
        """Why it does not, as the end of a sentence that begins with its name; None: it does."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One way to compute attention over a row."""

    name: str
    """Name by which users choose it."""
    refusal: Refusal
    prepare: Callable[[AttentionRule, torch.device, torch.dtype, Scores], Attend]
    """Prepare what all layers need: masks, lengths."""


def never(
    rule: AttentionRule, device: torch.device, dtype: torch.dtype, scores: Scores = PLAIN
) -> None:
    """The refusal of a backend that supports every row."""


def _prepare_dense(
    rule: AttentionRule, device: torch.device, dtype: torch.dtype, scores: Scores
) -> Attend:
    mask = torch.from_numpy(rule.dense_mask()).to(device)
    if scores.window is not None:
        # By positions, which differ from slots in a tree.
        positions = torch.from_numpy(rule.positions).to(device)
        mask &= positions[:, None] - positions < scores.window

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        if scores.softcap is None and sinks is None:
            return attend_heads(q, k, v, mask=mask)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return capped_attention(q, k, v, mask, scores.softcap, sinks).transpose(0, 1)

    return attend


DENSE = Backend(name="dense", refusal=never, prepare=_prepare_dense)


def _prepare_varlen(
    rule: AttentionRule, device: torch.device, dtype: torch.dtype, scores: Scores
) -> Attend:
    function = _find_varlen()
    assert function is not None, "refused before"
    flash_name(device.type)
    bounds = Bounds.of(rule.cu_seqlens, rule.cu_seqlens, device)
    return prepare_varlen(function, bounds, scores.window)


def _refusal(
    rule: AttentionRule, device: torch.device, dtype: torch.dtype, scores: Scores = PLAIN
) -> str | None:
    if device.type != "cuda" or dtype not in HALF:
        return (
            "runs in float16 and bfloat16 on cuda only, not in "
            f"{str(dtype).removeprefix('torch.')} on {device.type}"
        )
    if rule.bidirectional:
        return "supports causal attention only, and this row has bidirectional prefixes"
    if rule.forked:
        return "has no attention over prefix trees, and this row has one"
    if scores.softcap is not None:
        return f"cannot keep scores within {scores.softcap:g}"
    function = _find_varlen()
    if function is None:
        return (
            f"needs torch.nn.attention.varlen, which torch {torch.__version__} does not have "
            "(2.10 and later do)"
        )
    if scores.window is not None and causal_settings(function) == {"is_causal": True}:
        return f"does not support sliding windows in torch {torch.__version__}"
    return None


VARLEN = Backend(name="varlen", refusal=_refusal, prepare=_prepare_varlen)


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


def heads_first(x: Tensor) -> Tensor:
    """[tokens, heads, dim] → [1, heads, tokens, dim]."""
    return x.transpose(0, 1).unsqueeze(0)


def tokens_first(x: Tensor) -> Tensor:
    """[1, heads, tokens, dim] → [tokens, heads, dim]."""
    return x.squeeze(0).transpose(0, 1)


def plain_heads(x: Tensor) -> Tensor:
    """`x` with contiguous heads, which the kernel assumes."""
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("penstock::attend_documents", mutates_args=(), device_types="cpu")
def attend_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pieces: Tensor,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each document to itself.

    Args:
        q: [T, heads, dim].
        k: [T, kv_heads, dim].
        v: [T, kv_heads, dim].
        pieces: int64 [4 × pieces]: begin, end of the prefix, end, end of the subtree of each; as in
            `AttentionRule`.
        window: Maximum tokens that a token sees, including itself; None: all before it.
        softcap: Scores are kept within ± this number; None: they are as they come.
        sinks: [heads]; None: there are none.

    Returns:
        [T, heads, dim], and the log-sum-exp that the backward pass needs, [heads, T].
    """
    q, k, v = plain_heads(q), plain_heads(k), plain_heads(v)
    sums = _empty_sums(q)
    made = list(calls(pieces.view(-1, 4).tolist(), window))
    # Outputs to which others are added must not be rounded in between.
    out = torch.empty(q.shape, dtype=sums.dtype if made[-1].adds else q.dtype)
    for call in made:
        mask = call.mask(window, q.device, q.dtype)
        queries, keys, values = map(heads_first, (q[call.queries], k[call.keys], v[call.keys]))
        if softcap is None:
            found, logs = flash(queries, keys, values, 0.0, call.causal, attn_mask=mask)
        else:
            found, logs = capped_kernel(queries, keys, values, call.causal, mask, softcap)
        if call.adds:
            join_attention(out[call.queries], sums[:, call.queries], tokens_first(found), logs[0])
        else:
            out[call.queries] = tokens_first(found)
            sums[:, call.queries] = logs[0]
    if sinks is not None:
        out, sums = add_sinks(out, sums, sinks)
    return out.to(q.dtype), sums


def join_attention(out: Tensor, sums: Tensor, found: Tensor, logs: Tensor) -> None:
    """Join attention over more keys into `out` [queries, heads, dim] with its log-sum-exps [heads,
    queries].
    """
    joined = torch.logaddexp(sums, logs)
    out.mul_((sums - joined).exp().T[..., None]).add_(found * (logs - joined).exp().T[..., None])
    sums.copy_(joined)


def _empty_sums(q: Tensor) -> Tensor:
    return q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("penstock::attend_documents_backward", mutates_args=(), device_types="cpu")
def attend_documents_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    pieces: Tensor,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; those of keys that several calls see are summed."""
    gradient, q, k, v = gradient.contiguous(), plain_heads(q), plain_heads(k), plain_heads(v)
    q_gradient, k_gradient, v_gradient = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
    )
    for call in calls(pieces.view(-1, 4).tolist(), window):
        mask = call.mask(window, q.device, q.dtype)
        queries, keys = call.queries, call.keys
        given = (gradient[queries], q[queries], k[keys], v[keys], out[queries])
        heads = [*map(heads_first, given), sums[None, :, queries]]
        if softcap is None:
            found = flash_backward(*heads, 0.0, call.causal, attn_mask=mask)
        else:
            found = capped_kernel_backward(heads, call.causal, mask, softcap)
        of_q, of_k, of_v = found
        if call.adds:
            q_gradient[queries] += tokens_first(of_q)
        else:
            q_gradient[queries] = tokens_first(of_q)
        k_gradient[keys] += tokens_first(of_k)
        v_gradient[keys] += tokens_first(of_v)
    return q_gradient, k_gradient, v_gradient


@attend_documents.register_fake
def _(q, k, v, pieces, window=None, softcap=None, sinks=None):  # type: ignore[no-untyped-def]
    return torch.empty_like(q, memory_format=torch.contiguous_format), _empty_sums(q)


@attend_documents_backward.register_fake
def _(gradient, q, k, v, *rest):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, pieces, ctx.window, ctx.softcap, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, pieces, sinks)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, gradient, _):  # type: ignore[no-untyped-def]
    *given, sinks = ctx.saved_tensors
    found = attend_documents_backward(gradient, *given, ctx.window, ctx.softcap)
    of_sinks = None if sinks is None else sink_gradients(gradient, given[3], given[4], sinks)
    return *found, None, None, None, of_sinks


attend_documents.register_autograd(_backward, setup_context=_remember)


def prepare_operation(rule: AttentionRule, scores: Scores = PLAIN) -> Attend:
    """Attention per document, as one operation on the CPU."""
    # In one dimension, whose length is never 1: torch would compile a row of one piece by itself.
    pieces = any_number(torch.from_numpy(_with_reach(rule).reshape(-1)))
    window, softcap = scores.window, scores.softcap

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        out: Tensor = attend_documents(q, k, v, pieces, window, softcap, sinks)[0]
        return out

    return attend


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
        self._made = list(calls(_with_reach(rule).tolist(), scores.window))
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
            mask = torch.full((count, past + count), -torch.inf, dtype=dtype, device=device)
            self._masks.append(mask.triu(past + 1) if past else None)
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


def _with_reach(rule: AttentionRule) -> Int64:
    """[pieces, 4] int64: those of the rule, and the end of each one's subtree."""
    return np.column_stack([rule.pieces, rule.ends]).astype(np.int64)


def _prepare_per_document(
    rule: AttentionRule, device: torch.device, dtype: torch.dtype, scores: Scores
) -> Attend:
    if device.type == "cpu":
        return prepare_operation(rule, scores)
    return prepare_calls(rule, device, dtype, scores)


def _refuse_windows_in_trees(
    rule: AttentionRule, device: torch.device, dtype: torch.dtype, scores: Scores = PLAIN
) -> str | None:
    if scores.window is None or not rule.forked:
        return None
    return "does not support sliding windows in prefix trees, which 'dense' does"


PER_DOCUMENT = Backend(
    name="per_document", refusal=_refuse_windows_in_trees, prepare=_prepare_per_document
)
