"""Where sources stand after a step, for a loader with other sources, settings or more documents to
go on from there.

A state (`penstock.plan.loader.state`) is that of one plan. A place is what is left of it when the
plan changes: which documents of each source were seen. A window of rows holds documents out of
their order, so a step ends between

    drawn    [[size, index], …]: the first `index` documents of the order of `size` documents, in the epoch under way
    seen     [epoch, document, begin, end]: tokens of documents after these that are in rows of the step, or before it

A source goes on with the documents of its epoch that were not seen, in its order. If it has grown,
that order is a new one, of all its documents: so the epoch under way has those that are left of the
old ones, and the new ones, mixed; from the next epoch on, all come. Sources are known by their
names, as orders and keys depend on them.
"""  # noqa: E501

import base64
import hashlib
import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, final

import numpy as np

from penstock.core.arrays import Bool, Int64, Records
from penstock.core.errors import ConfigError, StateError
from penstock.core.formats import PLACE
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.core.randomness import mix
from penstock.data.shards import Corpus
from penstock.data.shards.growth import prefix_fingerprint
from penstock.plan.loader.mixture import Source
from penstock.plan.loader.packed_numbers import unpack
from penstock.plan.loader.plan_settings import PlanSettings
from penstock.plan.sampling import Permutation
from penstock.plan.sampling._kernels import ENTRY

_MOST = 2**61
_TOGETHER = 1 << 20
"""Documents of an order that are computed together, for the memory."""
_NOTHING: Int64 = np.empty((0, 4), np.int64)

Seen = Annotated[Int64, "pieces 4"]
"""Epoch, document, first token and end of each."""


def order_of(source: Source, key: int, size: int, epoch: int) -> Permutation:
    """The order of a source's documents in an epoch."""
    epoch_key = int(mix(np.uint64(key), np.uint64(epoch)))
    return Permutation(
        size=size, key=epoch_key, shuffle=source.shuffle, shuffle_runs=source.shuffle_runs
    )


