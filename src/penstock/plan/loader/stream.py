"""The stream of one source: from a position in its epochs to the documents that the plan takes from
there.
"""

from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Int64, Records
from penstock.core.errors import ConfigError, RecordError, StateError
from penstock.core.randomness import key_for
from penstock.data.shards import Corpus
from penstock.data.shards.tables.lengths import LazyNumbers, places_of
from penstock.plan.loader._target_kernels import UNTRAINED
from penstock.plan.loader.extras import extras_of, too_long_of
from penstock.plan.loader.lengths_ahead import LengthsAhead
from penstock.plan.loader.mixture import TOO_LONG, Source
from penstock.plan.loader.places import SourcePlace, begin_at, order_of
from penstock.plan.loader.plan_settings import PlanSettings
from penstock.plan.loader.rewriting import Rewriting
from penstock.plan.loader.targets import untrained_parts
from penstock.plan.loader.untrained import require_targets
from penstock.plan.sampling._kernels import ENTRY, NOT_HERE, draw
from penstock.plan.sampling.order import shuffle_mode

UNLIMITED = np.iinfo(np.int64).max

_TOO_MANY_PATCHES = np.iinfo(np.uint32).max
"""Length in place of that of a document with more patches than a row may have."""

_TOGETHER = 1 << 20
"""Skipped documents that are looked at together, for the memory."""

_ALL_HERE = np.empty(0, np.uint8)


