"""Whether a model may see several documents in one row: every model says so itself, and all who pack rows ask here.

Who must have packed rows (training, teachers) calls `require_packed_rows`; who can do without (scores, held-out losses)
calls `most_packed`, and gives a longer document, or every document, a row of its own.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, final
from weakref import WeakSet

from penstock.errors import IsolationError

if TYPE_CHECKING:
    from penstock.models.language_model import LanguageModel

_log = logging.getLogger("penstock.models")
_said: "WeakSet[LanguageModel]" = WeakSet()


@final
@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows that hold several documents, which must not see each other."""

    slots: int
    longest: int
    """Tokens of a document, at most."""


@final
@dataclass(frozen=True, slots=True)
class PackingVerdict:
    """What a model says about rows of some number of slots."""

    longest: int
    """Documents of at most this many tokens may share a row; 0: none may."""
    reason: str | None = None
    """Why not documents of any length that the row holds; None: they may."""


def require_packed_rows(model: "LanguageModel", slots: int, longest: int | None = None) -> None:
    """Refuse a model that must not see several documents in one row.

    Args:
        model: What will see them.
        slots: Of the rows.
        longest: Tokens of a document, at most; None: as many as a row has slots.

    Raises:
        IsolationError: Documents of a row would see each other; says how much, and the cure.
    """
    found = model.packing(slots)
    if found.reason is not None and (slots if longest is None else longest) > found.longest:
        raise IsolationError(found.reason)


def most_packed(model: "LanguageModel", slots: int) -> int:
    """Tokens that documents which share a row may have together; 0: each needs a row of its own. Says so once.

    Args:
        model: What will see them.
        slots: Of the rows.
    """
    found = model.packing(slots)
    if found.longest == 0 and model not in _said:
        _said.add(model)
        _log.warning("scores one document a row, which is exact and slower: %s", found.reason)
    return min(found.longest, slots)
