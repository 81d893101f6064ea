"""The documents of a step: which document of which source lies where in this rank's rows."""

from dataclasses import dataclass
from typing import Annotated, Self, final

import numpy as np

from penstock.core.arrays import Int64, Records
from penstock.plan.loader._plan_kernels import PIECE


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class StepDocuments:
    """The n documents of a step's rows of this rank, row after row, as they lie there.

    A document that was cut is there once for each of its parts.
    """

    rows: Annotated[Int64, "documents"]
    """[n] row that it lies in, counted among this rank's."""
    sources: Annotated[Int64, "documents"]
    """[n] number of its source in the mixture."""
    numbers: Annotated[Int64, "documents"]
    """[n] its number in its source: in its dataset, or in all its datasets together."""
    first_tokens: Annotated[Int64, "documents"]
    """[n] first of its tokens that is here; above 0 for a later part of a document that was cut."""
    lengths: Annotated[Int64, "documents"]
    """[n] slots that it takes."""

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        rows = len(np.unique(self.rows))
        return f"StepDocuments({len(self)} documents in {rows} rows)"

    @classmethod
    def of(
        cls,
        pieces: Annotated[Records, PIECE, "pieces"],
        row_starts: Annotated[Int64, "rows+1"],
    ) -> Self:
        """Of pieces, as in a window; the first row may begin at any of them."""
        mine = pieces[row_starts[0] : row_starts[-1]]
        return cls(
            rows=np.repeat(np.arange(len(row_starts) - 1), np.diff(row_starts)),
            sources=mine["source"].copy(),
            numbers=mine["document"].copy(),
            first_tokens=mine["begin"].copy(),
            lengths=mine["length"].copy(),
        )
