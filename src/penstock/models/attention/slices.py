"""Attention of a slice of a row: some of its queries against all of its keys (context parallelism).

`per_document` computes each of the slice's runs by itself. On the CPU that is one torch operation
with its own backward pass. A causal run of n queries against m keys is two calls, because torch's
causal kernel needs as many keys as queries: the first m − n keys in full, and the last n causally.
All parts that a query sees are joined by their log-sum-exps, so there is never a mask, and memory
is O(row). On other devices, and with sliding windows or limited scores, each stretch of queries is
one call with a mask over the keys that it sees.

`varlen` is FlashAttention over all runs in one call, whose causal masks are aligned at the end of
the keys. The keys of runs are copied one after another: a document that a rank has in several
stretches has its keys copied for each.

`dense` is one call with a mask of all pairs: for tests and small rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.models.attention.backends import (
    VARLEN,
    flash,
    flash_backward,
    heads_first,
    join_attention,
    plain_heads,
    tokens_first,
)
from penstock.models.attention.calls import Attend, Scores
from penstock.models.attention.compiling import any_number
from penstock.models.attention.kernels import attend_heads
from penstock.models.attention.sinks import add_sinks, sink_gradients
from penstock.models.attention.softcap import capped_attention
from penstock.models.attention.varlen import Bounds, find_varlen, flash_name, prepare_varlen
from penstock.plan.inputs import RowSlice
from penstock.plan.inputs.torch_tensors import on_device

BACKENDS = ("per_document", "varlen", "dense")
"""Names of what can attend for a slice."""


def prepare_slice(
    part: RowSlice,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    window: int | None,
    softcap: float | None,
) -> tuple[str, Attend]:
    """The backend, and the attention of q [t, heads, dim] to k and v [T', kv_heads, dim] of the
    whole row.

    Args:
        part: Of a row.
        device: Device of queries, keys and values.
        dtype: Their dtype.
        backend: A name of `BACKENDS`, or auto.
        window: Maximum tokens that a token sees, including itself; None: all before it.
        softcap: Scores are kept within ± this number; None: they are as they come.

    Raises:
        ConfigError: The backend is unknown or does not support such a slice; says why, and which
            do.
    """
    if backend not in ("auto", *BACKENDS):
        raise ConfigError(
            f"attention backend {backend!r} knows no slices of rows; take auto, "
            f"{', '.join(BACKENDS)}"
        )
    if window is not None and part.rule.bidirectional:
        raise ConfigError(
            f"a sliding window of {window} tokens and a bidirectional prefix exclude each "
            "other; take a model without sliding_window, or an objective with "
            "bidirectional=False"
        )
    reason = _refusal(part, device, dtype, window, softcap)
    if backend == "varlen" and reason is not None:
        raise ConfigError(
            f"attention backend 'varlen' {reason}; for this slice take per_document or dense"
        )
    if backend == "auto":
        backend = "per_document" if reason is not None else "varlen"
    if backend == "varlen":
        return backend, _varlen(part, device, window)
    if backend == "dense":
        return backend, _masked([_Stretch.whole(part)], part, device, window, softcap)
    if window is not None and window >= int(part.rule.positions.max()) + 1:
        window = None
    if device.type == "cpu" and window is None and softcap is None:
        return backend, _operation(part)
    return backend, _masked(list(_stretches(part, window)), part, device, window, softcap)


def _refusal(
    part: RowSlice,
    device: torch.device,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> str | None:
    """Why `varlen` does not support a slice; None: it does."""
    return VARLEN.refusal(part.rule, device, dtype, Scores(window, softcap))


def _varlen(part: RowSlice, device: torch.device, window: int | None) -> Attend:
    function = find_varlen()
    assert function is not None, "refused before"
    flash_name(device.type)
    attend_runs_of = prepare_varlen(function, Bounds.of(*part.lengths, device), window)
    places = any_number(on_device(part.keys, device))

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attend_runs_of(q, k[places], v[places], sinks)

    return attend


@final
@dataclass(frozen=True, slots=True)
class _Stretch:
    """Queries of a slice, one after another in it, and all keys that some of them see."""

    queries: slice
    keys: slice | np.ndarray[tuple[int], np.dtype[np.int64]]
    """Places in the row."""
    causal: bool
    """Whether a query sees only keys up to itself; otherwise each sees all."""
    mask: np.ndarray[tuple[int, int], np.dtype[np.bool_]] | None = None
    """Of all pairs, in place of `causal`."""

    @classmethod
    def whole(cls, part: RowSlice) -> "_Stretch":
        """All queries, with the whole row for keys."""
        return cls(
            slice(0, len(part.index)),
            slice(0, len(part.order)),
            causal=False,
            mask=part.dense_mask(),
        )


def _stretches(part: RowSlice, window: int | None) -> Iterator[_Stretch]:
    """Those of a slice, in the order of their queries; without keys that a sliding window hides
    from all of them.
    """
    if part.rule.bidirectional and part.rule.forked:
        yield from _stretches_of_nodes(part)
        return
    if part.rule.bidirectional:
        runs = [
            (run, causal)
            for causal, some in ((True, part.runs), (False, part.full_runs))
            for run in some.tolist()
        ]
        for (begin, end, first, last), causal in sorted(runs):
            yield _Stretch(slice(begin, end), slice(first, last), causal)
        return
    full = part.full_runs
    for begin, end, first, last in part.runs.tolist():
        above = full[(full[:, 0] <= begin) & (full[:, 1] >= end), 2:].tolist()
        if window is not None and not above:
            first = max(first, last - (end - begin) - window + 1)
        keys = (
            np.concatenate([np.arange(*one) for one in [*above, (first, last)]])
            if above
            else slice(first, last)
        )
        yield _Stretch(slice(begin, end), keys, causal=True)


def _stretches_of_nodes(part: RowSlice) -> Iterator[_Stretch]:
    """Those of a row with trees whose nodes have prefixes: queries that are in the same runs, with
    the keys of these, and a mask of all pairs.
    """
    runs = np.concatenate([part.runs, part.full_runs])
    seen_from, seen_to = part.rule.seen_by
    cuts = np.unique(runs[:, :2])
    for begin, end in pairwise(cuts.tolist()):
        mine = runs[(runs[:, 0] <= begin) & (runs[:, 1] >= end), 2:]
        keys = np.concatenate([np.arange(*one) for one in mine.tolist()])
        queries = part.index[begin:end, None]
        mask = (seen_from[keys] <= queries) & (queries < seen_to[keys])
        yield _Stretch(slice(begin, end), keys, causal=False, mask=mask)


def _masked(
    stretches: list[_Stretch],
    part: RowSlice,
    device: torch.device,
    window: int | None,
    softcap: float | None,
) -> Attend:
    """A call with a mask for each stretch of queries; masks live only during their call."""
    index, positions = (on_device(x, device) for x in (part.index, part.rule.positions))
    row = torch.arange(len(part.order), device=device)
    made = [
        (one, one.keys if isinstance(one.keys, slice) else on_device(one.keys, device))
        for one in stretches
    ]

    def mask_of(stretch: _Stretch, keys: Tensor) -> Tensor | None:
        queries = index[stretch.queries, None]
        if stretch.mask is not None:
            mask = on_device(stretch.mask, device)
        elif stretch.causal:
            mask = keys <= queries
        else:
            return None
        # By positions, which differ from slots in a tree.
        return mask if window is None else mask & (positions[queries] - positions[keys] < window)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        found = []
        for stretch, keys in made:
            queries, mask = q[stretch.queries], mask_of(stretch, row[keys])
            if softcap is None and sinks is None:
                found.append(attend_heads(queries, k[keys], v[keys], mask=mask))
            else:
                heads, seen, carried = (x.transpose(0, 1) for x in (queries, k[keys], v[keys]))
                out = capped_attention(heads, seen, carried, mask, softcap, sinks)
                found.append(out.transpose(0, 1))
        return torch.cat(found)

    return attend


def _operation(part: RowSlice) -> Attend:
    # In one dimension, whose length is never 1: torch would compile a slice of one call by itself.
    calls = any_number(torch.from_numpy(_calls(part).reshape(-1)))

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        out: Tensor = attend_runs(q, k, v, calls, sinks)[0]
        return out

    return attend


def _calls(part: RowSlice) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[c, 5]: begin and end of queries in the slice, of keys in the row, and 1 where causal with as
    many keys.
    """
    found = [[*run, 0] for run in part.full_runs.tolist()]
    for begin, end, first, last in part.runs.tolist():
        middle = last - (end - begin)
        found.append([begin, end, middle, last, 1])
        if first < middle:
            found.append([begin, end, first, middle, 0])
    return np.array(found, np.int64)


@torch.library.custom_op("penstock::attend_runs", mutates_args=(), device_types="cpu")
def attend_runs(
    q: Tensor, k: Tensor, v: Tensor, calls: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of queries to the keys of all calls that they are in, joined by log-sum-exp.

    Args:
        q: [t, heads, dim].
        k: [T', kv_heads, dim].
        v: [T', kv_heads, dim].
        calls: int64 [5 × c]: begin and end of queries, of keys, and whether causal, with as many
            keys as queries.
        sinks: [heads]; None: there are none.

    Returns:
        [t, heads, dim], and the log-sum-exp that the backward pass needs, [heads, t].
    """
    q, k, v = plain_heads(q), plain_heads(k), plain_heads(v)
    sums = _no_sums(q)
    # Parts must not be rounded before they are joined.
    out = torch.zeros(q.shape, dtype=sums.dtype)
    for begin, end, first, last, causal in calls.view(-1, 5).tolist():
        keys, values = heads_first(k[first:last]), heads_first(v[first:last])
        found, logs = flash(heads_first(q[begin:end]), keys, values, 0.0, bool(causal))
        join_attention(out[begin:end], sums[:, begin:end], tokens_first(found), logs[0])
    if sinks is not None:
        out, sums = add_sinks(out, sums, sinks)
    return out.to(q.dtype), sums


def _no_sums(q: Tensor) -> Tensor:
    """Log-sum-exps of no keys, [heads, t]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=wide, device=q.device)


@torch.library.custom_op("penstock::attend_runs_backward", mutates_args=(), device_types="cpu")
def attend_runs_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, calls: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, summed over calls in float32 or wider."""
    gradient, q, k, v = gradient.contiguous(), plain_heads(q), plain_heads(k), plain_heads(v)
    totals = [torch.zeros(x.shape, dtype=sums.dtype) for x in (q, k, v)]
    for begin, end, first, last, causal in calls.view(-1, 5).tolist():
        queries, keys = slice(begin, end), slice(first, last)
        found = flash_backward(
            heads_first(gradient[queries]),
            heads_first(q[queries]),
            heads_first(k[keys]),
            heads_first(v[keys]),
            heads_first(out[queries]),
            sums[None, :, queries],
            0.0,
            bool(causal),
        )
        for total, slots, more in zip(totals, (queries, keys, keys), found, strict=True):
            total[slots] += tokens_first(more)
    of_q, of_k, of_v = (total.to(x.dtype) for total, x in zip(totals, (q, k, v), strict=True))
    return of_q, of_k, of_v


@attend_runs.register_fake
def _(q, k, v, calls, sinks=None):  # type: ignore[no-untyped-def]
    return torch.empty_like(q, memory_format=torch.contiguous_format), _no_sums(q)


@attend_runs_backward.register_fake
def _(gradient, q, k, v, out, sums, calls):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, calls, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, calls, sinks)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, gradient, _):  # type: ignore[no-untyped-def]
    *given, sinks = ctx.saved_tensors
    of_sinks = None if sinks is None else sink_gradients(gradient, given[3], given[4], sinks)
    return *attend_runs_backward(gradient, *given), None, of_sinks


attend_runs.register_autograd(_backward, setup_context=_remember)
