"""The plan: which tokens go where, from lengths alone.

A plan is a sequence of windows of rows, the same on every rank and for any number of threads. Its
state between two windows (`PlanState`) is how far each source is, and what it is owed; everything
after follows from it, at millions of documents a second. A window is packed as a whole and never
extends past a change of shares, so these states are exact.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Int64, Records
from penstock.core.errors import ConfigError
from penstock.data.shards import Corpus
from penstock.plan.loader._plan_kernels import (
    BEST_FIT_DECREASING,
    CURSOR,
    FINISHED,
    PIECE,
    PIECES_FULL,
    PROGRESS,
    WINDOW_FULL,
    pack_window,
    plan_window,
    sort_by_row,
)
from penstock.plan.loader._target_kernels import UNTRAINED
from penstock.plan.loader.mixture import Mixture
from penstock.plan.loader.places import BEGINNING, Begin, Start
from penstock.plan.loader.plan_settings import PlanSettings
from penstock.plan.loader.rewriting import Rewriting
from penstock.plan.loader.source_records import present_sources
from penstock.plan.loader.stream import UNLIMITED, SourceStream
from penstock.plan.loader.targets import UntrainedParts
from penstock.plan.packing import PACKINGS
from penstock.plan.packing.pack import left_in_rows, scratch
from penstock.plan.sampling import integer_shares
from penstock.plan.sampling._choice_kernels import tree_size
from penstock.plan.sampling._kernels import ENTRY, SKIPPED
from penstock.plan.sampling.shares import UNIT

FIRST_WINDOW_ROWS = 16
"""Rows of the first window; each later one is twice as large, up to `window_rows`: the first row
comes at once.
"""
BUFFER_ENTRIES = 32768
"""Entries in the buffers of all sources together."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanState:
    """State of the plan between two windows: all that the rest of the plan depends on."""

    row: int
    """Rows planned before it."""
    window: int
    """Windows planned before it."""
    cursors: Annotated[Records, CURSOR, "sources"]
    """How far each was taken."""
    credits: Annotated[Int64, "sources"]
    """Tokens that each source may still take before the others, times UNIT; below 0: it is
    ahead.
    """
    skipped: Annotated[Records, SKIPPED, "sources"]
    """What was left out since the beginning."""
    untrained: Annotated[Records, UNTRAINED, "sources"] | None = None
    """What was left out since the beginning because it has no target; None: no source leaves such
    parts out.
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """Some rows of the plan, in order."""

    start: PlanState
    """State of the plan before this window."""
    pieces: Annotated[Records, PIECE, "pieces"]
    """Row after row."""
    row_starts: Annotated[Int64, "rows+1"]
    """The pieces of row i are row_starts[i] … row_starts[i + 1] − 1."""
    skipped: Annotated[Records, SKIPPED, "sources"]
    """What was left out from the beginning of the plan to the end of this window."""
    untrained: Annotated[Records, UNTRAINED, "sources"] | None = None
    """As in `PlanState`, to the end of this window."""
    cursors: Annotated[Records, CURSOR, "sources"]
    """How far each source was taken at the end of this window."""

    @property
    def num_rows(self) -> int:
        """Rows in the window."""
        return len(self.row_starts) - 1


@final
class Plan:
    """Windows one after another, from any state on.

    Args:
        mixture: The sources; `datasets` are theirs, opened.
        datasets: One for each source.
        settings: What else decides the plan.
        distances: Target distances. They decide only which parts of split documents have a target.
        start: Where it begins.
    """

    def __init__(
        self,
        mixture: Mixture,
        datasets: Sequence[Corpus],
        settings: PlanSettings,
        distances: int = 1,
        start: Start = BEGINNING,
    ) -> None:
        settings.require_effect(mixture)
        self.mixture, self.datasets, self.settings = mixture, list(datasets), settings
        self.distances, self.start = distances, start
        self._draws = [
            SourceStream(source, dataset, settings, distances, start.of(source, dataset, settings))
            for source, dataset in zip(mixture.sources, self.datasets, strict=True)
        ]
        # Lengths that come from stores were asked for now, those of all sources at the same time.
        for source_draw in self._draws:
            source_draw.require_targets()
        phases = mixture.phases()
        self._ramp = settings.ramp
        before = self._ramp.before(start.step)
        self._phase_rows = [self._ramp.before(step) - before for step, _ in phases]
        self._rows_before = before
        self._phase_shares = [np.array(shares) for _, shares in phases]
        self._has_images = any(draw.image_patches is not None for draw in self._draws)
        count = len(self._draws)
        self._capacity = min(4096, max(64, BUFFER_ENTRIES // count))
        self._entries = np.zeros(count * (self._capacity + 1), ENTRY)
        self._due = np.empty(tree_size(count))
        self._free = np.empty(tree_size(count), np.int64)
        self._scratch = scratch(settings.sequence_length, settings.window_rows)
        self._pieces = np.empty(4096, PIECE)
        self._row_of = np.empty(4096, np.int64)
        self._document_limit = settings.documents_per_row or 0
        self._documents_left = left_in_rows(settings.window_rows, self._document_limit)
        limited = settings.patches_per_row is not None
        self._entry_patches = np.zeros(len(self._entries) if limited else 1, np.int64)
        self._patches_left = np.zeros(settings.window_rows if limited else 1, np.int64)
        leaves_out = any(draw.untrained is not None for draw in self._draws)
        self._entry_untrained = np.zeros(len(self._entries) if leaves_out else 0, UNTRAINED)
        self.restore(
            PlanState(
                row=0,
                window=0,
                cursors=np.array([(draw.begin.position, 0) for draw in self._draws], CURSOR),
                credits=np.zeros(count, np.int64),
                skipped=np.zeros(count, SKIPPED),
                untrained=np.zeros(count, UNTRAINED) if leaves_out else None,
            )
        )

    @property
    def first_step(self) -> int:
        """Number of its first step."""
        return self.start.step

    @property
    def begins(self) -> list[Begin]:
        """Where the stream of each source begins."""
        return [draw.begin for draw in self._draws]

    def with_max_epochs(self, limits: Sequence[float | None]) -> "Plan":
        """The same plan with other `max_epochs` of its sources, from the beginning."""
        pairs = zip(self.mixture.sources, limits, strict=True)
        sources = [replace(source, max_epochs=limit) for source, limit in pairs]
        return Plan(
            Mixture(sources, self.mixture.changes),
            self.datasets,
            self.settings,
            self.distances,
            self.start,
        )

    def document(self, source: int, position: int) -> int:
        """Number of the document at a position of a source."""
        return self._draws[source].document(position)

    @property
    def ends(self) -> list[int]:
        """The position of each source at which it is finished."""
        return [draw.last for draw in self._draws]

    @property
    def untrained_parts(self) -> list[UntrainedParts | None]:
        """What leaves untrained parts out of each source; None where nothing does."""
        return [draw.untrained for draw in self._draws]

    @property
    def limits(self) -> list[int]:
        """Of each source: maximum tokens of a document that is not too long."""
        return [draw.limit for draw in self._draws]

    @property
    def rewritings(self) -> list[Rewriting]:
        """The objective of each source, resolved."""
        return [draw.rewriting for draw in self._draws]

    @property
    def sizes(self) -> Annotated[Int64, "sources"]:
        """Documents of an epoch of each source."""
        return np.array([draw.size for draw in self._draws], np.int64)

    def row_patches(
        self, pieces: Annotated[Records, PIECE, "pieces"], row_starts: Annotated[Int64, "rows+1"]
    ) -> Annotated[Int64, "rows"] | None:
        """Patches of the images of each row; None: no source has images."""
        if not self._has_images:
            return None
        found = np.zeros(len(pieces) + 1, np.int64)
        for number in present_sources(pieces):
            if (patches := self._draws[number].image_patches) is not None:
                mine = np.flatnonzero(pieces["source"] == number)
                found[mine + 1] = patches[pieces["document"][mine]]
        of_rows: Annotated[Int64, "rows"] = np.diff(np.cumsum(found)[row_starts])
        return of_rows

    def state(self) -> PlanState:
        """State before the next window."""
        return PlanState(
            row=self._row,
            window=self._window,
            cursors=self._cursors.copy(),
            credits=self._credits.copy(),
            skipped=self._skipped.copy(),
            untrained=self._untrained.copy() if len(self._untrained) else None,
        )

    def restore(self, state: PlanState) -> None:
        """Go on from `state`."""
        count = len(self._draws)
        self._row, self._window = state.row, state.window
        self._cursors, self._credits, self._skipped = (
            state.cursors.copy(),
            state.credits.copy(),
            state.skipped.copy(),
        )
        # Where each source's buffer was filled up to; buffers are empty, so that is the cursor.
        self._drawn = state.cursors.copy()
        self._heads = np.arange(count, dtype=np.int64) * (self._capacity + 1)
        self._ends = self._heads.copy()
        self._refill_size = np.full(count, min(64, self._capacity))
        self._tail_skips = np.zeros(count, SKIPPED)
        leaves_out = len(self._entry_untrained) > 0
        if leaves_out and state.untrained is not None:
            self._untrained = state.untrained.copy()
        else:
            self._untrained = np.zeros(count if leaves_out else 0, UNTRAINED)
        self._tail_untrained = np.zeros_like(self._untrained)
        self._finished = np.array(
            [
                draw.is_finished(position)
                for draw, position in zip(
                    self._draws, state.cursors["position"].tolist(), strict=True
                )
            ]
        )

    def windows(self) -> Iterator[Window]:
        """Windows from here on, until every source is finished."""
        while (window := self.next_window()) is not None:
            yield window

    def next_window(self) -> Window | None:
        """Plan one window; None when every source is finished."""
        start = self.state()
        max_rows = self._window_rows()
        packing = PACKINGS.index(self.settings.packing)
        if packing != BEST_FIT_DECREASING:
            count, rows = self._take(packing, max_rows, UNLIMITED)
        else:
            count, rows = self._take_and_sort(start, max_rows)
        if count == 0:
            return None
        pieces, row_starts = np.empty(count, PIECE), np.empty(rows + 1, np.int64)
        sort_by_row(self._pieces[:count], self._row_of[:count], rows, pieces, row_starts)
        self._row += rows
        self._window += 1
        after = self.state()
        return Window(
            start=start,
            pieces=pieces,
            row_starts=row_starts,
            skipped=after.skipped,
            untrained=after.untrained,
            cursors=after.cursors,
        )

    def _window_rows(self) -> int:
        """Rows that the next window may have: the ramp, and never over a change of shares."""
        rows = min(self.settings.window_rows, FIRST_WINDOW_ROWS << min(self._window, 40))
        following = bisect_right(self._phase_rows, self._row)
        return (
            min(rows, self._phase_rows[following] - self._row)
            if following < len(self._phase_rows)
            else rows
        )

    def _shares(self) -> Annotated[Int64, "sources"]:
        """The shares in force for the next window, without finished sources."""
        phase = bisect_right(self._phase_rows, self._row) - 1
        shares = self._phase_shares[phase]
        active = ~self._finished & (shares > 0)
        if not active.any():
            self._refuse_to_end(phase)
        return integer_shares(shares, active)

    def _refuse_to_end(self, phase: int) -> None:
        """Nothing has a share now; that is the end, unless a source is left that would get one
        later.
        """
        for row, shares in zip(
            self._phase_rows[phase + 1 :], self._phase_shares[phase + 1 :], strict=True
        ):
            for stream, finished, share in zip(self._draws, self._finished, shares, strict=True):
                if share > 0 and not finished:
                    step, later = (
                        self._ramp.steps(rows + self._rows_before) for rows in (self._row, row)
                    )
                    raise ConfigError(
                        f"at step {step} every source with a share is finished, but source "
                        f"{stream.source.name!r} gets its share only at step {later}: change "
                        "shares earlier, or raise max_epochs"
                    )

    def _take(self, packing: int, max_rows: int, max_pieces: int) -> tuple[int, int]:
        """Run the window kernel to its end, refilling buffers; returns (pieces, rows)."""
        shares = self._shares()
        progress = np.zeros(1, PROGRESS)
        progress["taken"] = -1
        self._scratch[2][:] = 0
        self._scratch[3][:] = 0
        while True:
            status = plan_window(
                packing,
                self.settings.sequence_length,
                max_rows,
                min(max_pieces, len(self._pieces)),
                shares,
                self._credits,
                self._due,
                self._free,
                self._heads,
                self._ends,
                self._entries,
                UNIT,
                self._skipped,
                self._cursors,
                self._pieces,
                self._row_of,
                progress,
                self._entry_untrained,
                self._untrained,
                self._document_limit,
                self._documents_left,
                self.settings.patches_per_row or 0,
                self._entry_patches,
                self._patches_left,
                *self._scratch,
            )
            pieces, rows = int(progress["pieces"][0]), int(progress["rows"][0])
            if status in (WINDOW_FULL, FINISHED) or (
                status == PIECES_FULL and pieces == max_pieces
            ):
                self._credits += shares * progress["elapsed"]
                return pieces, rows
            if status == PIECES_FULL:
                taken, self._pieces = self._pieces, np.empty(2 * len(self._pieces), PIECE)
                self._pieces[: len(taken)] = taken
                self._row_of = np.concatenate([self._row_of, np.empty_like(self._row_of)])
            elif not self._refill(status):
                self._finished[status] = True
                self._credits += shares * progress["elapsed"]
                progress["elapsed"], progress["placed"], progress["taken"] = 0, 0, -1
                shares = self._shares()

    def _take_and_sort(self, start: PlanState, max_rows: int) -> tuple[int, int]:
        """Best fit, longest first: take a window's worth of tokens; if it needs more rows, take
        fewer and try again.
        """
        count, _ = self._take(BEST_FIT_DECREASING, max_rows, UNLIMITED)
        limit = self._document_limit
        while count:
            lengths = np.ascontiguousarray(self._pieces["length"][:count])
            rows = pack_window(
                lengths,
                self.settings.sequence_length,
                limit,
                left_in_rows(count, limit),
                self._row_of[:count],
                *scratch(self.settings.sequence_length, count),
            )
            if rows <= max_rows:
                return count, rows
            excess = (rows - max_rows) * self.settings.sequence_length // 4
            fewer = int(np.searchsorted(np.cumsum(lengths[::-1]), max(excess, 1), side="left")) + 1
            if limit:
                # Rows may be full of documents with few tokens.
                fewer = min(fewer, (rows - max_rows) * limit // 4 + 1)
            self.restore(start)
            count, _ = self._take(BEST_FIT_DECREASING, max_rows, max(count - fewer, 1))
        return 0, 0

    def _refill(self, source: int) -> bool:
        """Draw the next documents of a source into its buffer; False when it has none left."""
        base = source * (self._capacity + 1)
        size = int(self._refill_size[source])
        buffer, untrained = (
            self._entries[base : base + size + 1],
            self._entry_untrained[base : base + size + 1],
        )
        skipped = buffer["skipped"]
        skipped[0] = self._tail_skips[source]
        untrained[:1] = self._tail_untrained[source : source + 1]
        count, position, begin = self._draws[source].fill(buffer, untrained, *self._drawn[source])
        self._drawn[source] = position, begin
        self._refill_size[source] = min(2 * size, self._capacity)
        if count == 0:
            _add(self._skipped, source, skipped[0])
            _add(self._untrained, source, untrained[:1])
            self._tail_skips[source] = 0
            self._tail_untrained[source : source + 1] = 0
            self._cursors[source] = position, 0
            return False
        if (patches := self._draws[source].patches) is not None:
            self._entry_patches[base : base + count] = patches[buffer["document"][:count]]
        self._tail_skips[source] = skipped[count]
        self._tail_untrained[source : source + 1] = untrained[count : count + 1]
        self._heads[source], self._ends[source] = base, base + count
        return True


def _add(totals: Records, source: int, counts: Records) -> None:
    """Add the counts of a record, or of an array with at most one, to those of a source."""
    for name in totals.dtype.names or ():
        totals[name][source : source + 1] += counts[name]
