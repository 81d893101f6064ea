"""What of a remote dataset is fetched together: units, and the byte ranges of shards that they are.

Tokens come in runs of 256 documents, counted from the dataset's first, as block shuffle counts
them. A run's tokens are one range of each record batch that it touches, and so are its checksums;
both follow from the lengths. So do the offsets of tokens and checksums: they are made here, not
fetched. Other things are units of their own, fetched only where they are needed: spans and columns
of a batch of 1,024 documents, origins and texts of a run.

Units share pages of a file at their borders. A page is given back when no unit on it is present.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple, final

import numpy as np

from penstock.core.arrays import Array, Int64
from penstock.data.shards.format._kernels import CHUNK_TOKENS, RUN_DOCUMENTS
from penstock.data.shards.format.manifest import Manifest
from penstock.data.shards.tables.holder import EXTRAS, ORIGINS, SPANS, TOKENS
from penstock.data.shards.tables.lengths import LazyNumbers
from penstock.data.shards.tables.table import DocumentTable

PAGE = 4096
"""Bytes that the disk gives and takes together."""
_KEPT_UNITS = 1 << 11


class Range(NamedTuple):
    """Bytes [begin, end) of a shard."""

    shard: int
    begin: int
    end: int


class Made(NamedTuple):
    """Bytes for a place in a shard, such as those that follow from the lengths."""

    shard: int
    begin: int
    content: bytes | memoryview


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What a unit consists of."""

    fetched: tuple[Range, ...]
    made: tuple[Made, ...]
    has_more: bool
    """Whether it has texts, or lists behind texts, whose places are read from what was fetched
    (`UnitMap.later`).
    """

    @property
    def places(self) -> list[Range]:
        """Where its bytes lie, as far as the lengths say."""
        made = (Range(one.shard, one.begin, one.begin + len(one.content)) for one in self.made)
        return [*self.fetched, *made]


class _Segment(NamedTuple):
    """Rows [first, last) of a batch, and what the lengths say of the whole batch."""

    shard: int
    batch: int
    first: int
    last: int
    tokens: Array
    """int64 [rows + 1], offsets of all rows in tokens."""
    words: Array
    """int64 [rows + 1], offsets of all rows in checksums."""

    @property
    def rows(self) -> int:
        return len(self.tokens) - 1


