"""A mixture planned but not filled: what the first steps would hold. Costs the plan alone, and one row filled."""

import json
import time
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any, final

import numpy as np

from penstock.inputs import ModelInput
from penstock.inspection.rewritten import rewritings_of
from penstock.loader import SOURCE, Loader, Plan
from penstock.sampling import BEGIN, LENGTH, TOKENS
from penstock.system import peak_memory_bytes

Int64 = np.ndarray[Any, np.dtype[np.int64]]
TASKS_COUNTED = 4000
"""Documents of a source whose tasks are counted, at most."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """What one source gives to the steps that were planned."""

    name: str
    share: float
    """Asked for at the first step, of 1."""
    share_at_end: float
    """Asked for at the last step, of 1."""
    share_given: float
    """Of all tokens planned."""
    tokens: int
    documents: int
    """Documents begun; the parts of a split one count once."""
    pieces: int
    """Documents and parts of split documents in rows."""
    epochs: float
    """Passes over the source's documents."""
    available_documents: int
    """Documents in the source's slice."""
    empty_documents: int
    """Skipped, having no tokens; this and the following count to the end of the last window that was planned."""
    dropped_documents: int
    """Left out for being too long."""
    dropped_tokens: int
    """Tokens in those."""
    truncated_tokens: int
    """Tokens cut off documents that were too long."""
    tasks: dict[str, float]
    """What its objective does to how much of its documents, of 1, the most frequent first; empty where it has no
    tasks. Counted over some of the documents, spread over all that were planned."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What the first steps of a mixture would hold."""

    steps: int
    """Steps planned; fewer than asked for where the sources end."""
    ended: bool
    """Whether the sources end within the steps that were asked for."""
    rows: int
    sequence_length: int
    rows_per_step: int
    packing: str
    tokens: int
    padding: int
    """Slots of rows that hold no token."""
    pieces: int
    sources: tuple[SourcePlan, ...]
    planning_seconds: float
    row_bytes: int
    """Arrays of one row, as a trainer gets them."""
    state_bytes: int
    """The loader's state after the last step, as JSON."""
    peak_memory_bytes: int
    """Most memory that this process had resident so far, mapped shards included."""

    @property
    def padding_share(self) -> float:
        """Padding of all slots, 0 to 1."""
        return self.padding / max(1, self.tokens + self.padding)


def dry_run(loader: Loader, steps: int) -> PlanReport:
    """Plan `steps` steps of a loader and count.

    Args:
        loader: Its place is moved. Make it for one row a rank (`data_parallel=(0, rows_per_step)`), so that the
            one row that is filled here is all that is filled.
        steps: At least 1.
    """
    settings = loader.settings
    began = time.perf_counter()
    pieces, rows, skipped = _planned(loader, steps * settings.rows_per_step)
    seconds = time.perf_counter() - began
    done = -(-rows // settings.rows_per_step)
    last = next(iter(loader.seek(max(done - 1, 0))))
    tokens = int(pieces[:, LENGTH].sum())
    return PlanReport(
        steps=done,
        ended=rows < steps * settings.rows_per_step,
        rows=rows,
        sequence_length=settings.sequence_length,
        rows_per_step=settings.rows_per_step,
        packing=settings.packing,
        tokens=tokens,
        padding=rows * settings.sequence_length - tokens,
        pieces=len(pieces),
        sources=_by_source(loader, pieces, skipped, done),
        planning_seconds=seconds,
        row_bytes=_array_bytes(last[0]),
        state_bytes=len(json.dumps(last.resume_state)),
        peak_memory_bytes=peak_memory_bytes(),
    )


def _planned(loader: Loader, wanted: int) -> tuple[Int64, int, Int64]:
    """The pieces of the first `wanted` rows, how many rows there are, and what was skipped [sources, 4]."""
    plan = Plan(loader.mixture, loader.datasets, loader.settings)
    parts, rows = [], 0
    for window in plan.windows():
        taken = min(window.num_rows, wanted - rows)
        parts.append(window.pieces[: window.row_starts[taken]])
        rows += taken
        if rows == wanted:
            break
    return np.concatenate(parts), rows, plan.place().skipped


def _by_source(loader: Loader, pieces: Int64, skipped: Int64, steps: int) -> tuple[SourcePlan, ...]:
    first, last = (np.array(loader.mixture.shares_at(step)) for step in (0, max(steps - 1, 0)))
    total = max(1, int(pieces[:, LENGTH].sum()))
    found = []
    sources = zip(loader.mixture.sources, loader.datasets, rewritings_of(loader), strict=True)
    for number, (source, dataset, rewriting) in enumerate(sources):
        mine = pieces[pieces[:, SOURCE] == number]
        low, high = (round(part * len(dataset)) for part in source.slice)
        begun = int(np.count_nonzero(mine[:, BEGIN] == 0))
        empty, dropped, dropped_tokens, truncated = skipped[number].tolist()
        found.append(
            SourcePlan(
                name=source.name,
                share=float(first[number] / first.sum()),
                share_at_end=float(last[number] / last.sum()),
                share_given=float(mine[:, LENGTH].sum() / total),
                tokens=int(mine[:, TOKENS].sum()),
                documents=begun,
                pieces=len(mine),
                epochs=(begun + empty + dropped) / (high - low),
                available_documents=high - low,
                empty_documents=empty,
                dropped_documents=dropped,
                dropped_tokens=dropped_tokens,
                truncated_tokens=truncated,
                tasks=_tasks(rewriting, mine),
            )
        )
    return tuple(found)


def _tasks(rewriting: Any, pieces: Int64) -> dict[str, float]:
    task = getattr(rewriting.objective, "task", None)
    if task is None or not len(pieces):
        return {}
    some = pieces[:: -(-len(pieces) // TASKS_COUNTED)]
    _, _, words = rewriting.words(some)
    keys = rewriting.keys(some)
    found = Counter(task(int(length), int(key)) for length, key in zip(words, keys, strict=True) if length)
    return {name: count / found.total() for name, count in found.most_common()}


def _array_bytes(row: ModelInput) -> int:
    return sum(getattr(getattr(row, field.name), "nbytes", 0) for field in fields(row))
