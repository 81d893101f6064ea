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

import atexit
import logging
import queue
import threading
import time
import weakref
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
from penstock.data.shards.tables.holder import (
    EXTRAS,
    ORIGINS,
    SPANS,
    TOKENS,
    Holder,
    Stored,
    renewed,
)
from penstock.data.stores import daemons
from penstock.plan.loader._plan_kernels import PIECE
from penstock.plan.loader.extras import extras_of
from penstock.plan.loader.mixture import Source
from penstock.plan.loader.plan_settings import PlanSettings
from penstock.plan.loader.rewriting import Rewriting
from penstock.plan.loader.steps import StepPlan

_log = logging.getLogger("penstock.loader")

AHEAD_BYTES = 256 << 20
"""Bytes of tokens in steps that are planned ahead, at most; one step always is."""
AHEAD_STEPS = 256
_LEAST_SHARE = 4
"""Steps ahead take at most this part of the cache: a quarter."""
_LOOK_SECONDS = 0.1
_ALL_SECONDS = 0.5
"""How often it is looked whether all units are here, at most."""
_ALL_SHARE = 100
"""Looking takes at most this part of the time: a hundredth."""

Result = TypeVar("Result")
Wanted = list[tuple[Holder, Annotated[Int64, "units"]]]


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
                _release(taken)
                return False
            taken.append((holder, units))
        self._all = taken
        return True

    def let_go(self) -> None:
        """Release what `hold_all` holds; nothing is planned, fetched or filled now."""
        held, self._all, self._ahead = self._all, [], None
        _release(held)

    def _kinds(self, number: int) -> tuple[int, ...]:
        """The kinds of units that rows of a source are made of."""
        # Objectives in Python get whole documents.
        more = (ORIGINS,) if self._rewritings[number].runs_in_python else ()
        return (TOKENS, SPANS, EXTRAS, *more)

    def ahead(
        self, plan: Callable[[], StepPlan | None], own_rows: Callable[[StepPlan], tuple[int, int]]
    ) -> "StepsAhead":
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
        for number, holder in self._holders.items():
            of_source = np.flatnonzero(step.pieces["source"] == number)
            mine = of_source[(first <= of_source) & (of_source < last)]
            if self._rewritings[number].runs_in_python and not self._rewrites_own:
                mine = of_source  # nobody adds up what each rank rewrites
            units = [holder.find(step.pieces["document"][mine], self._kinds(number))]
            others = self._weighed(number, step.pieces[of_source])
            units.append(holder.find(others, (SPANS,)))
            extras = extras_of(self._datasets[number])
            if extras is not None and extras.has_trees:
                units.append(holder.find(step.pieces["document"][of_source], (EXTRAS,)))
            found.append((holder, _unique(units)))
        return found

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
        wanted = None if self._ahead is None else self._ahead.take(step)
        if wanted is None and self._all:
            yield
        else:
            if wanted is None:
                wanted = self.wanted(step, begin, end)
                for holder, units in wanted:
                    holder.want(units)
            try:
                for holder, units in wanted:
                    holder.wait(units)
                yield
            finally:
                _release(wanted)
                if self._ahead is not None:
                    self._ahead.done()
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


def _release(wanted: Wanted) -> None:
    for holder, units in wanted:
        holder.release(units)


class _AllHere:
    """Stands in the queue of plans where the thread that plans ahead ended."""


