"""Compiled choice of the next source: the cost of a document does not grow with the sources.

Each document taken adds to the credit of every source, so a source's credit is a line over the
tokens taken: `credits[source] + shares[source] * elapsed`, exact in int64. Only the source that
gave a document leaves its line. So when a source has credit again (an integer number of tokens
away), and when its credit covers its next document, are fixed until it is chosen, and two trees of
minima find the next of each: `due` over the sources with credit, `free` over the others.

The choice is the one that `pick` makes by a look at every source, to the bit: `due` holds lower
bounds of what `pick` computes in float64, and whoever could be first by its bound is computed as
there. `pick` itself chooses among few sources, and where none has credit.
"""

import numpy as np

from penstock.core.compiled import inline_kernel

FEW = 8
"""Sources up to which a look at each is faster than the trees."""
MOST_ELAPSED = 1 << 28
"""Tokens after which lines begin again at 0, so that products with shares fit int64."""
NEVER = np.iinfo(np.int64).max

_SLACK = 2.0**-48
"""Relative error that a bound allows for; that of `pick` and the bound together is below 2⁻⁴⁹."""


def tree_size(sources: int) -> int:
    """Items of a tree of minima over this many sources: leaves are its second half."""
    return 2 << max(sources - 1, 0).bit_length()


@inline_kernel
def pick(shares, credits, elapsed, heads, ends, entries, unit):
    """The next source, −1 when all are finished, −2 − i when source i's buffer is empty.

    Among sources with credit left, the one with the credit that covers its next document soonest
    (the deadline rule of Tijdeman and Baruah, with documents for jobs): the overshoot after the
    pick, over the share. Least overshoot alone lets a source run 1.3 longest documents ahead; this
    keeps every source within one, both ways (measured).

    Args:
        shares: int64 [sources], sum `unit`; 0 for a source that is finished.
        credits: int64 [sources], `unit` to a token, when nothing had elapsed.
        elapsed: int64, tokens taken since.
        heads, ends: int64 [sources], next entry and end of each source's part of `entries`.
        entries: `ENTRY`, the buffers of all sources end to end.
    """
    best = -1
    best_wait = 0.0
    fallback = -1
    fallback_wait = 0.0
    for source in range(len(shares)):
        share = shares[source]
        if share == 0:
            continue
        if heads[source] == ends[source]:
            return -2 - source
        credit = credits[source] + share * elapsed
        wait = _wait(entries[heads[source]].length, share, credit, unit)
        if credit >= 0:
            if best < 0 or wait < best_wait:
                best, best_wait = source, wait
        elif fallback < 0 or wait < fallback_wait:
            fallback, fallback_wait = source, wait
    return best if best >= 0 else fallback


@inline_kernel
def _wait(length, share, credit, unit):
    """Tokens until a credit covers a document, below 0 where it does already (float64)."""
    return (float(length) * float(unit - share) - float(credit)) / float(share)


@inline_kernel
def choose(shares, credits, heads, ends, entries, unit, window, due, free):
    """What `pick` returns, without a look at every source.

    Args:
        shares, credits, heads, ends, entries, unit: As in `pick`.
        window: `PROGRESS`. `elapsed` as in `pick`; the first `placed` sources are in the trees, and
            `taken` is the one that gave the last document, −1 if it is in its place again.
        due: float64 [tree_size(sources)].
        free: int64, as long.
    """
    if len(shares) <= FEW:
        return pick(shares, credits, window.elapsed, heads, ends, entries, unit)
    if window.elapsed >= MOST_ELAPSED:
        for source in range(len(shares)):
            credits[source] += shares[source] * window.elapsed
        window.elapsed, window.placed, window.taken = 0, 0, -1
    elapsed = window.elapsed
    leaves = len(due) >> 1
    if window.placed < len(shares):
        for source in range(window.placed, len(shares)):
            if shares[source] > 0 and heads[source] == ends[source]:
                window.placed = source
                return -2 - source
            _place(shares, credits, elapsed, heads, entries, unit, source, due, free)
        due[leaves + len(shares) :], free[leaves + len(shares) :] = np.inf, NEVER
        for node in range(leaves - 1, 0, -1):
            due[node] = min(due[2 * node], due[2 * node + 1])
            free[node] = min(free[2 * node], free[2 * node + 1])
        window.placed = len(shares)
    if window.taken >= 0:
        if heads[window.taken] == ends[window.taken]:
            return -2 - window.taken
        _place(shares, credits, elapsed, heads, entries, unit, window.taken, due, free)
        _rise(due, leaves + window.taken)
        _rise(free, leaves + window.taken)
        window.taken = -1
    while free[1] <= elapsed:
        node = 1
        while node < leaves:
            node = 2 * node + (free[2 * node] > elapsed)
        _place(shares, credits, elapsed, heads, entries, unit, node - leaves, due, free)
        _rise(due, node)
        _rise(free, node)
    if due[1] == np.inf:
        return pick(shares, credits, elapsed, heads, ends, entries, unit)
    return _soonest(shares, credits, elapsed, heads, entries, unit, due)


@inline_kernel
def _place(shares, credits, elapsed, heads, entries, unit, source, due, free):
    """Write a source's leaves: it has credit and is due, or will have credit, or has no share."""
    leaf, share = (len(due) >> 1) + source, shares[source]
    due[leaf], free[leaf] = np.inf, NEVER
    if share == 0:
        return
    credit = credits[source] + share * elapsed
    if credit < 0:
        free[leaf] = elapsed + (share - 1 - credit) // share
        return
    needed = float(entries[heads[source]].length) * float(unit - share)
    begun = float(credits[source])
    due[leaf] = (needed - begun) / float(share) - _SLACK * (needed + abs(begun)) / float(share)


@inline_kernel
def _rise(tree, node):
    """Correct the minima above a leaf."""
    node >>= 1
    while node > 0:
        least = min(tree[2 * node], tree[2 * node + 1])
        if tree[node] == least:
            return
        tree[node] = least
        node >>= 1


@inline_kernel
def _soonest(shares, credits, elapsed, heads, entries, unit, due):
    """The source with the smallest wait among those that are due, the first of several (int64)."""
    leaves, node = len(due) >> 1, 1
    while node < leaves:
        node = 2 * node + (due[2 * node] > due[node])
    source = node - leaves
    credit = credits[source] + shares[source] * elapsed
    best = _wait(entries[heads[source]].length, shares[source], credit, unit)
    # Whoever has a higher bound waits longer, whatever was rounded.
    most = best + float(elapsed) + _SLACK * (abs(best) + float(elapsed))
    chosen, node = np.int64(source), 1
    while node > 0:
        if due[node] <= most:
            if node < leaves:
                node *= 2
                continue
            source = node - leaves
            credit = credits[source] + shares[source] * elapsed
            wait = _wait(entries[heads[source]].length, shares[source], credit, unit)
            if wait < best or (wait == best and source < chosen):
                chosen, best = np.int64(source), wait
        while node & 1:
            node >>= 1
        node += node > 0
    return chosen


@inline_kernel
def charge(credits, source, length, unit, window):
    """Charge `source` for `length` tokens: every source earns its share of them, this one pays for
    all.
    """
    credits[source] -= length * unit
    window.elapsed += length
    window.taken = source
