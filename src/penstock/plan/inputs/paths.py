"""The paths of a row: which slots the sequences of its prefix trees have, with the values of each
path.

What is summed or compared by sequence (preferences, rewards) reads these; what is summed by token
needs none of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Self, final

import numpy as np

from penstock.core.arrays import Float64, Int64
from penstock.core.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RowPaths:
    """The paths of one row's documents, one after another. P paths; S slots of all of them, shared
    ones repeatedly.
    """

    slots: Annotated[Int64, "slots"]
    """[S] slot of each token of each path, path after path."""
    starts: Annotated[Int64, "paths+1"]
    """[P + 1] where each path begins in `slots`."""
    documents: Annotated[Int64, "paths"]
    """[P] number of each path's document in the row, counted in documents, not in nodes."""
    values: Mapping[str, Annotated[Float64, "paths"]] = field(default_factory=dict)
    """Name → [P] a value of each path, such as its rank or reward; NaN: not given."""

    def __len__(self) -> int:
        return len(self.documents)

    def __repr__(self) -> str:
        return (
            f"RowPaths({len(self)} paths of {len(np.unique(self.documents))} documents; "
            f"{', '.join(self.values)})"
        )

    def __getitem__(self, path: int) -> Annotated[Int64, "tokens"]:
        """The slots of one path."""
        if not -len(self) <= path < len(self):
            raise IndexError(f"path {path} of {len(self)}")
        path %= len(self)
        return self.slots[self.starts[path] : self.starts[path + 1]]

    def value(self, name: str, who: str) -> Annotated[Float64, "paths"]:
        """A value of each path.

        Raises:
            ConfigError: The data have no such value; says who needs it.
        """
        if name not in self.values:
            known = ", ".join(self.values) or "none"
            raise ConfigError(
                f"{who} needs the value {name!r} of each path, but the data have: {known}"
            )
        return self.values[name]

    @property
    def owners(self) -> Annotated[Int64, "slots"]:
        """[S] number of the path that each entry of `slots` belongs to."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    @classmethod
    def join(cls, rows: "Sequence[RowPaths]", slots_per_row: int, documents: Sequence[int]) -> Self:
        """The paths of rows that lie end to end.

        Args:
            rows: Of each row, with the same values; at least one.
            slots_per_row: Slots of each row.
            documents: Documents of each row.
        """
        before = np.cumsum([0, *documents])
        sizes = np.concatenate([np.diff(row.starts) for row in rows])
        return cls(
            slots=np.concatenate(
                [row.slots + number * slots_per_row for number, row in enumerate(rows)]
            ),
            starts=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            documents=np.concatenate(
                [row.documents + before[number] for number, row in enumerate(rows)]
            ),
            values={
                name: np.concatenate([row.values[name] for row in rows]) for name in rows[0].values
            },
        )
