"""The block mask of a row from its pieces, without looking at pairs of tokens.

torch's `create_block_mask` asks the rule about each of T² pairs, for each row anew. Here the keys that a query sees lie
side by side, and both ends only move on as queries do. So the first and last query of a block of queries tell all:
what either sees or what lies between is looked at, and what both see, all between them see. O(row) and O(blocks²).
"""

from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from penstock.inputs import AttentionRule
from penstock.models.attention.flex_mask import MaskMod

BLOCK = 128
"""Queries and keys of a block: FlexAttention's own size."""


def block_mask(rule: AttentionRule, mask_mod: MaskMod, device: torch.device) -> BlockMask:
    """The same blocks as `create_block_mask(mask_mod, None, None, T, T, device=device)` finds.

    Args:
        rule: Whom each slot sees.
        mask_mod: The same rule, for the blocks that are seen in part.
        device: Where it is used.
    """
    some, whole = _blocks(rule)
    part = _in_order(some & ~whole, device)
    full = _in_order(whole, device)
    return BlockMask.from_kv_blocks(*part, *full, BLOCK, mask_mod, (rule.num_slots, rule.num_slots))


def _blocks(rule: AttentionRule) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """[blocks of queries, blocks of keys]: whether any pair sees, and whether all do."""
    slots = np.arange(rule.num_slots)
    begins, prefix_ends, _ = rule.pieces[rule.document_ids].T
    ends = np.maximum(slots + 1, prefix_ends)
    firsts = slots[::BLOCK]
    lasts = np.minimum(firsts + BLOCK, rule.num_slots) - 1
    some = (firsts <= ends[lasts, None] - 1) & (begins[firsts, None] <= lasts)
    whole = (begins[lasts, None] <= firsts) & (lasts < ends[firsts, None])
    # A last block that is not full counts as seen in part: so do the queries and keys that it lacks.
    complete = lasts - firsts == BLOCK - 1
    return some, whole & complete[:, None] & complete


def _in_order(blocks: np.ndarray[Any, Any], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of queries has, [1, 1, n], and their numbers first, [1, 1, n, n]."""
    counts = blocks.sum(1, dtype=np.int32)
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts[None, None]).to(device), torch.from_numpy(order[None, None]).to(device)
