"""A dry run: what the first steps of a mixture would contain. Plans them, and fills a single
row.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Bool, Int64, Records
from penstock.core.system import peak_memory_bytes
from penstock.plan.loader import Plan, PlanState
from penstock.plan.loader._plan_kernels import PIECE
from penstock.plan.loader._target_kernels import UNTRAINED
from penstock.plan.loader.loader import Loader
from penstock.plan.loader.ramp import Ramp
from penstock.plan.loader.rewriting import Rewriting
from penstock.plan.loader.step_planner import balanced_order
from penstock.plan.objectives.objective import WithTasks
from penstock.use.inspection.rows import rewritings_of
from penstock.use.inspection.targets import (
    CutDocuments,
    cut_documents,
    find_targets,
    rows_with_targets,
    warning_of_rows,
)

TASKS_COUNTED = 4000
"""Maximum number of documents per source that tasks are counted over."""
_RANKS = (2, 4, 8, 16, 32, 64)
"""Numbers of ranks for which the spread of patches is told."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """What one source contributes to the planned steps."""

    name: str
    share: float
    """Requested at the first step, 0 to 1."""
    share_at_end: float
    """Requested at the last step, 0 to 1."""
    share_given: float
    """Of all planned tokens, 0 to 1."""
    tokens: int
    documents: int
    """Documents begun; a split document counts once."""
    pieces: int
    """Documents and parts of split documents in rows."""
    epochs: float
    """Passes over the source's documents."""
    available_documents: int
    """Documents in the source's slice."""
    empty_documents: int
    """Skipped because they have no tokens; this and the counts below include the whole last window
    planned.
    """
    dropped_documents: int
    """Skipped because they are too long."""
    dropped_tokens: int
    """Tokens of dropped documents."""
    truncated_tokens: int
    """Tokens cut off documents that are too long."""
    untrained_documents: int
    """Cut documents of which nothing is left, because loss weights leave no target in the rest."""
    untrained_parts: int
    """Parts left out because they have no target; a truncated document is one part."""
    untrained_tokens: int
    """Tokens of these parts, and all tokens of truncated documents among them."""
    without_targets: int
    """Pieces in rows that have no target."""
    tasks: dict[str, float]
    """Share of documents by task of the objective, 0 to 1, most frequent first; empty if it has no
    tasks. Counted over a sample, spread over all planned documents.
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What the first steps of a mixture would contain."""

    steps: int
    """Steps planned; fewer than requested if the sources end."""
    ended: bool
    """Whether the sources end within the requested steps."""
    rows: int
    sequence_length: int
    rows_per_step: int | Mapping[int, int]
    """A number, or first step → rows from it on."""
    packing: str
    documents_per_row: int | None
    """Maximum documents of a row; None: no limit."""
    max_document_tokens: int | None
    """Maximum tokens of a document; None: as many as a row holds. Sources may have their own."""
    rows_full_of_documents: int
    """Rows that have as many documents as a row may have."""
    rows_without_targets: int
    """Rows in which nothing is trained."""
    cut: tuple[CutDocuments, ...]
    """Documents with loss weights that are cut, by source."""
    tokens: int
    padding: int
    """Slots without a token."""
    pieces: int
    sources: tuple[SourcePlan, ...]
    planning_seconds: float
    row_bytes: int
    """Bytes of the arrays of one row, as a trainer gets them."""
    state_bytes: int
    """Bytes of the loader's state after the last step, as JSON."""
    peak_memory_bytes: int
    """Peak resident memory of this process so far, including mapped shards."""
    row_patches: tuple[float, int] | None
    """Patches of the images of a row, mean and maximum; None: no source has images."""
    patch_spread: dict[int, float]
    """Number of ranks → patches of the busiest rank of a step over the mean of its ranks, mean over
    steps; empty without images. Ranks wait for the busiest.
    """

    @property
    def padding_share(self) -> float:
        """Share of padding in all slots, 0 to 1."""
        return self.padding / max(1, self.tokens + self.padding)

    @property
    def warnings(self) -> list[str]:
        """What a user should know before training: rows without a target, and documents with loss
        weights cut.
        """
        without = [(source.name, source.without_targets) for source in self.sources]
        of_rows = warning_of_rows("planned", self.rows_without_targets, self.rows, without)
        return [*([of_rows] if of_rows else []), *map(str, self.cut)]


