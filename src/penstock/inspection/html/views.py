"""What the page shows, as plain values: documents told token by token, packed rows, and figures.

Nothing here knows where the values come from, so a file of conversations, a dataset and a mixture share one page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np

from penstock.errors import ConfigError
from penstock.inspection.rows import RowView

Array = np.ndarray[Any, Any]


class Note(NamedTuple):
    """Something that a reader should know about a document; each kind becomes a filter of the page."""

    kind: str
    """A word or two: "disagreement", "truncated", "forged", …"""
    message: str


class Histogram(NamedTuple):
    """Counts of what lies between edges; one edge more than counts."""

    edges: Sequence[float]
    counts: Sequence[int]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageDocument:
    """One conversation or document of n tokens.

    Raises:
        ConfigError: The arrays do not all have n entries, or a role has no name.
    """

    title: str
    origin: str = ""
    """File and line, or row, of the record."""
    pieces: Sequence[str]
    """[n] text of each token, line ends included; the caller says what stands for half a character."""
    ids: Array
    """[n]"""
    loss_weights: Array
    """[n] how much each token counts as a target; 0 = only read."""
    roles: Array | None = None
    """[n] index into `role_names`; −1 = nobody's (what a template writes around the turns). None = no roles."""
    role_names: Sequence[str] = ()
    turns: Array | None = None
    """[n] number of the message, so that neighbours of one role stay apart; None = as the roles change."""
    is_control: Array | None = None
    """[n] bool; None = no control tokens."""
    notes: Sequence[Note] = ()
    ok: bool | None = None
    """Whether the mask is proven; None = nobody checked."""
    checks: Sequence[str] = ()
    """What the proof rests on beside itself: "generation tags agree"."""

    def __post_init__(self) -> None:
        arrays = {"pieces": self.pieces, "loss_weights": self.loss_weights, "roles": self.roles, "turns": self.turns}
        for name, array in {**arrays, "is_control": self.is_control}.items():
            if array is not None and len(array) != len(self.ids):
                raise ConfigError(f"{self.title}: {name} has {len(array)} entries, ids has {len(self.ids)}")
        if self.roles is not None and len(self.roles) and not -1 <= self.roles.min() <= self.roles.max() < self._names:
            raise ConfigError(
                f"{self.title}: roles go from {self.roles.min()} to {self.roles.max()}, expected −1 to "
                f"{self._names - 1}, one for each of role_names"
            )

    @property
    def _names(self) -> int:
        return len(self.role_names)

    @property
    def trained(self) -> int:
        """Tokens with a weight that is not 0."""
        return int(np.count_nonzero(self.loss_weights))

    @property
    def trained_share(self) -> float:
        """Trained tokens of all tokens, 0 to 1."""
        return self.trained / max(1, len(self.ids))


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageData:
    """All that one page shows; parts that are empty are left out of it.

    Raises:
        ConfigError: `other` does not have as many documents.
    """

    title: str
    label: str = ""
    """What these settings are called beside others; "" = the title."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The resolved settings that made the documents."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Counts over everything, of which the documents may be a sample."""
    documents: Sequence[PageDocument] = ()
    rows: Sequence[RowView] = ()
    histograms: Mapping[str, Histogram] | None = None
    """None = length and trained share of `documents`."""
    shares: Mapping[str, Mapping[str, float]] | None = None
    """Title → part → any number of one unit. None = tokens and trained tokens of `documents` by role."""
    control_ids: frozenset[int] = frozenset()
    """Ids that rows show as control tokens."""
    other: "PageData | None" = None
    """The same documents under other settings, to be compared; only these, its settings and its label are shown."""

    def __post_init__(self) -> None:
        if self.other is not None and len(self.other.documents) != len(self.documents):
            raise ConfigError(
                f"{self.title}: {len(self.documents)} documents, but {len(self.other.documents)} under "
                f"{self.other.label or self.other.title}; a comparison needs the same ones in the same order"
            )
