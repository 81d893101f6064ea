"""Sources in object stores: documents are fetched ahead, in the order of the plan, and held while
rows are filled.

One thread plans steps ahead and asks for the units of this rank's rows
(`data.shards.remote.units`); it waits where no room is left. Filling waits for the units of its
step, and lets them go afterwards. What other ranks' rows hold is fetched only where a sum over the
whole step needs it: loss-weight spans of documents that are cut, and counts of trees. Once all of
the sources is on this machine and within the budget, all of it is held by a few locks, and steps
are made as those of local sources.

Plan, rows and states are those of the same dataset on a local disk.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, TypeVar, final

import numpy as np

from penstock.core.arrays import Int64, Records
from penstock.core.errors import ConfigError, CorruptionError
from penstock.data.shards import Corpus
from penstock.data.shards.format._kernels import RUN_DOCUMENTS
from penstock.data.shards.tables.corpus import location_of
from penstock.data.shards.tables.holder import EXTRAS, ORIGINS, SPANS, TOKENS, Stored, renewed
from penstock.plan.loader._plan_kernels import PIECE
from penstock.plan.loader.extras import extras_of
from penstock.plan.loader.mixture import Source
from penstock.plan.loader.plan_settings import PlanSettings
from penstock.plan.loader.rewriting import Rewriting
from penstock.plan.loader.source_records import present_sources
from penstock.plan.loader.step_planner import StepPlan
from penstock.plan.loader.steps_ahead import StepsAhead, Wanted, release

_log = logging.getLogger("penstock.loader")

AHEAD_BYTES = 256 << 20
"""Bytes of tokens in steps that are planned ahead, at most; one step always is."""
_LEAST_SHARE = 4
"""Steps ahead take at most this part of the cache: a quarter."""

Result = TypeVar("Result")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a source in a store has cost this process so far."""

    fetched_bytes: int
    """Bytes of shards that were fetched."""
    used_bytes: int
    """Bytes of stored tokens that went into rows."""
    requests: int
    """Requests for shards."""

    def __str__(self) -> str:
        ratio = f" ({self.fetched_bytes / self.used_bytes:.2f} x)" if self.used_bytes else ""
        return (
            f"fetched {self.fetched_bytes / 1e6:,.1f} MB for {self.used_bytes / 1e6:,.1f} MB "
            f"used{ratio}, {self.requests:,} requests"
        )