def dry_run(loader: Loader, steps: int) -> PlanReport:
    """Plan `steps` steps of a loader and count.

    Args:
        loader: Its place changes. Create it with one row per rank (`data_parallel=(0,
            ramp.divisor)`), so that few rows are filled.
        steps: At least 1.
    """
    settings = loader.settings
    began = time.perf_counter()
    plan = loader.new_plan()
    first = loader.start.step
    wanted = loader.rows_before(first + steps)
    pieces, row_starts = _planned(plan, wanted)
    rows = len(row_starts) - 1
    seconds = time.perf_counter() - began
    targets = find_targets(plan, pieces, loader.requirements.target_distances or 1)
    cut = (cut_documents(plan, number) for number in range(len(plan.datasets)))
    done = settings.ramp.steps(rows + settings.ramp.before(first)) - first
    last = next(iter(loader.seek(first + max(done - 1, 0))))
    tokens = int(pieces["length"].sum())
    patches = loader._plan.row_patches(pieces, row_starts)
    return PlanReport(
        steps=done,
        ended=rows < wanted,
        rows=rows,
        sequence_length=settings.sequence_length,
        rows_per_step=settings.rows_per_step,
        packing=settings.packing,
        documents_per_row=settings.documents_per_row,
        max_document_tokens=settings.max_document_tokens,
        rows_full_of_documents=int(
            np.count_nonzero(np.diff(row_starts) == (settings.documents_per_row or 0))
        ),
        rows_without_targets=int(np.count_nonzero(~rows_with_targets(targets, row_starts))),
        cut=tuple(one for one in cut if one is not None),
        tokens=tokens,
        padding=rows * settings.sequence_length - tokens,
        pieces=len(pieces),
        sources=_by_source(loader, plan.state(), pieces, targets, (first, first + done)),
        planning_seconds=seconds,
        row_bytes=sum(
            getattr(getattr(last[0], field.name), "nbytes", 0) for field in fields(last[0])
        ),
        state_bytes=len(json.dumps(last.resume_state)),
        peak_memory_bytes=peak_memory_bytes(),
        row_patches=None
        if patches is None
        else (float(patches.mean()), int(patches.max(initial=0))),
        patch_spread={} if patches is None else _spread(patches, settings.ramp, first),
    )


def _spread(patches: Annotated[Int64, "rows"], ramp: Ramp, first: int) -> dict[int, float]:
    """See `PlanReport.patch_spread`; steps that are not whole are left out."""
    found: dict[int, list[float]] = {ranks: [] for ranks in _RANKS if ramp.divisor % ranks == 0}
    begin, number = 0, first
    while begin + ramp.rows(number) <= len(patches):
        step = patches[begin : begin + ramp.rows(number)]
        begin, number = begin + len(step), number + 1
        step = step[balanced_order(step)]
        if not step.any():
            continue
        for ranks, ratios in found.items():
            sums = step.reshape(ranks, -1).sum(1)
            ratios.append(float(sums.max() / sums.mean()))
    return {ranks: float(np.mean(ratios)) for ranks, ratios in found.items() if ratios}


def _planned(
    plan: Plan, wanted: int
) -> tuple[Annotated[Records, PIECE, "pieces"], Annotated[Int64, "rows+1"]]:
    """The pieces of the first `wanted` rows of a new plan, and where those of each row begin."""
    parts, starts, rows, pieces = [], [np.zeros(1, np.int64)], 0, 0
    for window in plan.windows():
        taken = min(window.num_rows, wanted - rows)
        parts.append(window.pieces[: window.row_starts[taken]])
        starts.append(window.row_starts[1 : taken + 1] + pieces)
        rows, pieces = rows + taken, pieces + len(parts[-1])
        if rows == wanted:
            break
    return np.concatenate(parts), np.concatenate(starts)


def _by_source(
    loader: Loader,
    end: PlanState,
    pieces: Records,
    targets: Annotated[Bool, "pieces"],
    steps: tuple[int, int],
) -> tuple[SourcePlan, ...]:
    begin, stop = steps
    first, last = (
        np.array(loader.mixture.shares_at(step)) for step in (begin, max(stop - 1, begin))
    )
    total = max(1, int(pieces["length"].sum()))
    all_untrained = (
        np.zeros(len(end.skipped), UNTRAINED) if end.untrained is None else end.untrained
    )
    found = []
    sources = zip(loader.mixture.sources, loader.datasets, rewritings_of(loader), strict=True)
    for number, (source, dataset, rewriting) in enumerate(sources):
        of_source = pieces["source"] == number
        mine = pieces[of_source]
        low, high = (round(part * len(dataset)) for part in source.slice)
        # Not those that begin at token 0: the beginning may have been cut off, or left out.
        begun = len(np.unique(mine["position"]))
        left_out, untrained = end.skipped[number], all_untrained[number]
        empty, dropped = int(left_out["empty"]), int(left_out["dropped"])
        found.append(
            SourcePlan(
                name=source.name,
                share=float(first[number] / first.sum()),
                share_at_end=float(last[number] / last.sum()),
                share_given=float(mine["length"].sum() / total),
                tokens=int(mine["tokens"].sum()),
                documents=begun,
                pieces=len(mine),
                epochs=(begun + empty + dropped + int(untrained["documents"])) / (high - low),
                available_documents=high - low,
                empty_documents=empty,
                dropped_documents=dropped,
                dropped_tokens=int(left_out["dropped_tokens"]),
                truncated_tokens=int(left_out["truncated_tokens"]),
                untrained_documents=int(untrained["documents"]),
                untrained_parts=int(untrained["parts"]),
                untrained_tokens=int(untrained["tokens"]),
                without_targets=int(np.count_nonzero(~targets[of_source])),
                tasks=_tasks(rewriting, mine),
            )
        )
    return tuple(found)


def _tasks(rewriting: Rewriting, pieces: Records) -> dict[str, float]:
    objective = rewriting.objective
    if not isinstance(objective, WithTasks) or not len(pieces):
        return {}
    some = pieces[:: -(-len(pieces) // TASKS_COUNTED)]
    _, _, inner = rewriting.framing(some)
    keys = rewriting.keys(some)
    found = Counter(
        objective.task(int(length), int(key))
        for length, key in zip(inner, keys, strict=True)
        if length
    )
    return {name: count / found.total() for name, count in found.most_common()}
