"""The compiled scan against a slow, obvious twin, on Hypothesis' cases and on 100,000 random
ones.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.chat.masks.boundaries import Marker, ResolvedBoundary
from penstock.chat.masks.scanning import EOS_MODES, scan
from penstock.core.ragged import Ragged

ROLES = ("user", "assistant", "tool")


def matches(row, place, marker):
    piece = list(row[place : place + len(marker.ids)])
    if len(piece) < len(marker.ids) or piece[:-1] != list(marker.ids[:-1]):
        return False
    return piece[-1] in (marker.ids[-1], *marker.tails)


def longest(row, place, candidates):
    """(length, owner) of the longest marker that matches, the first declared among equals; None if
    none does.
    """
    found = [(len(marker.ids), -number, owner) for number, (marker, owner) in enumerate(candidates)
             if matches(row, place, marker)]  # fmt: skip
    if not found:
        return None
    length, _, owner = max(found, key=lambda entry: entry[:2])
    return length, owner


def slow_scan(row, boundaries, roles, eos, masked=()):
    """Weights of one row, as the docstring of `scanning` says it."""
    weights = [0] * len(row)
    last_end = []
    place = 0
    while place < len(row):
        opened = longest(row, place, [(marker, b) for b in boundaries for marker in b.starts])
        if opened is None:
            place += 1
            continue
        content, boundary = place + opened[0], opened[1]
        closers = [(marker, "end") for marker in boundary.ends] + [
            (marker, "until") for marker in boundary.until
        ]
        close, closed = content, None
        while close < len(row) and (closed := longest(row, close, closers)) is None:
            close += 1
        trained = boundary.role in roles
        if trained:
            for i in range(place if boundary.include_start else content, close):
                weights[i] = 1
        if closed is None:
            break
        end = range(close, close + closed[0])
        place = close
        if closed[1] == "end" and boundary.include_end:
            if eos == "all" or (eos == "turn" and trained):
                for i in end:
                    weights[i] = 1
            if trained:
                last_end = end
            if not boundary.end_starts_next:
                place = end.stop
    if eos == "last":
        for i in last_end:
            weights[i] = 1
    return [0 if token in masked else weight for token, weight in zip(row, weights, strict=True)]


def random_marker(random, tails=False):
    ids = tuple(random.integers(0, 5, random.choice([1, 1, 2, 3])).tolist())
    more = (
        tuple(sorted(set(random.integers(0, 5, 2).tolist())))
        if tails and random.random() < 0.3
        else ()
    )
    return Marker(ids, more)


def random_boundaries(random):
    """Up to five boundaries over five token values (and 64 more, which share their lowest bits with
    the first).
    """
    boundaries, taken = [], {}
    for _ in range(random.integers(0, 6)):
        role = ROLES[random.integers(3)]
        starts = tuple(random_marker(random, tails=True) for _ in range(random.integers(1, 3)))
        starts = tuple(marker for marker in starts if taken.setdefault(marker.ids, role) == role)
        if starts:
            boundaries.append(
                ResolvedBoundary(
                    role,
                    starts,
                    tuple(random_marker(random) for _ in range(random.integers(0, 4))),
                    tuple(random_marker(random) for _ in range(random.choice([0, 0, 1, 2]))),
                    *(random.random(3) < (0.3, 0.7, 0.3)).tolist(),
                )
            )
    return tuple(boundaries)


def test_equal_to_the_twin_on_100_000_random_rows():
    random = np.random.default_rng(11)
    checked = trained = 0
    for number in range(500):
        boundaries = random_boundaries(random)
        declared = sorted({boundary.role for boundary in boundaries})
        roles = [role for role in declared if random.random() < 0.6]
        eos = EOS_MODES[number % 4]
        masked = random.integers(0, 5, number % 2).tolist()
        lengths = random.integers(0, 24, 200)
        # Ids that differ by 64 pass the kernel's filter and must still not match.
        values = random.integers(0, 5, lengths.sum()) + 64 * (random.random(lengths.sum()) < 0.1)
        dtype = (np.int64, np.uint32)[number % 2]
        rows = Ragged(values.astype(dtype), np.concatenate(([0], np.cumsum(lengths))))
        got = scan(rows, boundaries, roles, eos, masked_ids=masked)
        for row, weights in zip(rows, got, strict=True):
            assert weights.tolist() == slow_scan(row.tolist(), boundaries, roles, eos, masked), (
                row,
                boundaries,
                eos,
            )
        checked += len(rows)
        trained += int(got.values.sum())
    assert checked == 100_000
    assert trained > 50_000


IDS = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)
MARKERS = st.builds(
    Marker, IDS, st.lists(st.integers(0, 5), max_size=2, unique=True).map(sorted).map(tuple)
)
PLAIN = st.lists(st.builds(Marker, IDS), max_size=3).map(tuple)


@st.composite
def declared_boundaries(draw):
    boundaries, taken = [], {}
    for role in draw(st.lists(st.sampled_from(ROLES), max_size=4)):
        starts = tuple(
            marker
            for marker in draw(st.lists(MARKERS, min_size=1, max_size=2))
            if taken.setdefault(marker.ids, role) == role
        )
        if starts:
            flags = [draw(st.booleans()) for _ in range(3)]
            boundaries.append(ResolvedBoundary(role, starts, draw(PLAIN), draw(PLAIN), *flags))
    return tuple(boundaries)


@settings(deadline=None, max_examples=200)
@given(
    declared_boundaries(),
    st.integers(0, 12).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 5), min_size=n, max_size=n), min_size=1)
    ),
    st.sampled_from(EOS_MODES),
    st.sets(st.integers(0, 5), max_size=2),
    st.data(),
)
def test_equal_to_the_twin_with_padding_on_either_side(boundaries, rows, eos, masked, data):
    width = len(rows[0])
    spans = [
        sorted(data.draw(st.tuples(st.integers(0, width), st.integers(0, width)))) for _ in rows
    ]
    mask = [[int(begin <= place < end) for place in range(width)] for begin, end in spans]
    roles = [boundary.role for boundary in boundaries if boundary.role != "tool"]
    got = scan(rows, boundaries, roles, eos, attention_mask=mask, masked_ids=masked)
    for row, weights, (begin, end) in zip(rows, got, spans, strict=True):
        inside = slow_scan(row[begin:end], boundaries, roles, eos, masked)
        assert weights.tolist() == [0] * begin + inside + [0] * (width - end)