@final
class Fetching:
    """Fetches what the steps of one loader need.

    Args:
        sources: Of the mixture.
        datasets: Theirs, opened.
        rewritings: Their objectives, resolved.
        settings: The plan's.
        distances: Target distances.
        budget: Maximum bytes of all remote sources on this machine; None: no limit.
        rewrites_own: Objectives in Python run for this rank's rows only, not for all of a step.

    Raises:
        ConfigError: The budget has no room for what must be here at the same time.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        datasets: Sequence[Corpus],
        rewritings: Sequence[Rewriting],
        settings: PlanSettings,
        distances: int,
        budget: int | None,
        *,
        rewrites_own: bool,
    ) -> None:
        self._datasets, self._rewritings, self._distances = datasets, rewritings, distances
        self._names, self._rewrites_own = [source.name for source in sources], rewrites_own
        self._holders = {
            number: holder
            for number, dataset in enumerate(datasets)
            if (holder := dataset.table.holder) is not None
        }
        remote = [number for number in self._holders if _stored(datasets[number])]
        self._used = dict.fromkeys(remote, 0)
        self._counting = threading.Lock()
        self._ahead: StepsAhead | None = None
        self._all: Wanted = []
        self._ahead_bytes = AHEAD_BYTES
        if budget is not None:
            self._ahead_bytes = min(AHEAD_BYTES, budget // _LEAST_SHARE)
            self._divide(budget, {n: residency(sources[n], datasets[n], settings) for n in remote})
        self._documents = {n: _documents(sources[n], datasets[n]) for n in self._holders}

    def __bool__(self) -> bool:
        return bool(self._holders)

    def _divide(self, budget: int, needs: dict[int, "Need"]) -> None:
        """Give each remote dataset its part of the budget: what it needs, and the rest in
        proportion to its size.
        """
        if (needed := sum(need.bytes for need in needs.values())) > budget:
            lines = "; ".join(f"{self._names[number]}: {need}" for number, need in needs.items())
            raise ConfigError(
                f"cache_bytes is {budget:,}, but {needed:,} bytes must be on this machine at "
                f"the same time ({lines}); raise cache_bytes, or lower shuffle_runs (with "
                "shuffle 'block') or window_rows"
            )
        sizes = {number: int(self._datasets[number].table.shard_bytes.sum()) for number in needs}
        for number, need in needs.items():
            share = need.bytes + (budget - needed) * sizes[number] // max(sum(sizes.values()), 1)
            parts = _stored(self._datasets[number])
            whole = max(sum(part.stored_bytes for part in parts), 1)
            for part in parts:
                part.budget = max(int(share * (part.stored_bytes / whole)), 1)

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Source name → what it has cost."""
        return {
            self._names[number]: Traffic(
                fetched_bytes=sum(part.fetched_bytes for part in _stored(self._datasets[number])),
                used_bytes=used,
                requests=sum(part.requests for part in _stored(self._datasets[number])),
            )
            for number, used in self._used.items()
        }

    def report(self) -> None:
        """Log a line for each remote source."""
        for number, (name, traffic) in zip(self._used, self.traffic.items(), strict=True):
            if traffic.used_bytes:
                _log.info("source %r (%s): %s", name, location_of(self._datasets[number]), traffic)

    def hold_all(self) -> bool:
        """Hold all that any step may read, if it is here already: steps need no look at units then.
        Whether it is.
        """
        taken: Wanted = []
        for number, holder in self._holders.items():
            units = holder.hold_all(*self._documents[number], self._kinds(number))
            if units is None:
                release(taken)
                return False
            taken.append((holder, units))
        self._all = taken
        return True

    def let_go(self) -> None:
        """Release what `hold_all` holds; nothing is planned, fetched or filled now."""
        held, self._all, self._ahead = self._all, [], None
        release(held)

    def _kinds(self, number: int) -> tuple[int, ...]:
        """The kinds of units that rows of a source are made of."""
        # Objectives in Python get whole documents.
        more = (ORIGINS,) if self._rewritings[number].runs_in_python else ()
        return (TOKENS, SPANS, EXTRAS, *more)

    def ahead(
        self, plan: Callable[[], StepPlan | None], own_rows: Callable[[StepPlan], tuple[int, int]]
    ) -> StepsAhead:
        """Plan and fetch ahead from now on; `own_rows` says which rows of a step are this
        rank's.
        """
        self._ahead = StepsAhead(
            plan,
            lambda step: self.wanted(step, *own_rows(step)),
            self._tokens,
            self._ahead_bytes,
            self.hold_all,
        )
        return self._ahead

    def _tokens(self, step: StepPlan) -> int:
        """Bytes of the tokens of a step, roughly."""
        return 4 * int(step.pieces["tokens"].sum())

    def wanted(self, step: StepPlan, begin: int, end: int) -> Wanted:
        """The units that filling rows `begin` … `end` − 1 of a step reads."""
        first, last = step.row_starts[[begin, end]].tolist()
        found: Wanted = []
        for number in present_sources(step.pieces):
            if (holder := self._holders.get(number)) is None:
                continue
            # Nobody adds up what each rank rewrites in Python.
            needs_all = self._rewritings[number].runs_in_python and not self._rewrites_own
            mine = step.pieces if needs_all else step.pieces[first:last]
            units = [holder.find(self._of_source(number, mine)["document"], self._kinds(number))]
            extras = extras_of(self._datasets[number])
            has_trees = extras is not None and extras.has_trees
            if has_trees or self._datasets[number].table.has_spans:
                pieces = self._of_source(number, step.pieces)
                units.append(holder.find(self._weighed(number, pieces), (SPANS,)))
                if has_trees:
                    units.append(holder.find(pieces["document"], (EXTRAS,)))
            found.append((holder, units[0] if len(units) == 1 else _unique(units)))
        return found

    def _of_source(
        self, number: int, pieces: Annotated[Records, PIECE, "pieces"]
    ) -> Annotated[Records, PIECE, "pieces"]:
        return pieces if len(self._names) == 1 else pieces[pieces["source"] == number]

    def _weighed(
        self, number: int, pieces: Annotated[Records, PIECE, "pieces"]
    ) -> Annotated[Int64, "documents"]:
        """The documents of pieces whose spans are read for the denominators, on every rank
        (`weigh_rows`).
        """
        if not self._datasets[number].table.has_spans:
            return np.empty(0, np.int64)
        stored = self._datasets[number].table.lengths[pieces["document"], 0]
        whole = (pieces["begin"] == 0) & (pieces["tokens"] == stored)
        if self._distances > 1 or not self._rewritings[number].is_causal:
            whole[:] = False
        documents: Annotated[Int64, "documents"] = pieces["document"][~whole]
        return documents

    @contextmanager
    def held(self, step: StepPlan, begin: int, end: int) -> Iterator[None]:
        """Have on this machine what filling rows `begin` … `end` − 1 of a step reads, while the
        block runs.
        """
        ahead = self._ahead
        held = None if ahead is None else ahead.take(step)
        if held is None and self._all:
            yield
        else:
            wanted = self.wanted(step, begin, end) if held is None else held
            if held is None:
                for holder, units in wanted:
                    holder.want(units)
            try:
                for holder, units in wanted:
                    holder.wait(units)
                yield
            finally:
                if held is None:
                    release(wanted)
                if ahead is not None:
                    ahead.done(step)
        self._count(step.pieces[step.row_starts[begin] : step.row_starts[end]])

    def renewing(self, step: StepPlan, begin: int, end: int, fill: Callable[[], Result]) -> Result:
        """What `fill` returns for rows of a step that are held; damaged copies are fetched again,
        once.
        """
        try:
            return fill()
        except CorruptionError as error:
            return renewed(self.wanted(step, begin, end), error, fill)

    def _count(self, mine: Annotated[Records, PIECE, "pieces"]) -> None:
        """Add to the bytes that were used."""
        tokens, sources = mine["tokens"], mine["source"]
        for number in self._used:
            used = int((tokens if len(self._names) == 1 else tokens[sources == number]).sum())
            with self._counting:
                self._used[number] += used * self._datasets[number].table.token_bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What of a remote source must be on this machine at the same time."""

    runs: int
    """Runs of 256 documents."""
    run_bytes: int
    """Mean bytes of a run, with its spans and columns; of several datasets, of the one with the
    largest.
    """
    reason: str

    @property
    def bytes(self) -> int:
        """Bytes of all."""
        return self.runs * self.run_bytes

    def __str__(self) -> str:
        return f"{self.bytes:,} for {self.runs:,} runs of {RUN_DOCUMENTS} documents: {self.reason}"


def residency(source: Source, dataset: Corpus, settings: PlanSettings) -> Need:
    """What of a remote source must be here at the same time: two windows of its shuffle, and a
    window of the packing.

    At the border of two windows of the shuffle, rows hold documents of both; and documents wait for
    their row as long as a window of rows is open.
    """
    count = len(dataset)
    begin, end = _documents(source, dataset)
    all_runs = -(-max(end - begin, 1) // RUN_DOCUMENTS) + 1
    mean = max(dataset.num_tokens / max(count, 1), 1.0)
    packed = -(-int(settings.window_rows * settings.sequence_length / mean) // RUN_DOCUMENTS) + 2
    runs, reason = (
        all_runs,
        f"with shuffle {source.shuffle!r} all of it; shuffle 'block' needs less",
    )
    if source.shuffle == "none":
        runs, reason = packed, f"a window of {settings.window_rows:,} rows"
    if source.shuffle == "block":
        runs = 2 * source.shuffle_runs + packed
        reason = (
            f"two windows of {source.shuffle_runs} runs that are shuffled, and the documents of "
            f"{settings.window_rows:,} rows that are packed together"
        )
    if runs >= all_runs:
        runs, reason = all_runs, reason if source.shuffle == "full" else f"all of it ({reason})"
    return Need(
        runs=runs, run_bytes=max(part.run_bytes for part in _stored(dataset)), reason=reason
    )


def _documents(source: Source, dataset: Corpus) -> tuple[int, int]:
    """First and last (exclusive) document that a source has."""
    begin, end = (round(edge * len(dataset)) for edge in source.slice)
    return begin, end


def _stored(dataset: Corpus) -> Sequence[Stored]:
    """What of a corpus lies in a store."""
    return () if dataset.table.holder is None else dataset.table.holder.stored


def _unique(units: Sequence[Annotated[Int64, "units"]]) -> Annotated[Int64, "units"]:
    found: Annotated[Int64, "units"] = np.unique(np.concatenate(units))
    return found
