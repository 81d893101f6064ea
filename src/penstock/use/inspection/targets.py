"""Rows and documents without a target, counted, and documents with loss weights that are cut; as
warnings for people.

A row without a target costs a pass of the model and trains nothing. A chat that is cut may lose its
answers, or train an answer without its prompt. Both follow from the plan: nothing is filled. In
documents that an objective rewrites, every token with a loss weight counts as a target.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, final

import numpy as np

from penstock.core.arrays import Bool, Int64, Records
from penstock.core.errors import PenstockError
from penstock.data.shards.tables.lengths import LazyNumbers
from penstock.plan.loader import Plan
from penstock.plan.loader._plan_kernels import PIECE
from penstock.plan.loader.extras import too_long_of
from penstock.plan.loader.loader import Loader
from penstock.plan.loader.mixture import CUTTING
from penstock.plan.loader.targets import Targets

FIRST_ROWS = 1000
"""Rows that are looked at before a training."""
_TOGETHER = 1 << 22
"""Documents whose lengths are looked at together."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CutDocuments:
    """The documents with loss weights of one source that are cut."""

    source: str
    documents: int | None
    """Their number; None: not all lengths of a remote dataset are on this machine."""
    of_documents: int
    """Documents of the source."""
    too_long: str
    """How they are cut: split, truncate or keep_end."""
    longer_than: str
    """The limit, in words."""
    cure: str
    """How to raise it."""
    drops: bool
    """Whether documents and parts without a target are left out."""

    def __str__(self) -> str:
        count = "some" if self.documents is None else f"{self.documents:,}"
        return (
            f"source {self.source!r}: {count} of {self.of_documents:,} documents with loss "
            f"weights are longer than {self.longer_than}; {self._consequence()}. So that "
            f"every answer keeps its prompt, set too_long: drop, or {self.cure}"
        )

    def _consequence(self) -> str:
        without = (
            "are left out"
            if self.drops
            else "take slots and train nothing (drop_untrained leaves them out)"
        )
        if self.too_long == "split":
            return (
                "too_long: split trains an answer in a later part without its prompt, and "
                f"parts without a target {without}"
            )
        lost = (
            "answers at their end" if self.too_long == "truncate" else "prompts at their beginning"
        )
        return (
            f"too_long: {self.too_long} cuts off {lost}, and documents without a target in the "
            f"rest {without}"
        )


def find_targets(
    plan: Plan, pieces: Annotated[Records, PIECE, "pieces"], distances: int
) -> Annotated[Bool, "pieces"]:
    """Whether each piece of a plan has a target.

    Args:
        plan: The plan.
        pieces: Some of its pieces.
        distances: Target distances.

    Raises:
        CorruptionError: Loss weights that are read are damaged.
    """
    found = np.zeros(len(pieces), np.bool_)
    for number, (dataset, rewriting) in enumerate(zip(plan.datasets, plan.rewritings, strict=True)):
        mine = np.flatnonzero(pieces["source"] == number)
        found[mine] = Targets(dataset, rewriting, distances).of(pieces[mine])
    return found


def rows_with_targets(
    found: Annotated[Bool, "pieces"], row_starts: Annotated[Int64, "rows+1"]
) -> Annotated[Bool, "rows"]:
    """Whether each row has a target, given whether each of its pieces has one."""
    before = np.concatenate([[0], np.cumsum(found)])
    with_some: Annotated[Bool, "rows"] = before[row_starts[1:]] > before[row_starts[:-1]]
    return with_some


def cut_documents(plan: Plan, number: int) -> CutDocuments | None:
    """The documents of a source that are longer than its limit and are cut; None: there are none
    with loss weights.
    """
    source, dataset, settings = plan.mixture.sources[number], plan.datasets[number], plan.settings
    too_long, limit = too_long_of(source, dataset), plan.limits[number]
    if settings.packing == "concat" or too_long not in CUTTING or not dataset.table.has_spans:
        return None
    if dataset.longest <= limit:
        return None
    begin, end = (round(edge * len(dataset)) for edge in source.slice)
    documents = _longer(dataset.table.lengths, begin, end, limit)
    if documents == 0:
        return None
    longer_than, cure = f"a row of {limit:,} tokens", "give longer rows (sequence_length)"
    if limit == settings.document_tokens(source):
        longer_than, cure = f"max_document_tokens ({limit:,})", "raise max_document_tokens"
    elif limit != settings.sequence_length:
        longer_than = f"the {limit:,} tokens that objective {source.objective.name!r} takes"
    return CutDocuments(
        source=source.name,
        documents=documents,
        of_documents=end - begin,
        too_long=too_long,
        longer_than=longer_than,
        cure=cure,
        drops=plan.untrained_parts[number] is not None,
    )


def _longer(lengths: Any, begin: int, end: int, limit: int) -> int | None:
    """Documents of more than `limit` tokens among begin … end − 1; None: not all lengths are
    here.
    """
    if isinstance(lengths, LazyNumbers) and not lengths.ranges.here.all():
        return None
    parts = (lengths[at : min(at + _TOGETHER, end), 0] for at in range(begin, end, _TOGETHER))
    return sum(int(np.count_nonzero(part > limit)) for part in parts)


def warning_of_rows(
    what: str, without: int, rows: int, documents: Sequence[tuple[str, int]]
) -> str | None:
    """The warning of rows without a target; None: there are none.

    Args:
        what: The rows in words, such as "planned".
        without: Rows without a target.
        rows: All of them.
        documents: (source, documents and parts in these rows that have no target).
    """
    if not without:
        return None
    named = ", ".join(f"{count:,} of source {name!r}" for name, count in documents if count)
    return (
        f"{without:,} of {rows:,} rows {what} have no target, so nothing in them is trained; "
        f"documents without a target: {named}. Prepare them with other loss weights, or leave "
        "them out (for chats: drop_untrained of `penstock prepare`)"
    )


def target_warnings(loader: Loader, max_steps: int) -> list[str]:
    """What to say about targets before a training: rows without one among the first, and documents
    that are cut.

    It raises nothing: what cannot be planned or read ends the look, and the training itself will
    name it at its step.

    Args:
        loader: It does not move. Costs its plan of about `FIRST_ROWS` rows.
        max_steps: Steps of the training, those before the loader's first one among them.
    """
    plan, seen, without = loader.new_plan(), 0, 0
    rows = min(FIRST_ROWS, loader.rows_before(max_steps))
    untrained = np.zeros(len(plan.datasets), np.int64)
    with suppress(PenstockError):
        while seen < rows and (window := plan.next_window()) is not None:
            found = find_targets(plan, window.pieces, loader.requirements.target_distances or 1)
            seen += window.num_rows
            without += int(np.count_nonzero(~rows_with_targets(found, window.row_starts)))
            untrained += np.bincount(window.pieces["source"][~found], minlength=len(untrained))
    names = [source.name for source in loader.mixture.sources]
    of_rows = warning_of_rows(
        "at the beginning", without, seen, list(zip(names, untrained.tolist(), strict=True))
    )
    cut = (cut_documents(plan, number) for number in range(len(plan.datasets)))
    return [*([of_rows] if of_rows else []), *(str(one) for one in cut if one is not None)]
