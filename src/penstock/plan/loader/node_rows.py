"""Rows of documents that objectives cut into parts: positions, borders and reach of their nodes."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from penstock.core.arrays import Array, Int32, Records
from penstock.plan.loader._plan_kernels import PIECE
from penstock.plan.loader.rewriting import Rewriting
from penstock.plan.loader.row_extras import RowExtras
from penstock.plan.objectives.objective import Nodes


def nodes_of(
    rewritings: Sequence[Rewriting], pieces: Annotated[Records, PIECE, "pieces"]
) -> list[Nodes | None]:
    """The nodes of each piece; None where its objective makes none."""
    found: list[Nodes | None] = [None] * len(pieces)
    for source, rewriting in enumerate(rewritings):
        if rewriting.makes_nodes:
            mine = np.flatnonzero(pieces["source"] == source)
            for place, nodes in zip(mine.tolist(), rewriting.nodes(pieces[mine]), strict=True):
                found[place] = nodes
    return found


def node_row(
    pieces: Annotated[Records, PIECE, "documents"],
    nodes: Sequence[Nodes | None],
    positions: Array,
    document_ids: Array,
    prefix_lengths: Annotated[Int32, "documents"],
    slots: int,
) -> RowExtras:
    """What a row has besides its arrays; positions and document ids ([slots] or [0]) are corrected.

    Args:
        pieces: Of the row.
        nodes: Of each piece; None: it is one node.
        positions: As the fill wrote them.
        document_ids: As the fill wrote them.
        prefix_lengths: Of each piece, as the fill wrote them.
        slots: Of the row.
    """
    lengths = pieces["length"]
    ends = np.cumsum(lengths)
    begins, reach = [], []
    plain: list[tuple[int, int]] = []
    counts = np.ones(len(pieces), np.int64)
    for number, (own, end) in enumerate(zip(nodes, ends.tolist(), strict=True)):
        at = end - int(lengths[number])
        if own is None:
            begins.append([at])
            reach.append([end])
            plain.append((sum(map(len, begins)) - 1, number))
            continue
        counts[number] = len(own.begins)
        begins.append(own.begins + at)
        reach.append(own.reach + at)
        if len(positions):
            positions[at:end] = own.positions
    used = int(ends[-1]) if len(ends) else 0
    padding = [used] if used < slots else []
    borders = np.concatenate([*begins, padding, [slots]]).astype(np.int32)
    sizes = np.diff(borders)
    if len(document_ids):
        document_ids[:] = np.repeat(np.arange(len(sizes)), sizes)
    # All of a node is its prefix, but for documents of other objectives.
    prefixes = sizes[: len(sizes) - bool(padding)].astype(np.int32)
    for node, number in plain:
        prefixes[node] = prefix_lengths[number]
    return RowExtras(
        cu_seqlens=borders,
        max_seqlen=int(sizes.max(initial=0)),
        source_ids=np.repeat(pieces["source"], counts).astype(np.int32),
        reach=np.concatenate([*reach, [slots] if padding else []]).astype(np.int32),
        paths=None,
        prefix_lengths=prefixes,
        documents=len(pieces),
    )
