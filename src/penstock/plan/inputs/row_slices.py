"""One row shared by several ranks (context parallelism): each has some of its slots, and sees all
of its keys.

    row     a document of 12 slots ······ | another ·· | padding
    chunks   0  1  2  3  4  5  6  7           a few for each rank
    rank 0   0     2        5     7           chosen so that all ranks have about as many pairs of query and key

A row is cut into chunks of equal length, `chunks` for each rank. The chunk with the most pairs of
query and key goes to the rank with the fewest so far; then chunks are exchanged as long as that
lowers the largest sum. Zigzag (the first and the last chunk to rank 0, and so on) is balanced only
for a row of one document.

Targets, loss weights and positions are the row's own: a target may be the token of a slot on
another rank. So the losses of all slices, each divided by the step's denominator, add up to the
row's. Keys are those of the row, gathered from all ranks, which is what `runs` and `full_runs`
refer to.

Every rank computes the same division, from the row alone. Cost: O(row) with NumPy, and some
milliseconds at most.

Source: keys that are gathered, with a balanced division, as in Llama 3 (arXiv:2407.21783, section
3.3.2).
"""  # noqa: E501

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Annotated, Any, Self, final

import numpy as np

from penstock.core.arrays import Bool, Float32, Int32, Int64, Integers
from penstock.core.errors import ConfigError
from penstock.plan.inputs.attention import AttentionRule
from penstock.plan.inputs.model_input import IGNORE, ModelInput

