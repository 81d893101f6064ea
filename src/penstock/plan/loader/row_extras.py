"""What one row has besides its arrays."""

from dataclasses import dataclass
from typing import Annotated, final

from penstock.core.arrays import Int32
from penstock.plan.inputs.paths import RowPaths


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowExtras:
    """What one row has besides its arrays. n nodes: ordinary documents, and the nodes of trees."""

    cu_seqlens: Annotated[Int32, "borders"]
    """[n + 1], or [n + 2] with padding."""
    max_seqlen: int
    source_ids: Annotated[Int32, "pieces"]
    """[n] source of each, without padding."""
    reach: Annotated[Int32, "nodes"] | None
    """End of each node's subtree, padding among them; None: no document forks."""
    paths: RowPaths | None
    """None: no source has trees; the nodes are an objective's."""
    prefix_lengths: Annotated[Int32, "documents"] | None
    """[n] slots of each node that see each other, if an objective makes nodes; None: as the fill
    wrote them.
    """
    documents: int
    """Documents of the row, each tree counted once."""
