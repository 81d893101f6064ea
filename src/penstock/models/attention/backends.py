"""Attention backends: a dense mask, calls per document, and FlashAttention over documents of
different lengths.

A document that is a prefix tree takes a causal call for each node, and one without a mask for each
node with children: its whole subtree, which stands behind it without a gap, sees all of it. The two
are joined by their log-sum-exps, as FlashAttention joins blocks of keys (Dao et al. 2022,
arXiv:2205.14135).

`dense` is one call with a mask of all pairs: T² bytes and T² products, so for tests and small rows.

`varlen` is FlashAttention over all documents in one call, for half precision on CUDA and causal
attention only. `varlen_attn` exists since torch 2.10. Its argument for causal attention was first
`is_causal`, later a window with nothing to the right (−1, 0); which one this torch has is looked
up.

`per_document` computes no products between documents, which suits the CPU. A document with a prefix
takes two calls: the prefix in full, and the rest, which sees the whole document up to itself. The
rest has more keys than queries, but torch's `is_causal` is aligned top-left, so it gets a mask that
is aligned bottom-right. (A causal call over the whole document with the prefix written over it
needs no mask, but is 1.0 to 1.7 times slower for prefixes of half a document and more, because
torch's CPU kernel skips little of what is masked.)

On the CPU, `per_document` is one torch operation with its own backward pass, so documents are data:
a compiled model is not recompiled for each row, and autograd has one node instead of several per
document. Masks live only during their call, so memory is O(row). It calls the kernel that
`scaled_dot_product_attention` uses on the CPU, with results equal bit for bit. On other devices it
is a series of `scaled_dot_product_attention` calls; masks for documents with prefixes are made once
per row, with rest × document numbers each.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError
from penstock.plan.inputs import AttentionRule

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [T, heads, dim], k [T, kv_heads, dim], v [T, kv_heads, dim]) → [T, heads, dim]."""

HALF = (torch.float16, torch.bfloat16)
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One way to compute attention over a row."""

    name: str
    """Name by which users choose it."""
    refusal: Callable[[AttentionRule, torch.device, torch.dtype], str | None]
    """Why it does not support such a row, as the end of a sentence that begins with its name; None:
    it does.
    """
    prepare: Callable[[AttentionRule, torch.device, torch.dtype], Attend]
    """Prepare what all layers need: masks, lengths."""


def attend_heads(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Scaled dot-product attention of [tokens, heads, dim]; there may be fewer key heads than query
    heads.

    `mask` [queries, keys] is added to the scores (float) or says which keys a query sees (bool).
    torch converts bool to float, and keeps a copy for the backward pass in each layer. `causal` is
    aligned top-left in torch, so it is only right for equal numbers of keys and queries.
    """
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.squeeze(0).transpose(0, 1)


def _prepare_dense(rule: AttentionRule, device: torch.device, dtype: torch.dtype) -> Attend:
    mask = torch.from_numpy(rule.dense_mask()).to(device)
    return lambda q, k, v: attend_heads(q, k, v, mask=mask)


DENSE = Backend(name="dense", refusal=lambda rule, device, dtype: None, prepare=_prepare_dense)


def causal_settings(function: Callable[..., object]) -> dict[str, object]:
    """The keyword arguments for causal attention in this version of `varlen_attn`.

    Raises:
        ConfigError: It has neither of the known arguments.
    """
    known = inspect.signature(function).parameters
    if "window_size" in known:
        return {"window_size": (-1, 0)}
    if "is_causal" in known:
        return {"is_causal": True}
    raise ConfigError(
        f"varlen_attn of torch {torch.__version__} has neither window_size nor is_causal "
        f"({', '.join(known)}), which the attention backend 'varlen' needs for causal "
        "attention; take 'flex' or 'per_document'"
    )