CHUNKS = 8
"""Chunks of a row for each rank, by default."""
_EXCHANGES = 200
"""Exchanges of two chunks, at most. A few are enough; each lowers the largest sum or settles a
tie.
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RowSlice:
    """The slots of one row that one rank has. t slots of T'; T' = size × t is T rounded up.

    A slot past the row's end is padding: it has a place of its own in `index`, no target, and 0 for
    its token and in columns.
    """

    rank: int
    """This rank, 0 … size − 1, among those that share the row."""
    size: int
    """Number of ranks that share the row."""
    tokens: Annotated[Integers, "own_slots"]
    """[t]"""
    targets: Annotated[Integers, "distances own_slots"]
    """[D, t] those of the row; the token may be in a slot of another rank."""
    loss_weights: Annotated[Float32, "distances own_slots"] | None
    """[D, t]"""
    positions: Annotated[Integers, "own_slots"] | None
    """[t] position of the token in its document, which may begin on another rank."""
    document_ids: Annotated[Integers, "own_slots"] | None
    """[t]"""
    index: Annotated[Int64, "own_slots"]
    """[t] place of each slot in the row, rising."""
    order: Annotated[Int64, "slots"]
    """[T'] what all ranks have, one after another, put into the row's order: `gathered[order]`."""
    runs: Annotated[Int64, "runs 4"]
    """[n, 4] begin and end of queries in this slice, begin and end of keys in the row; causal,
    aligned at the end: of m queries, query i sees all keys but the last m − 1 − i. In the order of
    queries; no query is in two.
    """
    full_runs: Annotated[Int64, "full_runs 4"]
    """[m, 4] the same, where each query sees each key: prefixes, and the nodes above a node of a
    prefix tree. A query sees the keys of all runs that it is in, none of them twice. Empty without
    prefixes and trees: one variable-length call over `runs` is then all attention.
    """
    loads: Annotated[Int64, "ranks"]
    """[size] pairs of query and key of each rank."""
    rule: AttentionRule
    """Who sees whom in the row of T' slots."""
    source: ModelInput
    """The row."""
    columns: Mapping[str, Annotated[Any, "own_slots"]]
    """Name → [t] the numbers that the data have for each token."""

    def __repr__(self) -> str:
        return (
            f"RowSlice({self.rank} of {self.size}: {len(self.index)} of {len(self.order)} "
            f"slots, {self.loads[self.rank]:,} pairs; ranks have {self.loads.min():,} to "
            f"{self.loads.max():,})"
        )

    @property
    def lengths(self) -> tuple[Annotated[Int32, "borders"], Annotated[Int32, "borders"]]:
        """[n + 1] cumulative lengths of queries, and of keys, of `runs`: those of a variable-length
        call.

        The keys are those of each run, one run after another: `row_keys[keys]`.

        Raises:
            ConfigError: The row has prefixes or trees, for which one causal call is not enough.
        """
        if len(self.full_runs):
            raise ConfigError(
                "a row with bidirectional prefixes or prefix trees takes more than one causal "
                "call of variable length; use runs and full_runs"
            )
        counts = self.runs[:, 1] - self.runs[:, 0], self.runs[:, 3] - self.runs[:, 2]
        queries, keys = (
            np.concatenate([[0], np.cumsum(count)]).astype(np.int32) for count in counts
        )
        return queries, keys

    @property
    def keys(self) -> Annotated[Int64, "keys"]:
        """[keys] place in the row of each key of each of `runs`, one run after another."""
        return np.concatenate([np.arange(begin, end) for begin, end in self.runs[:, 2:].tolist()])

    def dense_mask(self) -> Annotated[Bool, "own_slots slots"]:
        """[t, T']: whether the query of this slice sees the key of the row. For small rows and
        tests.
        """
        seen = np.zeros((len(self.index), len(self.order)), bool)
        for begin, end, first, last in self.runs.tolist():
            seen[begin:end, first:last] = np.tri(
                end - begin, last - first, last - first - end + begin, dtype=bool
            )
        for begin, end, first, last in self.full_runs.tolist():
            seen[begin:end, first:last] = True
        return seen

    def torch(self, device: Any = None, *, non_blocking: bool = True) -> dict[str, Any]:
        """The arrays as tensors by name; tokens, targets and positions in int64.

        Args:
            device: Target device; None: the CPU.
            non_blocking: Copy from page-locked memory without waiting.
        """
        # Only who has torch asks for tensors.
        from penstock.plan.inputs.torch_tensors import as_tensors

        names = (
            "tokens",
            "targets",
            "loss_weights",
            "positions",
            "document_ids",
            "index",
            "order",
            "columns",
        )
        return as_tensors({name: getattr(self, name) for name in names}, device, non_blocking)

    @classmethod
    def of(cls, row: ModelInput, rank: int, size: int, *, chunks: int = CHUNKS) -> Self:
        """The slots that one of several ranks has of a row, which they share (context parallelism).

        ```python
        part = ps.inputs.RowSlice.of(row, rank, size)       # part.tokens, part.targets, part.positions, …
        ```

        Args:
            row: With `cu_seqlens` or `document_ids`.
            rank: Of this process among those that share the row.
            size: Their number.
            chunks: Chunks for each rank: more are better balanced, and make more and shorter runs.

        Raises:
            ConfigError: The numbers do not fit, the row does not say where its documents are, or it
                has images or something for teachers, which have no slices.
        """  # noqa: E501
        _check(row, rank, size, chunks)
        each = -(-row.sequence_length // (size * chunks)) * chunks
        rule = _padded_rule(AttentionRule.of(row), size * each)
        pairs = _pairs(rule)
        owners = _assign(pairs.reshape(size * chunks, -1).sum(1), size)
        index = np.concatenate(
            [_slots_of(owners, number, each // chunks) for number in range(size)]
        )
        order = np.empty(size * each, np.int64)
        order[index] = np.arange(size * each)
        mine = index[rank * each : (rank + 1) * each]
        runs, full_runs = _runs(rule, _intervals(mine))
        return cls(
            rank=rank,
            size=size,
            **_arrays(row, mine),
            index=mine,
            order=order,
            runs=runs,
            full_runs=full_runs,
            loads=pairs[index].reshape(size, each).sum(1),
            rule=rule,
            source=row,
        )


def _check(row: ModelInput, rank: int, size: int, chunks: int) -> None:
    numbers: dict[str, tuple[Any, int]] = {
        "rank": (rank, 0),
        "size": (size, 1),
        "chunks": (chunks, 1),
    }
    for name, (number, least) in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Integral) or number < least:
            raise ConfigError(
                f"RowSlice: {name} must be a whole number of {least} or more, got {number!r}"
            )
    if rank >= size:
        raise ConfigError(f"RowSlice: rank must be 0 … {size - 1}, got {rank} of {size}")
    if row.media is not None:
        raise ConfigError(
            "RowSlice: rows with images cannot be shared by ranks; train without context "
            "parallelism"
        )
    if row.distillation is not None:
        raise ConfigError(
            "RowSlice: what a companion of the loader made of a row (for teachers, say) "
            "cannot be shared by ranks; give replace(row, distillation=None) if this is not "
            "needed, or distill without context parallelism"
        )


def _padded_rule(rule: AttentionRule, slots: int) -> AttentionRule:
    """The rule with further padding, a document of its own, up to `slots`."""
    used = rule.num_slots
    if used == slots:
        return rule
    reach = None if rule.reach is None else np.append(rule.reach, slots)
    return AttentionRule(np.concatenate([rule.pieces, [[used, used, slots]]]), reach)


def _pairs(rule: AttentionRule) -> Annotated[Int64, "slots"]:
    """[T'] keys that each slot sees."""
    seen = rule.positions + 1
    if rule.bidirectional:
        # A slot of a prefix also sees those that follow it there.
        behind = rule.pieces[rule.document_ids, 1] - np.arange(rule.num_slots) - 1
        seen = seen + np.where(rule.prefix, behind, 0)
    return seen


def _assign(pairs: Annotated[Int64, "chunks"], size: int) -> Annotated[Int64, "chunks"]:
    """The rank of each chunk: equal numbers of chunks, and about equal sums of pairs."""
    each = len(pairs) // size
    owners, loads, counts = (
        np.empty(len(pairs), np.int64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
    )
    for chunk in np.argsort(-pairs, kind="stable").tolist():
        free = np.flatnonzero(counts < each)
        rank = free[np.argmin(loads[free])]
        owners[chunk] = rank
        loads[rank] += pairs[chunk]
        counts[rank] += 1
    for _ in range(_EXCHANGES):
        if not _exchange(pairs, owners, loads):
            break
    return owners


def _exchange(
    pairs: Annotated[Int64, "chunks"],
    owners: Annotated[Int64, "chunks"],
    loads: Annotated[Int64, "ranks"],
) -> bool:
    """Exchange the two chunks that help the fullest rank most; False: none do."""
    most = int(np.argmax(loads))
    mine, others = np.flatnonzero(owners == most), np.flatnonzero(owners != most)
    if not len(others):
        return False
    moved = pairs[mine][:, None] - pairs[others]
    larger = np.maximum(loads[most] - moved, loads[owners[others]] + moved)
    place = int(np.argmin(larger))
    if larger.flat[place] >= loads[most]:
        return False
    one, other = mine[place // len(others)], others[place % len(others)]
    loads[owners[one]] -= moved.flat[place]
    loads[owners[other]] += moved.flat[place]
    owners[one], owners[other] = owners[other], owners[one]
    return True


def _slots_of(
    owners: Annotated[Int64, "chunks"], rank: int, length: int
) -> Annotated[Int64, "own_slots"]:
    """The slots of a rank's chunks, in the row's order."""
    begins = np.flatnonzero(owners == rank) * length
    return (begins[:, None] + np.arange(length)).ravel()


def _intervals(index: Annotated[Int64, "own_slots"]) -> Iterator[tuple[int, int, int]]:
    """(begin, end, place in the slice of the first) of the stretches of the row that a slice
    has.
    """
    starts = np.flatnonzero(np.diff(index, prepend=-2) != 1)
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(index)], strict=True):
        yield int(index[start]), int(index[start]) + stop - start, start


def _runs(
    rule: AttentionRule, intervals: Iterator[tuple[int, int, int]]
) -> tuple[Annotated[Int64, "runs 4"], Annotated[Int64, "full_runs 4"]]:
    """`runs` and `full_runs` of a slice."""
    causal: list[list[int]] = []
    full: list[list[int]] = []
    begins, _, ends = rule.pieces.T
    parents = np.flatnonzero(rule.ends > ends)
    for begin, end, start in intervals:
        first, last = np.searchsorted(ends, begin, "right"), np.searchsorted(begins, end)
        for piece, prefix_end, piece_end in rule.pieces[first:last].tolist():
            low, high = max(begin, piece), min(end, piece_end)
            if prefix_end > piece + 1 and low < prefix_end:
                middle = min(high, prefix_end)
                full.append([start + low - begin, start + middle - begin, piece, prefix_end])
                low = middle
            if low < high:
                causal.append([start + low - begin, start + high - begin, piece, high])
        for parent in parents[(ends[parents] < end) & (rule.ends[parents] > begin)].tolist():
            low, high = max(begin, int(ends[parent])), min(end, int(rule.ends[parent]))
            full.append(
                [start + low - begin, start + high - begin, int(begins[parent]), int(ends[parent])]
            )
    return np.array(causal, np.int64).reshape(-1, 4), np.array(full, np.int64).reshape(-1, 4)


def _arrays(row: ModelInput, index: Annotated[Int64, "own_slots"]) -> dict[str, Any]:
    """The fields of a slice that are those of the row, with padding past its end."""
    slots = row.sequence_length

    def take(array: Any, fill: object) -> Any:
        """[…, T] → […, t]."""
        if array is None:
            return None
        taken = array[..., np.minimum(index, slots - 1)]
        taken[..., index >= slots] = fill
        return taken

    positions = None
    if row.positions is not None:
        positions = take(row.positions, 0)
        positions[index >= slots] = index[index >= slots] - slots
    return {
        "tokens": take(row.tokens, 0),
        "targets": take(row.targets, IGNORE),
        "loss_weights": take(row.loss_weights, 0),
        "positions": positions,
        "document_ids": None
        if row.document_ids is None
        else take(row.document_ids, row.document_ids[-1] + 1),
        "columns": {name: take(column, 0) for name, column in row.columns.items()},
    }
