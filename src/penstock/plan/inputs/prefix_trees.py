"""Sequences with common beginnings in one row, where each common beginning is stored and computed
once.

    [1 2 3 4], [1 2 3 5 6], [7]   →   slots 1 2 3 | 4 | 5 6 | 7,   ends of their subtrees 6 | 4 | 6 | 7

A row's pieces are then the nodes of prefix trees, depth first; `ModelInput.reach` says where the
subtree of each ends, and `AttentionRule` who sees whom. Costs: sorting, and a few list operations
for each sequence.
"""  # noqa: E501

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np

from penstock.core.arrays import Int64
from penstock.plan.inputs.attention import AttentionRule
from penstock.plan.inputs.model_input import IGNORE, ModelInput

LEAST_SHARED = 16
"""Tokens that a node with children has, at least: a shorter common beginning costs more calls than
it saves.
"""

Ids = tuple[int, ...]


def tree_rows(sequences: Sequence[Ids], row_slots: int) -> Iterator[list[Ids]]:
    """Cut sequences into rows of at most `row_slots` slots, next to those with which they share
    most.

    Args:
        sequences: None is empty; in lexicographic order.
        row_slots: Slots of a row; a longer sequence gets its own row.
    """
    row: list[Ids] = []
    used = 0
    for one in sequences:
        # At most: what a node is too short for is not shared.
        cost = len(one) - (max(0, _common(row[-1], one) - LEAST_SHARED + 1) if row else 0)
        if row and used + cost > row_slots:
            yield row
            row, used, cost = [], 0, len(one)
        row.append(one)
        used += cost
    if row:
        yield row


def pack_trees(sequences: Sequence[Ids]) -> tuple[ModelInput, list[Annotated[Int64, "tokens"]]]:
    """One row of sequences, without padding; what several begin with stands in it once.

    Args:
        sequences: Different ones, none empty, in lexicographic order.

    Returns:
        The row, without targets; its `source_ids` are 0. And the slots of each sequence's tokens.
    """
    tokens: list[int] = []
    pieces: list[tuple[int, int]] = []
    reach: list[int] = []
    slots: list[Any] = []
    _add_nodes(sequences, 0, np.empty(0, np.int64), tokens, pieces, reach, slots)
    begins, ends = np.array(pieces, np.int64).T
    rule = AttentionRule(np.stack([begins, begins, ends], axis=1), np.array(reach, np.int64))
    count = len(tokens)
    row = ModelInput(
        tokens=np.array(tokens, np.int32),
        targets=np.full((1, count), IGNORE, np.int32),
        loss_weights=None,
        positions=rule.positions.astype(np.int32),
        document_ids=None,
        cu_seqlens=rule.cu_seqlens,
        max_seqlen=int((ends - begins).max()),
        num_tokens=count,
        source_ids=np.zeros(len(pieces), np.int32),
        reach=rule.ends.astype(np.int32) if rule.forked else None,
    )
    return row, slots


def _add_nodes(
    group: Sequence[Ids],
    depth: int,
    above: Annotated[Int64, "depth"],
    tokens: list[int],
    pieces: list[tuple[int, int]],
    reach: list[int],
    slots: list[Any],
) -> None:
    """Add the nodes of sequences that share their first `depth` tokens, which stand in the slots
    `above`.
    """
    for run in _runs(group, depth):
        end = len(run[0]) if len(run) == 1 else _common(run[0], run[-1])
        begin, number = len(tokens), len(pieces)
        path = np.concatenate([above, np.arange(begin, begin + end - depth)])
        if end > depth:
            tokens += run[0][depth:end]
            pieces.append((begin, len(tokens)))
            reach.append(len(tokens))
        if len(run[0]) == end:
            # It ends where the others go on, and comes first.
            slots.append(path)
            run = run[1:]
        if run:
            _add_nodes(run, end, path, tokens, pieces, reach, slots)
            if end > depth:
                reach[number] = len(tokens)


def _runs(group: Sequence[Ids], depth: int) -> Iterator[Sequence[Ids]]:
    """The sequences in parts that share enough after their first `depth` tokens to make a node of
    it.
    """
    begin = 0
    for place in range(1, len(group) + 1):
        if place == len(group) or _common(group[place - 1], group[place]) - depth < LEAST_SHARED:
            yield group[begin:place]
            begin = place


def _common(one: Ids, other: Ids) -> int:
    """Tokens at the beginning that are equal."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
