"""Reasons of rejected records, counted: those that differ only in names, numbers and quotations
count together.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, final

from penstock.core.json_values import JsonMapping
from penstock.data.sources import Reject

SHOWN = 12
"""Reasons that a table shows."""
KINDS = 200
"""Maximum number of reasons that are counted separately; later ones count as `OTHER`."""
OTHER = "other reasons"
_LONG = 24
"""Characters up to which a quotation is part of a reason, such as the name of a role."""
_VARIED = re.compile(r"(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')|\([^()]*\)|(\d[\d,.]*)")
"""A quotation, something in brackets, or a number."""


def kind_of(reason: str) -> str:
    """The reason without what varies from record to record, and without its cure."""
    head = reason.partition("; ")[0]
    return " ".join(_VARIED.sub(_shortened, head).split()) or reason[:80]


def _shortened(found: re.Match[str]) -> str:
    if found[1] is not None:
        return found[1] if len(found[1]) <= _LONG else "…"
    return "N" if found[2] is not None else ""


@final
@dataclass(slots=True)
class Reasons:
    """Counts of rejected records by reason."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    """Reason → the first such record: `file:line`."""

    def add(self, reject: Reject) -> None:
        """Count one more."""
        self._count(kind_of(reject.reason), 1, f"{reject.file}:{reject.line}")

    def update(self, other: JsonMapping) -> None:
        """Add others, as `as_json` gave them."""
        for kind, (count, example) in other.items():
            self._count(kind, count, example)

    def _count(self, kind: str, count: int, example: str) -> None:
        if kind not in self.counts and len(self.counts) >= KINDS:
            kind = OTHER
        self.counts[kind] = self.counts.get(kind, 0) + count
        self.examples.setdefault(kind, example)

    def as_json(self) -> dict[str, list[Any]]:
        """Reason → how many, and the first."""
        return {kind: [count, self.examples[kind]] for kind, count in self.counts.items()}

    @classmethod
    def total(cls, some: Iterable[JsonMapping]) -> "Reasons":
        """The sum of several."""
        whole = cls()
        for one in some:
            whole.update(one)
        return whole

    def lines(self) -> list[str]:
        """A table, the most frequent first."""
        ordered = sorted(self.counts.items(), key=lambda one: -one[1])
        shown = [
            f"{count:>10,}  {kind}; the first: {self.examples[kind]}"
            for kind, count in ordered[:SHOWN]
        ]
        rest = ordered[SHOWN:]
        return shown + (
            [f"{sum(count for _, count in rest):>10,}  for {len(rest):,} other reasons"]
            if rest
            else []
        )