def _find_varlen() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def _prepare_varlen(rule: AttentionRule, device: torch.device, dtype: torch.dtype) -> Attend:
    function = _find_varlen()
    assert function is not None, "refused before"
    settings = causal_settings(function)
    grouped_heads = "enable_gqa" in inspect.signature(function).parameters
    bounds = torch.from_numpy(rule.cu_seqlens).to(device)
    longest = int((rule.pieces[:, 2] - rule.pieces[:, 0]).max())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and not grouped_heads:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        grouping = {"enable_gqa": True} if groups > 1 and grouped_heads else {}
        out: Tensor = function(q, k, v, bounds, bounds, longest, longest, **settings, **grouping)
        return out

    return attend


def _refusal(rule: AttentionRule, device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda" or dtype not in HALF:
        return (
            "runs in float16 and bfloat16 on cuda only, not in "
            f"{str(dtype).removeprefix('torch.')} on {device.type}"
        )
    if rule.bidirectional:
        return "supports causal attention only, and this row has bidirectional prefixes"
    if rule.forked:
        return "has no attention over prefix trees, and this row has one"
    if _find_varlen() is None:
        return (
            f"needs torch.nn.attention.varlen, which torch {torch.__version__} does not have "
            "(2.10 and later do)"
        )
    return None


VARLEN = Backend(name="varlen", refusal=_refusal, prepare=_prepare_varlen)


@final
@dataclass(frozen=True, slots=True)
class Call:
    """Queries and keys of one attention call."""

    queries: slice
    keys: slice
    causal: bool
    mask: Tensor | None = None
    """[queries, keys] is added to the scores: 0 or minus infinity."""
    adds: bool = False
    """Whether its keys come on top of those of earlier calls, instead of being all that its queries
    see.
    """


def calls(pieces: list[list[int]], device: torch.device, dtype: torch.dtype) -> Iterator[Call]:
    """The calls for a row, in the order of their queries, from [begin, end of prefix, end, end of
    subtree] of pieces.

    Calls that add keys come last: to each query, those of the root before those of nodes below it.
    """
    for begin, prefix_end, end, _ in pieces:
        if prefix_end <= begin + 1:
            yield Call(slice(begin, end), slice(begin, end), causal=True)
            continue
        yield Call(slice(begin, prefix_end), slice(begin, prefix_end), causal=False)
        if prefix_end < end:
            mask = torch.full(
                (end - prefix_end, end - begin), -torch.inf, dtype=dtype, device=device
            )
            yield Call(
                slice(prefix_end, end), slice(begin, end), False, mask.triu(prefix_end - begin + 1)
            )
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
def attend_documents(q: Tensor, k: Tensor, v: Tensor, pieces: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of each document to itself.

    Args:
        q: [T, heads, dim].
        k: [T, kv_heads, dim].
        v: [T, kv_heads, dim].
        pieces: [pieces, 4] int64: begin, end of the prefix, end, end of the subtree; as in
            `AttentionRule`.

    Returns:
        [T, heads, dim], and the log-sum-exp that the backward pass needs, [heads, T].
    """
    q, k, v = plain_heads(q), plain_heads(k), plain_heads(v)
    sums = _empty_sums(q)
    made = list(calls(pieces.tolist(), q.device, q.dtype))
    # Outputs to which others are added must not be rounded in between.
    out = torch.empty(q.shape, dtype=sums.dtype if made[-1].adds else q.dtype)
    for call in made:
        keys, values = heads_first(k[call.keys]), heads_first(v[call.keys])
        found, logs = flash(
            heads_first(q[call.queries]), keys, values, 0.0, call.causal, attn_mask=call.mask
        )
        if call.adds:
            join_attention(out[call.queries], sums[:, call.queries], tokens_first(found), logs[0])
        else:
            out[call.queries] = tokens_first(found)
            sums[:, call.queries] = logs[0]
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
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, pieces: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; those of keys that both a prefix and its rest see are summed."""
    gradient, q, k, v = gradient.contiguous(), plain_heads(q), plain_heads(k), plain_heads(v)
    q_gradient, k_gradient, v_gradient = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
    )
    for call in calls(pieces.tolist(), q.device, q.dtype):
        of_q, of_k, of_v = flash_backward(
            heads_first(gradient[call.queries]),
            heads_first(q[call.queries]),
            heads_first(k[call.keys]),
            heads_first(v[call.keys]),
            heads_first(out[call.queries]),
            sums[None, :, call.queries],
            0.0,
            call.causal,
            attn_mask=call.mask,
        )
        if call.adds:
            q_gradient[call.queries] += tokens_first(of_q)
        else:
            q_gradient[call.queries] = tokens_first(of_q)
        k_gradient[call.keys] += tokens_first(of_k)
        v_gradient[call.keys] += tokens_first(of_v)
    return q_gradient, k_gradient, v_gradient


@attend_documents.register_fake
def _(q, k, v, pieces):  # type: ignore[no-untyped-def]
    return torch.empty_like(q, memory_format=torch.contiguous_format), _empty_sums(q)


@attend_documents_backward.register_fake
def _(gradient, q, k, v, out, sums, pieces):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, pieces = inputs
    ctx.save_for_backward(q, k, v, *output, pieces)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, gradient, _):  # type: ignore[no-untyped-def]
    return *attend_documents_backward(gradient, *ctx.saved_tensors), None


