"""Kinds of the tokens of trajectories: sampled, rendered, masked; in a later path also repeated and
rewritten.

Works on what a dataset stores: ids, weights and log-probabilities of paths. A token with a weight
was sampled. One without a weight that has a log-probability was sampled and masked; a masked token
with a log-probability of 0, or without one, looks like a rendered one.

A later path of an answer begins as an earlier one, and behind their fork the replies of that one
may come again. A reply is known to begin at the fork, if that is in it or in the header in front of
it; behind the same text as before, if the reply before it was found; or where all its ids come
again behind the token that was in front of them. If all its ids are there, it is repeated;
otherwise it was rewritten, up to the control token that ends it. Nothing else is claimed: the text
of a sub-agent is no rewritten reply.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from penstock.core.arrays import Array, Bool, Float32, Int64

RENDERED, SAMPLED, MASKED, REPEATED, REWRITTEN = range(5)
KINDS = ("rendered", "sampled", "masked", "repeated", "rewritten")
"""Names of the kinds, by number."""
_HEADER = 16
"""Tokens in front of a reply that templates write or leave out with it, at most."""


class StoredPath(NamedTuple):
    """What is stored of a path of T tokens."""

    ids: Int64
    """int64 [T]."""
    weights: Float32
    """float32 [T]: loss weight of each token as a target."""
    logs: Float32 | None
    """float32 [T], nats: log-probabilities of sampled tokens, 0 of others; None: not stored."""
    answer: int = 0
    """The trajectory that it belongs to."""


class Reply(NamedTuple):
    """A stretch of sampled tokens."""

    number: int
    """Among the replies of its answer, from 0, path by path."""
    path: int
    begin: int
    """Its tokens in the path, [begin, end)."""
    end: int


class Copy(NamedTuple):
    """A stretch of a later path that stands for a reply of an earlier one."""

    path: int
    begin: int
    """Its tokens in the path, [begin, end)."""
    end: int
    reply: int
    """Place of the reply in `TokenKinds.replies`."""
    same: bool
    """Whether its ids are those that were sampled."""


class TokenKinds(NamedTuple):
    """Kinds of the tokens of some paths, with the replies in them."""

    paths: tuple[Array, ...]
    """int8 [T] of each path: numbers of `KINDS`."""
    replies: tuple[Reply, ...]
    copies: tuple[Copy, ...]
    shared: tuple[Copy, ...]
    """Replies in a beginning that a path has in common with an earlier one; where paths are stored
    apart, these are copies, too.
    """


def kinds_of(paths: Sequence[StoredPath], ends: Collection[int] = ()) -> TokenKinds:
    """Kinds of all tokens of paths.

    Args:
        paths: All paths of a document, or of one trajectory, in their order.
        ends: Ids of control tokens, which may end a reply; empty: unknown, any token may.
    """
    search = _Search(paths, frozenset(ends))
    for number in range(len(paths)):
        search.add(number)
    return TokenKinds(
        tuple(search.kinds), tuple(search.replies), tuple(search.copies), tuple(search.shared)
    )


class _Region(NamedTuple):
    """Where a reply stands in a path, in whatever form."""

    reply: int
    begin: int
    end: int
    same: bool = True


@final
class _Search:
    """Kinds of paths, found one after another."""

    def __init__(self, paths: Sequence[StoredPath], ends: frozenset[int]) -> None:
        self._paths, self._ends = paths, ends
        self.kinds: list[Array] = []
        self.replies: list[Reply] = []
        self.copies: list[Copy] = []
        self.shared: list[Copy] = []
        self._regions: list[list[_Region]] = []

    def add(self, number: int) -> None:
        """Add a path."""
        path = self._paths[number]
        near, shared = self._nearest(number)
        trained, logs = path.weights != 0, path.logs
        masked = np.zeros(len(trained), np.bool_) if logs is None else (logs != 0) & ~trained
        kinds = np.where(trained, SAMPLED, np.where(masked, MASKED, RENDERED)).astype(np.int8)
        own = [one for one in _runs(trained | masked) if one[1] > shared]
        limit = own[0][0] if own else len(path.ids)
        regions: list[_Region] = []
        if near is not None:
            known = self.kinds[near][:shared]
            again = np.where(known == RENDERED, RENDERED, REPEATED)
            again[known == REWRITTEN] = REWRITTEN
            kinds[:shared] = np.where(trained[:shared], SAMPLED, again)
            regions += [one for one in self._regions[near] if one.end <= shared]
            self.shared += [
                Copy(number, one.begin, one.end, one.reply, one.same) for one in regions
            ]
            for copy in self._copies(number, near, shared, limit):
                self.copies.append(copy)
                regions.append(_Region(copy.reply, copy.begin, copy.end, copy.same))
                mine = kinds[copy.begin : copy.end]
                mine[mine != SAMPLED] = REPEATED if copy.same else REWRITTEN
        before = sum(self._answer(one) == path.answer for one in self.replies)
        for place, (begin, end) in enumerate(own):
            regions.append(_Region(len(self.replies), begin, end))
            self.replies.append(Reply(before + place, number, begin, end))
        self.kinds.append(kinds)
        self._regions.append(regions)

    def _answer(self, reply: Reply) -> int:
        return self._paths[reply.path].answer

    def _nearest(self, number: int) -> tuple[int | None, int]:
        """The earlier path of the answer with most tokens in common at the beginning, of several
        the last; and how many.
        """
        path = self._paths[number]
        found: tuple[int | None, int] = None, 0
        for other in range(number):
            if self._paths[other].answer == path.answer:
                shared = common_ids(self._paths[other].ids, path.ids)
                if shared and shared >= found[1]:
                    found = other, shared
        return found

    def _copies(self, number: int, near: int, shared: int, limit: int) -> Iterator[Copy]:
        """Replies of an earlier path that come again behind the fork, in front of `limit`."""
        old, new = self._paths[near].ids, self._paths[number].ids[:limit]
        # One after what both paths have alike, in each; None: unknown.
        at: tuple[int, int] | None = (shared, shared)
        floor = shared
        for region in self._regions[near]:
            if region.end <= shared:
                continue
            said = self._ids_of(region.reply)
            begin = None if at is None else _begin(region, old, new, at, int(said[-1]))
            again = _again(said, new, begin, old[region.begin - 1 : region.begin], floor)
            begin = begin if again is None else again
            at = None
            if begin is not None and begin < limit:
                end = self._end(new, begin, said) if again is None else again + len(said)
                if end is not None:
                    at, floor = (region.end, end), end
                    yield Copy(number, begin, end, region.reply, again is not None)

    def _end(self, new: Int64, begin: int, said: Int64) -> int | None:
        """One after the token that ends a rewritten reply; None: unknown.

        That is the token that ended what was sampled, or else the first control token that differs
        from it.
        """
        last = int(said[-1])
        if not self._ends or last in self._ends:
            places = np.flatnonzero(new[begin:] == last)
            if len(places):
                return begin + int(places[0]) + 1
        same = common_ids(new[begin:], said)
        for place in range(begin + same, len(new)):
            if int(new[place]) in self._ends:
                return place + 1
        return None

    def _ids_of(self, reply: int) -> Int64:
        _, path, begin, end = self.replies[reply]
        return self._paths[path].ids[begin:end]


def common_ids(one: Array, other: Array) -> int:
    """Number of equal tokens at the beginning."""
    most = min(len(one), len(other))
    differs = np.flatnonzero(one[:most] != other[:most])
    return int(differs[0]) if len(differs) else most


def _begin(region: _Region, old: Int64, new: Int64, at: tuple[int, int], last: int) -> int | None:
    """Where a reply begins in another path; None: unknown.

    Args:
        region: Where it stands in the earlier path.
        old: Ids of that path.
        new: Ids of the other one.
        at: One after what both have alike, in each.
        last: The token that ends the reply.
    """
    if region.begin <= at[0]:
        return at[1] - at[0] + region.begin
    between = old[at[0] : region.begin]
    same = common_ids(between, new[at[1] :])
    # The header of a reply may be rewritten with it: `<think>` of a prompt, where thoughts go.
    rest = between[same:]
    known = len(rest) <= _HEADER and last not in rest
    return at[1] + same if known else None


def _again(said: Int64, new: Int64, begin: int | None, before: Int64, floor: int) -> int | None:
    """Where all ids of a reply come again: at its beginning, or behind a header that was not there;
    with an unknown beginning, behind the token that was in front of them, from `floor` on. None:
    nowhere.
    """
    if begin is None:
        found = _find(new, np.concatenate([before, said]), floor)
        return None if found < 0 else found + len(before)
    found = _find(new[: begin + _HEADER + len(said)], said, begin)
    return None if found < 0 or said[-1] in new[begin:found] else found


def _runs(chosen: Bool) -> list[tuple[int, int]]:
    """[begin, end) of each stretch of true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen, [0]]))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _find(ids: Int64, wanted: Any, at: int) -> int:
    """First place of some ids from `at` on; −1: none."""
    for place in (np.flatnonzero(ids[at:] == wanted[0]) + at).tolist():
        if np.array_equal(ids[place : place + len(wanted)], wanted):
            return int(place)
    return -1
