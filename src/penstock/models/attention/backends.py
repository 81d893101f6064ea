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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from penstock.models.attention.calls import (
    PLAIN,
    Attend,
    Scores,
    calls,
    prepare_calls,
    with_reach,
)
from penstock.models.attention.compiling import any_number
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
from penstock.plan.inputs.torch_tensors import on_device

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
    mask = on_device(rule.dense_mask(), device)
    if scores.window is not None:
        # By positions, which differ from slots in a tree.
        positions = on_device(rule.positions, device)
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
    pieces = any_number(torch.from_numpy(with_reach(rule).reshape(-1)))
    window, softcap = scores.window, scores.softcap

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        out: Tensor = attend_documents(q, k, v, pieces, window, softcap, sinks)[0]
        return out

    return attend


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