attend_documents.register_autograd(_backward, setup_context=_remember)


def prepare_operation(rule: AttentionRule) -> Attend:
    """Attention per document, as one operation on the CPU."""
    pieces = torch.from_numpy(_with_reach(rule))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend_documents(q, k, v, pieces)[0]
        return out

    return attend


def prepare_calls(rule: AttentionRule, device: torch.device, dtype: torch.dtype) -> Attend:
    """Attention per document, as calls of torch's own attention, on any device.

    Queries, keys and values are split, and outputs joined, in one operation each; each slice would
    instead have a backward pass over the whole row.
    """
    if rule.forked:
        return _prepare_paths(rule, device, dtype)
    made = list(calls(_with_reach(rule).tolist(), device, dtype))
    counts = [call.queries.stop - call.queries.start for call in made]
    lengths = (rule.pieces[:, 2] - rule.pieces[:, 0]).tolist()
    documents = {begin: number for number, begin in enumerate(rule.pieces[:, 0].tolist())}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = k.split(lengths), v.split(lengths)
        outputs = []
        for call, queries in zip(made, q.split(counts), strict=True):
            document, seen = documents[call.keys.start], call.keys.stop - call.keys.start
            outputs.append(
                attend_heads(
                    queries,
                    keys[document][:seen],
                    values[document][:seen],
                    mask=call.mask,
                    causal=call.causal,
                )
            )
        return torch.cat(outputs)

    return attend


def _prepare_paths(rule: AttentionRule, device: torch.device, dtype: torch.dtype) -> Attend:
    """Attention over prefix trees on any device: each node sees its path, whose keys are
    concatenated.
    """
    lengths = (rule.pieces[:, 2] - rule.pieces[:, 0]).tolist()
    paths: list[list[int]] = []
    masks: list[Tensor | None] = []
    above: list[int] = []
    for number, begin in enumerate(rule.pieces[:, 0].tolist()):
        above = [other for other in above if rule.ends[other] > begin]
        past, count = sum(lengths[other] for other in above), lengths[number]
        paths.append([*above, number])
        mask = torch.full((count, past + count), -torch.inf, dtype=dtype, device=device).triu(
            past + 1
        )
        masks.append(mask if past else None)
        above.append(number)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = k.split(lengths), v.split(lengths)
        outputs = []
        for queries, path, mask in zip(q.split(lengths), paths, masks, strict=True):
            seen, carried = (
                torch.cat([parts[number] for number in path]) for parts in (keys, values)
            )
            outputs.append(attend_heads(queries, seen, carried, mask=mask, causal=mask is None))
        return torch.cat(outputs)

    return attend


def _with_reach(rule: AttentionRule) -> Int64:
    """[pieces, 4] int64: those of the rule, and the end of each one's subtree."""
    return np.column_stack([rule.pieces, rule.ends]).astype(np.int64)


def _prepare_per_document(rule: AttentionRule, device: torch.device, dtype: torch.dtype) -> Attend:
    return prepare_operation(rule) if device.type == "cpu" else prepare_calls(rule, device, dtype)


PER_DOCUMENT = Backend(
    name="per_document", refusal=lambda rule, device, dtype: None, prepare=_prepare_per_document
)
