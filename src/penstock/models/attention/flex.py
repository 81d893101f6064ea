"""FlexAttention: any mask in blocks, without the blocks that no query sees. For prefixes on CUDA.

torch's `create_block_mask` evaluates the rule for each of T² pairs, again for each row. Here the
block mask is made from the row's pieces, in O(row) + O(blocks²). Without prefixes, a key is seen
from its own slot to the end of its piece's subtree: a block of keys is seen by a block of queries
after it if its farthest key reaches the first query, and by all of it if its nearest reaches the
last. With prefixes, the keys that a query sees are contiguous, and both ends only move forward with
the query. So the first and last query of a block suffice: the block sees all keys that either sees
or that lie between these, and keys that both see are seen by all queries between them. A sliding
window hides blocks of keys that lie before it; in trees, where windows count positions, it only
makes blocks seen in part. In trees whose nodes have prefixes, as in block diffusion, the queries
that see a key follow each other, and blocks are found key by key.

Scores within a number are its `score_mod`; sinks take its log-sum-exps, which have gradients.

On the CPU torch has no backward pass for it and runs it unfused. That suits inspecting a mask, so
it is supported there without gradients and refused with them.
"""

import inspect
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError
from penstock.models.attention.backends import Backend
from penstock.models.attention.calls import PLAIN, Attend, Scores
from penstock.models.attention.sinks import add_sinks
from penstock.plan.inputs import AttentionRule
from penstock.plan.inputs.torch_tensors import on_device

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) → whether the query sees the key: FlexAttention's `mask_mod`."""

BLOCK = 128
"""Queries and keys of a block: FlexAttention's own size."""


def tree_mask_mod(reach: Tensor) -> MaskMod:
    """The attention rule of prefix trees as a `mask_mod`.

    Args:
        reach: [T], end of the subtree of each slot's node, on the device of the attention.
    """
    return lambda batch, head, query, key: (key <= query) & (query < reach[key])


def ranges_mask_mod(first: Tensor, end: Tensor) -> MaskMod:
    """The attention rule as a `mask_mod`, for trees whose nodes have prefixes, too.

    Args:
        first: [T], first query that sees each key, on the device of the attention.
        end: [T], one after the last.
    """
    return lambda batch, head, query, key: (first[key] <= query) & (query < end[key])


def flex_mask_mod(document_ids: Tensor, prefix: Tensor | None = None) -> MaskMod:
    """The attention rule as a `mask_mod`, for `create_block_mask` and `create_mask` of
    FlexAttention.

    Args:
        document_ids: [T], number of each slot's document, on the device of the attention.
        prefix: bool [T], whether the slot is in its document's prefix; None: all attention is
            causal.
    """
    if prefix is None:
        return lambda batch, head, query, key: (
            (document_ids[query] == document_ids[key]) & (key <= query)
        )
    return lambda batch, head, query, key: (
        (document_ids[query] == document_ids[key])
        & ((key <= query) | (prefix[query] & prefix[key]))
    )


def window_mask_mod(mask_mod: MaskMod, window: int, positions: Tensor | None) -> MaskMod:
    """A `mask_mod` without keys that are `window` or more before the query.

    Args:
        mask_mod: The rule without the window.
        window: Maximum tokens that a token sees, including itself.
        positions: [T], position of each slot in its document; None: those of slots, which differ by
            as much without trees.
    """
    if positions is None:
        return lambda batch, head, query, key: (
            mask_mod(batch, head, query, key) & (query - key < window)
        )
    return lambda batch, head, query, key: (
        mask_mod(batch, head, query, key) & (positions[query] - positions[key] < window)
    )


def block_mask(
    rule: AttentionRule, mask_mod: MaskMod, device: torch.device, window: int | None = None
) -> BlockMask:
    """The same blocks as `create_block_mask(mask_mod, None, None, T, T, device=device)`; with a
    window in trees, there are blocks that no query sees.

    Args:
        rule: Which slots each slot sees.
        mask_mod: The same rule, for the blocks that are seen in part.
        device: Where it is used.
        window: That of `mask_mod`; None: it has none.
    """
    some, whole = _blocks(rule)
    if window is not None:
        whole = whole & _near(rule, window, whole=True)
        some = some & _near(rule, window, whole=False)
    part = _in_order(some & ~whole, device)
    full = _in_order(whole, device)
    return BlockMask.from_kv_blocks(*part, *full, BLOCK, mask_mod, (rule.num_slots, rule.num_slots))