@final
class UnitMap:
    """The units of one dataset.

    Args:
        table: Its document table.
        manifest: Its manifest.
    """

    def __init__(self, table: DocumentTable, manifest: Manifest) -> None:
        self._table, self._layout = table, manifest.layout
        runs, batches = -(-len(table.lengths) // RUN_DOCUMENTS), len(table.batches)
        self._firsts = np.cumsum([0, runs, batches, runs, batches], dtype=np.int64)
        self._ends = self._firsts[1:].tolist()
        self._has_lengths = np.zeros(len(self), np.bool_)
        self.unit = lru_cache(_KEPT_UNITS)(self._unit)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def kind(self, unit: int) -> int:
        """TOKENS or ORIGINS (units are runs), SPANS or EXTRAS (units are batches)."""
        return bisect_right(self._ends, unit)

    @property
    def runs(self) -> int:
        """Number of units of tokens; they are the first ones."""
        return int(self._firsts[1])

    @property
    def self_checked(self) -> int:
        """Number of units that have checksums in the shard, those of tokens and spans; they are the
        first ones.
        """
        return int(self._firsts[ORIGINS])

    def of(
        self, documents: Annotated[Int64, "documents"], kinds: Sequence[int]
    ) -> Annotated[Int64, "units"]:
        """The units of some kinds that hold documents, rising."""
        found = []
        runs = batches = None
        for kind in kinds:
            if (kind == SPANS and not self._layout.has_spans) or (
                kind == EXTRAS and not self._layout.extras
            ):
                continue
            if kind in (TOKENS, ORIGINS):
                runs = np.unique(documents // RUN_DOCUMENTS) if runs is None else runs
                found.append(self._firsts[kind] + runs)
            else:
                batches = self._batches(documents) if batches is None else batches
                found.append(self._firsts[kind] + batches)
        return np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)

    def ranges(self, begin: int, end: int, kinds: Sequence[int]) -> list[tuple[int, int]]:
        """The units of some kinds that hold documents [begin, end), as ranges of numbers; those of
        `of`.
        """
        ends = np.array([begin, end - 1])
        found = [self.of(ends, [kind]) for kind in kinds] if begin < end else []
        return [(int(units[0]), int(units[-1]) + 1) for units in found if units.size]

    def _batches(self, documents: Annotated[Int64, "documents"]) -> Annotated[Int64, "batches"]:
        table = self._table
        shards = np.searchsorted(table.shard_starts, documents, side="right") - 1
        local = documents - table.shard_starts[shards]
        return np.unique(table.shard_first_batch[shards] + local // table.documents_per_batch)

    def documents(self, unit: int) -> tuple[int, int]:
        """First and last (exclusive) document of a unit."""
        kind = self.kind(unit)
        number = unit - int(self._firsts[kind])
        if kind in (TOKENS, ORIGINS):
            begin = number * RUN_DOCUMENTS
            return begin, min(begin + RUN_DOCUMENTS, len(self._table.lengths))
        _, begin, rows = self._batch(number)
        return begin, begin + rows

    def _batch(self, batch: int) -> tuple[int, int, int]:
        """Shard, first document and number of documents of a batch."""
        table = self._table
        shard = int(np.searchsorted(table.shard_first_batch, batch, side="right")) - 1
        begin = (
            int(table.shard_starts[shard])
            + (batch - int(table.shard_first_batch[shard])) * table.documents_per_batch
        )
        return (
            shard,
            begin,
            min(table.documents_per_batch, int(table.shard_starts[shard + 1]) - begin),
        )

    def need_lengths(self, units: Annotated[Int64, "units"]) -> None:
        """Have the lengths that tell where units lie, of all at once; without it, each unit fetches
        its own.
        """
        if isinstance(self._table.lengths, LazyNumbers) and len(
            units := units[~self._has_lengths[units]]
        ):
            begins, ends = np.array([self._whole_batches(unit) for unit in units.tolist()]).T
            self._table.lengths.ranges.need(begins, ends)
            self._has_lengths[units] = True

    def has_lengths(self, unit: int) -> bool:
        """Whether the lengths that tell where a unit lies are on this machine; if not, nobody has
        brought the unit.
        """
        lengths = self._table.lengths
        return not isinstance(lengths, LazyNumbers) or lengths.ranges.has(
            *self._whole_batches(unit)
        )

    def _whole_batches(self, unit: int) -> tuple[int, int]:
        """First and last (exclusive) document of the batches with documents of a unit."""
        begin, end = self.documents(unit)
        _, low, _ = self._batch(self._table.locate(begin)[1])
        _, start, rows = self._batch(self._table.locate(end - 1)[1])
        return low, start + rows

    def _segments(self, begin: int, end: int) -> Iterator[_Segment]:
        """The batches with documents [begin, end)."""
        while begin < end:
            _, batch, row = self._table.locate(begin)
            shard, start, rows = self._batch(batch)
            lengths = self._table.lengths[start : start + rows, 0].astype(np.int64)
            words = -(-lengths // CHUNK_TOKENS) + self._layout.has_spans
            last = min(rows, end - start)
            yield _Segment(shard, batch, row, last, _offsets(lengths), _offsets(words))
            begin = start + last

    def _unit(self, unit: int) -> Unit:
        """What a unit consists of; kept for some thousand units, as `unit`."""
        kind = self.kind(unit)
        fetched: list[Range] = []
        made: list[Made] = []
        for segment in self._segments(*self.documents(unit)):
            if kind == TOKENS:
                self._tokens(segment, fetched, made)
            elif kind == SPANS:
                self._spans(segment, fetched, made)
            else:
                self._make_checksum_end(segment, made)
                texts = self._texts(segment)
                if kind == ORIGINS:
                    self._origins(segment, texts, fetched)
                elif self._layout.has_text:
                    fetched.append(
                        Range(
                            segment.shard, texts + 8 * segment.rows, texts + 8 * (segment.rows + 1)
                        )
                    )
                else:
                    fetched.append(Range(segment.shard, texts, self._batch_end(segment)))
        return Unit(
            fetched=tuple(one for one in fetched if one.end > one.begin),
            made=tuple(made),
            has_more=kind in (ORIGINS, EXTRAS) and self._layout.has_text,
        )

    def later(self, unit: int, mappings: Sequence[Array]) -> list[Range]:
        """The rest of a unit with texts, once its `fetched` is in the mapped shards: their places
        are read there.
        """
        if not self.unit(unit).has_more:
            return []
        kind, found = self.kind(unit), []
        for segment in self._segments(*self.documents(unit)):
            data, texts = mappings[segment.shard], self._texts(segment)
            values = texts + 8 * (segment.rows + 1)
            size = len(data) - values
            if kind == ORIGINS:
                begin, end = (
                    int(data[texts + 8 * row :][:8].view(np.int64)[0])
                    for row in (segment.first, segment.last)
                )
                begin, end = max(min(begin, size), 0), max(min(end, size), 0)
                found.append(Range(segment.shard, values + begin, values + max(begin, end)))
            else:
                count = int(data[values - 8 : values].view(np.int64)[0])
                begin = values + -(-max(min(count, size), 0) // 8) * 8
                found.append(Range(segment.shard, min(begin, len(data)), self._batch_end(segment)))
        return [one for one in found if one.end > one.begin]

    def _tokens(self, segment: _Segment, fetched: list[Range], made: list[Made]) -> None:
        shard, _, first, last, tokens, words = segment
        line, size = self._table.batches[segment.batch], self._table.token_bytes
        for place, offsets, width in (("tokens", tokens, size), ("checksums", words, 8)):
            if begin := int(line[place]):
                fetched.append(
                    Range(
                        shard,
                        begin + width * int(offsets[first]),
                        begin + width * int(offsets[last]),
                    )
                )
        for place, offsets in (("token_offsets", tokens), ("checksum_offsets", words)):
            made.append(
                Made(shard, int(line[place]) + 8 * first, offsets[first : last + 1].tobytes())
            )

    def _spans(self, segment: _Segment, fetched: list[Range], made: list[Made]) -> None:
        line = self._table.batches[segment.batch]
        begin = int(line["span_bitmap"]) or int(line["span_offsets"])
        fetched.append(Range(segment.shard, begin, self._origin_places(segment)[0]))
        if words := int(line["checksums"]):
            fetched.append(Range(segment.shard, words, words + 8 * int(segment.words[-1])))
        for place, offsets in (
            ("token_offsets", segment.tokens),
            ("checksum_offsets", segment.words),
        ):
            made.append(Made(segment.shard, int(line[place]), offsets.tobytes()))

    def _origins(self, segment: _Segment, texts: int, fetched: list[Range]) -> None:
        files, lines = self._origin_places(segment)
        shard, first, last = segment.shard, segment.first, segment.last
        fetched += [
            Range(shard, files + 4 * first, files + 4 * last),
            Range(shard, lines + 8 * first, lines + 8 * last),
        ]
        if self._layout.has_text:
            fetched.append(Range(shard, texts + 8 * first, texts + 8 * (last + 1)))

    def _make_checksum_end(self, segment: _Segment, made: list[Made]) -> None:
        """The number of checksums of a batch, which tells where texts are
        (`layout.other_places`).
        """
        place = int(self._table.batches[segment.batch]["checksum_offsets"]) + 8 * segment.rows
        made.append(Made(segment.shard, place, segment.words[-1:].tobytes()))

    def _origin_places(self, segment: _Segment) -> tuple[int, int]:
        """Where origin files and lines of a batch begin, as in `layout.other_places`."""
        lines = int(self._table.batches[segment.batch]["checksum_offsets"]) - 8 * segment.rows
        return lines - (4 * segment.rows + 7) // 8 * 8, lines

    def _texts(self, segment: _Segment) -> int:
        """Where what follows the checksums of a batch begins, as in `layout.other_places`."""
        line = self._table.batches[segment.batch]
        words = int(line["checksums"])
        return (
            words + 8 * int(segment.words[-1])
            if words
            else int(line["checksum_offsets"]) + 8 * (segment.rows + 1)
        )

    def _batch_end(self, segment: _Segment) -> int:
        """An upper bound of the bytes of a batch."""
        following = segment.batch + 1
        if following < int(self._table.shard_first_batch[segment.shard + 1]):
            return int(self._table.batches[following]["token_offsets"])
        return int(self._table.shard_bytes[segment.shard])

    def pages(self, unit: int, mappings: Sequence[Array]) -> list[Range]:
        """The pages that a unit lies on, as ranges of page numbers; of a present unit, if it has
        texts.
        """
        return _pages_of([*self.unit(unit).places, *self.later(unit, mappings)])

    def size(self, unit: int) -> int:
        """Bytes of the pages of a unit, without texts."""
        return page_bytes(_pages_of(self.unit(unit).places))

    def run_bytes(self, kinds: Sequence[int]) -> int:
        """Mean bytes of the pages that a run takes alone, with units of some kinds; of up to 64
        runs.
        """
        runs = {self.runs * number // 64 for number in range(64)} if self.runs else set()
        self.need_lengths(np.array(sorted(runs), np.int64))
        sizes = [
            sum(map(self.size, self.of(np.arange(*self.documents(run)), kinds).tolist()))
            for run in runs
        ]
        return -(-sum(sizes) // max(len(sizes), 1))

    def neighbours(self, unit: int) -> Annotated[Int64, "units"]:
        """Units that may share a page with a unit: those of its batches, and of the batch before
        and after.
        """
        begin, end = self.documents(unit)
        first = max(self._table.locate(begin)[1] - 1, 0)
        last = min(self._table.locate(end - 1)[1] + 1, len(self._table.batches) - 1)
        _, low, _ = self._batch(first)
        _, start, rows = self._batch(last)
        runs = np.arange(low // RUN_DOCUMENTS, (start + rows - 1) // RUN_DOCUMENTS + 1)
        batches = np.arange(first, last + 1)
        found = [self._firsts[TOKENS] + runs, self._firsts[ORIGINS] + runs]
        found += [self._firsts[SPANS] + batches] if self._layout.has_spans else []
        found += [self._firsts[EXTRAS] + batches] if self._layout.extras else []
        joined = np.concatenate(found)
        others: Annotated[Int64, "units"] = joined[joined != unit]
        return others


def _pages_of(ranges: Sequence[Range]) -> list[Range]:
    return merged([Range(one.shard, one.begin // PAGE, -(-one.end // PAGE)) for one in ranges])


def page_bytes(pages: Sequence[Range]) -> int:
    """Bytes of ranges of page numbers."""
    return PAGE * sum(one.end - one.begin for one in pages)


def without(pages: Sequence[Range], kept: Sequence[Range]) -> list[Range]:
    """Ranges of page numbers that are not among others."""
    for keep in kept:
        pages = [part for one in pages for part in _cut(one, keep)]
    return list(pages)


def _cut(one: Range, keep: Range) -> Iterator[Range]:
    if one.shard != keep.shard or keep.end <= one.begin or one.end <= keep.begin:
        yield one
        return
    if one.begin < keep.begin:
        yield Range(one.shard, one.begin, keep.begin)
    if keep.end < one.end:
        yield Range(one.shard, keep.end, one.end)


def joined_requests(
    ranges: Sequence[Range], gap: int, share: int = 0
) -> list[tuple[Range, list[Range]]]:
    """Requests for some ranges, each with the ranges that it brings.

    Args:
        ranges: What is to come.
        gap: Greatest distance in bytes of ranges that come together.
        share: The same, as one part in `share` of the range before; 0: not.
    """
    found: list[tuple[Range, list[Range]]] = []
    for one in sorted(ranges):
        if found:
            whole, parts = found[-1]
            most = max(gap, (parts[-1].end - parts[-1].begin) // share) if share else gap
            if whole.shard == one.shard and one.begin - whole.end <= most:
                parts.append(one)
                found[-1] = whole._replace(end=max(whole.end, one.end)), parts
                continue
        found.append((one, [one]))
    return found


def merged(ranges: Sequence[Range]) -> list[Range]:
    """The same bytes in the fewest ranges."""
    return [whole for whole, _ in joined_requests(ranges, 0)]


def _offsets(sizes: Array) -> Array:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