@final
class StepsAhead:
    """Plans steps in a thread of its own, and asks for their units; `next` gives the plans, in
    order.

    As soon as all is here, the thread ends, and `next` plans itself: there is nothing to ask for
    any more.

    Args:
        plan: Gives the next plan; None at the end. From now on called by this thread only.
        wanted: The units of a step.
        size: Bytes of a step.
        most: Maximum bytes of the steps that are planned and not filled; one is always planned.
        hold_all: Holds all units, if all are here; whether they are.
    """

    def __init__(
        self,
        plan: Callable[[], StepPlan | None],
        wanted: Callable[[StepPlan], Wanted],
        size: Callable[[StepPlan], int],
        most: int,
        hold_all: Callable[[], bool],
    ) -> None:
        self._plan, self._wanted, self._size, self._most = plan, wanted, size, most
        self._hold_all, self._look = hold_all, 0.0
        self._plans: queue.SimpleQueue[StepPlan | BaseException | _AllHere | None] = (
            queue.SimpleQueue()
        )
        self._units: dict[int, Wanted] = {}
        self._sizes: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._stopped, self._waiting, self._bytes, self._few = False, 0, 0, 0
        self._thread = threading.Thread(target=self._work, name="penstock-ahead", daemon=True)
        _running.add(self)
        self._thread.start()

    def next(self) -> StepPlan | None:
        """The next plan; None at the end, or after `stop`. Never called by two threads at once."""
        item = self._plans.get()
        if item is None or isinstance(item, _AllHere):
            self._plans.put(item)
            return None if item is None or self._stopped else self._plan()
        if isinstance(item, BaseException):
            raise item
        return item

    def take(self, step: StepPlan) -> Wanted | None:
        """The units of a step, which the caller must release; None: they were not asked for."""
        with self._changed:
            return self._units.pop(step.index, None)

    def done(self) -> None:
        """A step was filled."""
        with self._changed:
            if self._waiting:
                self._waiting -= 1
                self._bytes -= self._sizes.get()
            # The thread that plans would take turns with the filling ones for each step; it plans
            # some in a row.
            if self._waiting <= self._few:
                self._changed.notify_all()

    def stop(self) -> None:
        """End soon; never waits, because the garbage collector may call it."""
        self._stopped = True
        self._plans.put(None)

    def join(self) -> None:
        """Wait until nothing is planned or asked for any more."""
        self._thread.join()

    def _let_go(self) -> None:
        """Release what was asked for and will not be filled; a fill under way that finds nothing
        asks itself.
        """
        with self._changed:
            left, self._units = list(self._units.values()), {}
        for wanted in left:
            _release(wanted)

    def _wait_for_room(self, size: int) -> bool:
        """Wait until a step of this size may be planned; False if it never may."""
        with self._changed:
            while self._waiting and (
                self._bytes + size > self._most or self._waiting >= AHEAD_STEPS
            ):
                if self._stopped:
                    return False
                self._few = self._waiting * 3 // 4
                self._changed.wait(_LOOK_SECONDS)
            self._waiting, self._bytes = self._waiting + 1, self._bytes + size
            self._sizes.put(size)
        return not self._stopped

    def _work(self) -> None:
        try:
            while not self._stopped:
                if self._is_all_here():
                    self._plans.put(_AllHere())
                    break
                if (step := self._plan()) is None:
                    self._plans.put(None)
                    break
                if not self._wait_for_room(self._size(step)):
                    break
                wanted = self._wanted(step)
                for holder, units in wanted:
                    # The next step to be filled must not wait for room, which only its filling
                    # would make.
                    holder.want(units, lambda: not self._stopped and self._waiting > 1)
                with self._changed:
                    self._units[step.index] = wanted
                self._plans.put(step)
            else:
                self._plans.put(None)
        except BaseException as error:
            self._plans.put(error)
            self._plans.put(None)
        self._wait_for_the_last()
        self._let_go()

    def _is_all_here(self) -> bool:
        """Whether all units are here, asked now and then; if so, they are held."""
        now = time.monotonic()
        if now < self._look:
            return False
        found = self._hold_all()
        self._look = now + max(_ALL_SECONDS, _ALL_SHARE * (time.monotonic() - now))
        return found

    def _wait_for_the_last(self) -> None:
        """At the end of the sources, some steps are still to be filled."""
        with self._changed:
            self._few = self._waiting
            while self._units and not self._stopped:
                self._changed.wait(_LOOK_SECONDS)


_running: "weakref.WeakSet[StepsAhead]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Threads read mapped files; they must be done before the interpreter takes those apart. None
    waits for a store.
    """
    daemons.end()
    for ahead in list(_running):
        ahead.stop()
        ahead.join()