def _blocks(rule: AttentionRule) -> tuple[Array, Array]:
    """[blocks of queries, blocks of keys]: whether any query sees any key, and whether all see
    all.
    """
    slots = np.arange(rule.num_slots)
    firsts = slots[::BLOCK]
    lasts = np.minimum(firsts + BLOCK, rule.num_slots) - 1
    if rule.bidirectional and rule.forked:
        first, end = rule.seen_by
        # Keys of a block may be seen by queries with others between them, so each key is asked.
        seen = (first <= lasts[:, None]) & (firsts[:, None] < end)
        some = np.logical_or.reduceat(seen, firsts, axis=1)
        latest, nearest = np.maximum.reduceat(first, firsts), np.minimum.reduceat(end, firsts)
        whole = (latest <= firsts[:, None]) & (lasts[:, None] < nearest)
    elif rule.bidirectional:
        begins, prefix_ends, _ = rule.pieces[rule.document_ids].T
        ends = np.maximum(slots + 1, prefix_ends)
        some = (firsts <= ends[lasts, None] - 1) & (begins[firsts, None] <= lasts)
        whole = (begins[lasts, None] <= firsts) & (lasts < ends[firsts, None])
    else:
        reach = rule.ends[rule.document_ids]
        farthest, nearest = (of.reduceat(reach, firsts) for of in (np.maximum, np.minimum))
        blocks = np.arange(len(firsts))
        before = blocks < blocks[:, None]
        some = (before & (firsts[:, None] < farthest)) | (blocks == blocks[:, None])
        whole = before & (lasts[:, None] < nearest)
    # A last block that is not full counts as partly seen, like the queries and keys that it lacks.
    complete = lasts - firsts == BLOCK - 1
    return some, whole & complete[:, None] & complete


def _near(rule: AttentionRule, window: int, *, whole: bool) -> Array:
    """bool [blocks, blocks]: whether a window can show some keys of a block to some queries of
    another, or does show all to all.
    """
    firsts = np.arange(0, rule.num_slots, BLOCK)
    lasts = np.minimum(firsts + BLOCK, rule.num_slots) - 1
    if rule.forked:
        # Positions of a branch begin again behind those of its siblings.
        return np.full((len(firsts), len(firsts)), not whole)
    far, near = lasts[:, None] - firsts, firsts[:, None] - lasts
    return (far if whole else near) < window


def _in_order(blocks: Array, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of key blocks of each query block, [1, 1, n], and block numbers with these first, [1,
    1, n, n].
    """
    counts = blocks.sum(1, dtype=np.int32)
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return on_device(counts[None, None], device), on_device(order[None, None], device)


def _prepare(
    rule: AttentionRule, device: torch.device, dtype: torch.dtype, scores: Scores
) -> Attend:
    ids = on_device(rule.document_ids, device)
    if rule.forked and rule.bidirectional:
        mask_mod = ranges_mask_mod(*(on_device(bound, device) for bound in rule.seen_by))
    elif rule.forked:
        mask_mod = tree_mask_mod(on_device(rule.ends, device)[ids])
    else:
        mask_mod = flex_mask_mod(
            ids, on_device(rule.prefix, device) if rule.bidirectional else None
        )
    if scores.window is not None:
        positions = on_device(rule.positions, device) if rule.forked else None
        mask_mod = window_mask_mod(mask_mod, scores.window, positions)
    blocks = block_mask(rule, mask_mod, device, scores.window)
    call = _compiled() if device.type == "cuda" else _unfused
    given: dict[str, object] = {"block_mask": blocks}
    if scores.softcap is not None:
        given["score_mod"] = softcap_mod(scores.softcap)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        if device.type == "cpu":
            if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
                raise ConfigError(
                    "attention backend 'flex' has no backward pass on the CPU, and gradients "
                    "are required; take 'per_document' or 'dense', or call it under "
                    "torch.no_grad()"
                )
            # FlexAttention checks the tensors only, not whether gradients are being recorded.
            q, k, v = q.detach(), k.detach(), v.detach()
        grouped = q.shape[1] != k.shape[1]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        if sinks is None:
            out: Tensor = call(q, k, v, enable_gqa=grouped, **given)
            return out.squeeze(0).transpose(0, 1)
        found, sums = _with_sums(call, q, k, v, enable_gqa=grouped, **given)
        return add_sinks(found.squeeze(0).transpose(0, 1), sums.squeeze(0), sinks)[0]

    return attend


def softcap_mod(softcap: float) -> Callable[..., Tensor]:
    """FlexAttention's `score_mod` that keeps scores within ± a number."""
    return lambda score, batch, head, query, key: softcap * torch.tanh(score / softcap)


def _with_sums(call: Any, *heads: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Outputs, and log-sum-exps [1, heads, T]."""
    if "return_aux" not in inspect.signature(flex_attention).parameters:
        found, sums = call(*heads, return_lse=True, **given)
        return found, sums
    from torch.nn.attention.flex_attention import AuxRequest

    found, more = call(*heads, return_aux=AuxRequest(lse=True), **given)
    return found, more.lse


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


def _unfused(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Any:
    with warnings.catch_warnings():
        # Running unfused is intended here.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(q, k, v, **settings)


def _refusal(
    rule: AttentionRule, device: torch.device, dtype: torch.dtype, scores: Scores = PLAIN
) -> str | None:
    if device.type not in ("cuda", "cpu"):
        return f"runs on cuda (and cpu, without gradients), not on {device.type}"
    if device.type == "cpu" and scores != PLAIN:
        limits = (
            f"a sliding window of {scores.window}"
            if scores.softcap is None
            else f"scores within {scores.softcap:g}"
        )
        return f"has {limits} on cuda only, unlike 'per_document' and 'dense'"
    return None


FLEX = Backend(name="flex", refusal=_refusal, prepare=_prepare)