@final
class SourceStream:
    """One source's stream: positions to entries."""

    def __init__(
        self,
        source: Source,
        dataset: Corpus,
        settings: PlanSettings,
        distances: int,
        place: SourcePlace | None,
    ) -> None:
        table = dataset.table
        self.source, self.dataset = source, dataset
        self.first, self.size = source.documents_in_use(table.num_documents)
        if self.size < 1:
            raise ConfigError(
                f"source {source.name!r}: no documents ({table.num_documents} in the dataset, "
                f"slice {source.slice})"
            )
        self.last = UNLIMITED if source.max_epochs is None else round(source.max_epochs * self.size)
        if self.last < 1:
            raise ConfigError(
                f"source {source.name!r}: max_epochs {source.max_epochs} of {self.size} "
                "documents is no document"
            )
        self.key = key_for(settings.seed, "source", source.name)
        self.begin = begin_at(place, source, self.first, self.size, self.key, self.last)
        self.mode = shuffle_mode(source.shuffle, source.shuffle_runs)
        most = settings.document_tokens(source)
        self.rewriting = Rewriting(
            source, dataset, self.size, settings.seed, settings.sequence_length, most
        )
        self.limit = self.rewriting.limit
        if settings.packing == "concat":
            if not self.rewriting.is_causal:
                raise ConfigError(
                    f"source {source.name!r}: packing 'concat' cuts documents, which only the "
                    f"causal objective allows, not {source.objective.name!r}; use best_fit"
                )
            self.limit = most or UNLIMITED
        self.too_long = too_long_of(source, dataset)
        self.untrained = untrained_parts(
            source, dataset, self.rewriting, self.too_long, settings, distances
        )
        # Held, because the kernel reads it by address.
        self.lengths = table.lengths
        extras = extras_of(dataset)
        self.image_patches = extras.patches() if extras is not None and extras.has_images else None
        """[N] patches of each document's images; None: it has none."""
        self.patches = self._limit_patches(settings.patches_per_row)
        self._ahead: LengthsAhead | None = None
        if isinstance(self.lengths, LazyNumbers):
            self._ahead = LengthsAhead(
                source, self.lengths.ranges, self.first, self.size, self.key, self.last
            )
            self._ahead.look(self.begin.position)

    def require_targets(self) -> None:
        """Refuse a source of which no document can be trained."""
        if self._ahead is not None and self.source.shuffle == "full":
            self._ahead.bring(self.begin.position)
        require_targets(
            f"source {self.source.name!r}",
            self.lengths,
            (self.first, self.first + self.size),
            self.limit if self.too_long == "drop" else None,
            by_weights=self.rewriting.is_causal,
        )

    def _limit_patches(self, limit: int | None) -> Annotated[Int64, "documents"] | None:
        """[N] patches of each document's images; those over the limit of a row become too long.
        None: no limit.
        """
        patches = self.image_patches
        if limit is None or patches is None:
            return None
        if (patches > limit).any():
            # Of all documents: their images were read, too.
            self.lengths = np.array(self.lengths)
            self.lengths[patches > limit, 0] = _TOO_MANY_PATCHES
        return patches

    def document(self, position: int) -> int:
        """Number of the document at a position."""
        epoch, index = divmod(position, self.size)
        return self.first + int(
            order_of(self.source, self.key, self.size, epoch).images(index, index + 1)[0]
        )

    def is_finished(self, position: int) -> bool:
        """Whether nothing is left from this position on."""
        return position >= self.last

    def fill(
        self,
        entries: Annotated[Records, ENTRY, "entries"],
        untrained: Annotated[Records, UNTRAINED, "counts"],
        position: int,
        begin: int,
    ) -> tuple[int, int, int]:
        """Entries from (position, begin) on; returns (number, next position, next begin).

        `untrained` counts what was left out before each entry because it has no target; empty where
        nothing is.

        Raises:
            RecordError: A document is too long and the source says `too_long="error"`.
            StateError: `begin` is behind the end of its document.
            CorruptionError: A document was skipped for a length that it does not have.
            ConfigError: Nothing is left of the documents of a whole epoch.
        """
        # Of a document that is begun, the parts before do not come again until the next epoch.
        count, first, whole = 0, position, position + (begin > 0)
        while count == 0:
            count, position, begin = self._taken(entries, position, begin)
            if count == 0 or self.untrained is None:
                break
            count = self.untrained.leave_out(entries[: count + 1], untrained[: count + 1])
            if (
                count == 0
                and first >= self.begin.seen_until
                and position - whole >= min(self.size, self.last)
            ):
                raise self.untrained.refuse(self.size)
        if count and not self.rewriting.is_causal:
            self.rewriting.measure(entries[:count])
        return count, position, begin

    def _taken(
        self, entries: Annotated[Records, ENTRY, "entries"], position: int, begin: int
    ) -> tuple[int, int, int]:
        """As `fill`, with all entries that have a target or not."""
        while True:
            # At most two epochs, in which there is a document that may be used: some are nearly all
            # skipped.
            stop, before = (
                min(self.last, int(position) + max(2 * self.size, len(entries))),
                position,
            )
            known = self._left_out(entries[:1])
            count, position, begin, refused = self._draw(position, begin, stop, entries)
            if self._left_out(entries[: count + 1]) > known:
                self._check_skipped(before, position, entries["position"][:count])
            if refused >= 0 and count == 0:
                self._refuse(refused, begin)
            if count == 0 or before >= self.begin.seen_until:
                return count, position, begin
            count = self.begin.leave_out(entries[: count + 1])
            if count:
                return count, position, begin

    def _draw(
        self, position: int, begin: int, stop: int, entries: Annotated[Records, ENTRY, "entries"]
    ) -> tuple[int, int, int, int]:
        """`draw` of entries, with all lengths that it reads on this machine."""
        ranges = None if self._ahead is None else self._ahead.ranges
        here, size = (_ALL_HERE, 1) if ranges is None else (ranges.here, ranges.size)
        if self._ahead is not None:
            self._ahead.look(int(position))
        count, refused = 0, NOT_HERE
        while True:
            more, position, begin, refused = draw(
                position,
                begin,
                stop,
                self.size,
                self.first,
                np.uint64(self.key),
                self.mode,
                *places_of(self.lengths),
                self.limit,
                TOO_LONG.index(self.too_long),
                entries[count:],
                here,
                size,
            )
            count += more
            if self._ahead is None or refused != NOT_HERE:
                return count, position, begin, refused
            self._ahead.bring(int(position))

    @staticmethod
    def _left_out(entries: Annotated[Records, ENTRY, "entries"]) -> int:
        """Documents that were left out before these entries."""
        return int(entries["skipped"]["empty"].sum() + entries["skipped"]["dropped"].sum())

    def _check_skipped(self, begin: int, end: int, taken: Annotated[Int64, "entries"]) -> None:
        """Check the lengths of the documents that were not taken from [begin, end) against their
        shards.

        A row holds those that were taken, and the fill checks them then; the others are checked
        only here.
        """
        while begin < end:
            epoch, index = divmod(begin, self.size)
            number = min(end - begin, self.size - index, _TOGETHER)
            order = order_of(self.source, self.key, self.size, epoch).images(index, index + number)
            left = np.isin(np.arange(begin, begin + number), taken, invert=True)
            self.dataset.table.check_lengths(self.first + order[left])
            begin += number

    def _refuse(self, document: int, begin: int) -> None:
        if self.patches is not None and self.lengths[document, 0] == _TOO_MANY_PATCHES:
            raise RecordError(
                f"source {self.source.name!r}: document {document} "
                f"({self.dataset[document].origin}) has {self.patches[document]:,} patches of "
                "images, more than patches_per_row; raise it, or set too_long to drop"
            )
        self.dataset.table.check_lengths(np.array([document]))
        origin = self.dataset[document].origin
        if begin:
            raise StateError(
                f"source {self.source.name!r}: the state goes on at token {begin} of document "
                f"{document} ({origin}), which has {int(self.lengths[document, 0])}: the "
                "state was damaged; load another one, or begin again"
            )
        raise RecordError(
            f"source {self.source.name!r}: document {document} ({origin}) has "
            f"{int(self.lengths[document, 0])} tokens, objective "
            f"{self.source.objective.name!r} takes {self.limit} in a row; raise "
            "sequence_length (or max_document_tokens, or the objective's own limit), or set "
            "too_long to split, truncate, keep_end or drop"
        )