def order_text(source: Source) -> str:
    """How a source is shuffled. Windows of block shuffle grow since runs are said here: older
    states are refused.
    """
    return (
        f"{source.shuffle}, windows of {source.shuffle_runs}"
        if source.shuffle == "block"
        else source.shuffle
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourcePlace:
    """Where one source stands."""

    fingerprint: str
    """Of its dataset."""
    documents: int
    """In that dataset."""
    first: int
    """Number of the first document in use."""
    order: str
    """How it is shuffled."""
    epoch: int
    """The epoch under way: the last one from which a document was drawn."""
    drawn: tuple[tuple[int, int], ...]
    """(size, index): the first `index` documents of the order of `size`, for each size that the
    epoch had.
    """
    seen: Seen
    """What was seen after those."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a plan begins."""

    step: int = 0
    """Number of its first step."""
    place: JsonMapping | None = None
    """What `Step.place` gave; None: all sources begin at their beginning."""

    @property
    def described(self) -> JsonObject:
        """What states say of it; nothing of a plan that begins at its beginning."""
        found: JsonObject = {"first_step": self.step} if self.step else {}
        if self.place is not None:
            text = json.dumps(self.place["sources"], sort_keys=True)
            found["continues"] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return found

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a loader that begins there."""
        return {"continue_from": self.place, "first_step": self.step}

    def of(self, source: Source, dataset: Corpus, settings: PlanSettings) -> SourcePlace | None:
        """The place of a source; None: it is not in it, and begins at its beginning.

        Raises:
            ConfigError: The source is another one than that of the place, with the same name.
            StateError: The place cannot be read.
        """
        if self.place is None or source.name not in self.place["sources"]:
            return None
        place = _read(self.place["sources"][source.name])
        first, size = source.documents_in_use(dataset.table.num_documents)
        before = place.drawn[-1][0]
        changes = [
            ("seed", self.place["seed"], settings.seed),
            ("shuffle", place.order, order_text(source)),
            ("the number of the first document of its slice", place.first, first),
        ]
        changed = [f"{what} was {then}, is {now}" for what, then, now in changes if then != now]
        if size < before:
            changed.append(f"it had {before:,} documents in use, and has {size:,}")
        elif dataset.fingerprint != place.fingerprint and (
            prefix_fingerprint(dataset, place.documents) != place.fingerprint
        ):
            changed.append(
                f"its first {place.documents:,} documents are others than then (a dataset may "
                "grow only at its end: prepare the new data alone, and give the source a "
                "list of both)"
            )
        if changed:
            raise ConfigError(
                f"source {source.name!r} cannot go on where it stood: {'; '.join(changed)}. "
                "Give it as it was, or under another name, which begins at its beginning; or "
                "do not take the place in the data"
            )
        return place


BEGINNING = Start()


def read_place(place: Any) -> JsonObject:
    """A place as `place_after` gave it, checked.

    Raises:
        StateError: It is none.
    """
    try:
        PLACE.check(
            {"format": place["format"]},
            "the place",
            cure="give what Step.place gave",
            error=StateError,
        )
        for one in place["sources"].values():
            _read(one)
        return {name: place[name] for name in ("format", "step", "seed", "sources")}
    except (LookupError, TypeError, AttributeError) as error:
        raise StateError(
            f"this is not a place in the data ({error!r}); give what Step.place gave"
        ) from error


def _read(one: JsonMapping) -> SourcePlace:
    try:
        count, text = one["seen"]
        seen = unpack(base64.b85decode(text), count, 4) if count else _NOTHING
        drawn = tuple((int(size), int(index)) for size, index in one["drawn"])
        numbers = [
            one["documents"],
            one["epoch"],
            one["first"],
            *(n for pair in drawn for n in pair),
            *seen.ravel(),
        ]
        if (
            not drawn
            or not all(0 <= n < _MOST for n in numbers)
            or any(size < index for size, index in drawn)
        ):
            raise ValueError("a number is out of range")
        return SourcePlace(
            fingerprint=one["fingerprint"],
            documents=one["documents"],
            first=one["first"],
            order=one["order"],
            epoch=one["epoch"],
            drawn=drawn,
            seen=seen,
        )
    except (LookupError, TypeError, ValueError, zlib.error, struct.error) as error:
        raise StateError(
            f"this is not a place in the data, or it was damaged ({error!r})"
        ) from error


@final
class Begin:
    """Where a source's stream begins, and which documents after that were seen before.

    Args:
        position: Documents before it in the stream, over all epochs.
        epoch: The epoch under way.
        first: Number of the first document in use.
        size: Documents of an epoch.
        earlier: (size, index) of the orders that the epoch had before: see `SourcePlace.drawn`.
        before: Whether each document was among these.
        seen: As in `SourcePlace`.
        grown: Documents of an epoch before the source has grown; 0: it has not.
    """

    def __init__(
        self,
        *,
        position: int = 0,
        epoch: int = 0,
        first: int = 0,
        size: int = 1,
        earlier: Sequence[tuple[int, int]] = (),
        before: Annotated[Bool, "documents"] | None = None,
        seen: Seen = _NOTHING,
        grown: int = 0,
    ) -> None:
        self.position, self.epoch, self.earlier, self.seen, self.grown = (
            position,
            epoch,
            tuple(earlier),
            seen,
            grown,
        )
        self._first, self._size = first, size
        self.before: Annotated[Bool, "documents"] = (
            np.zeros(0, np.bool_) if before is None else before
        )
        self._ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for of_epoch, document, start, end in sorted(map(tuple, seen.tolist())):
            self._ranges.setdefault((of_epoch, document), []).append((start, end))
        last = max([*seen[:, 0].tolist(), *([epoch] if earlier else [])], default=-1)
        self.seen_until = (last + 1) * size
        """No document from this position on was seen before."""

    def leave_out(self, entries: Annotated[Records, ENTRY, "entries"]) -> int:
        """Leave entries out that were seen, and the tokens at the beginning of one that were; the
        last entry counts what was skipped at the end. Returns how many are left, the last one not
        counted.
        """
        drawn = entries[:-1]
        epochs = drawn["position"] // self._size
        kept: Annotated[Bool, "entries"] = np.ones(len(drawn), np.bool_)
        if len(self.before):
            kept = (epochs != self.epoch) | ~self.before[drawn["document"] - self._first]
        for place in np.flatnonzero(kept & np.isin(drawn["document"], self.seen[:, 1])):
            entry = drawn[place]
            end = entry["begin"] + entry["tokens"]
            for start, stop in self._ranges.get((int(epochs[place]), int(entry["document"])), ()):
                if start <= entry["begin"] < stop:
                    entry["begin"] = min(stop, end)
            entry["tokens"] = entry["length"] = end - entry["begin"]
            kept[place] = entry["tokens"] > 0
        return _compact(entries, kept)


def _compact(entries: Annotated[Records, ENTRY, "drawn+1"], kept: Annotated[Bool, "drawn"]) -> int:
    """Move the entries that are kept to the front; each counts what was skipped since the one
    before it.
    """
    if kept.all():
        return len(kept)
    places = np.flatnonzero(kept)
    skipped = entries["skipped"].copy()
    begins = np.concatenate([[0], places + 1])
    moved = entries[np.append(places, len(kept))]
    for name in skipped.dtype.names or ():
        moved["skipped"][name] = np.add.reduceat(skipped[name], begins)
    entries[: len(moved)] = moved
    return len(places)


def begin_at(
    place: SourcePlace | None, source: Source, first: int, size: int, key: int, last: int
) -> Begin:
    """Where a source's stream begins.

    Args:
        place: Where it stood; None: it is new.
        source: Its settings.
        first: Number of the first document in use.
        size: Documents of an epoch.
        key: Of its orders.
        last: Position at which it is finished.

    Raises:
        ConfigError: It is behind its `max_epochs`, or would end within an epoch in which it has
            grown.
    """
    if place is None:
        return Begin(first=first, size=size)
    *earlier, (before_size, index) = place.drawn
    grown, position = 0, place.epoch * size + index
    if before_size != size:
        grown, position = before_size, place.epoch * size
        earlier = [pair for pair in place.drawn if pair[1]]
    if position > last or (grown and last < (place.epoch + 1) * size):
        raise ConfigError(
            f"source {source.name!r}: max_epochs is {source.max_epochs:g}, and it stands in "
            f"epoch {place.epoch} (the first one is 0): give {place.epoch + 1} or more, or "
            "leave it out for no limit; or leave the source out"
        )
    before = None
    if earlier:
        before = np.zeros(size, np.bool_)
        for of_size, until in earlier:
            order = order_of(source, key, of_size, place.epoch)
            for begin in range(0, until, _TOGETHER):
                before[order.images(begin, min(begin + _TOGETHER, until))] = True
    return Begin(
        position=position,
        epoch=place.epoch,
        first=first,
        size=size,
        earlier=earlier,
        before=before,
        seen=place.seen,
        grown=grown,
    )
