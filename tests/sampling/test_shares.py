"""Integer shares, and the pick that keeps every source within one longest document of its share."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.compiled import kernel
from penstock.core.errors import ConfigError
from penstock.plan.sampling import integer_shares
from penstock.plan.sampling._choice_kernels import (
    FEW,
    MOST_ELAPSED,
    charge,
    choose,
    pick,
    tree_size,
)
from penstock.plan.sampling._kernels import ENTRY
from penstock.plan.sampling.shares import UNIT


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30).filter(lambda x: sum(x) > 0))
def test_shares_are_exact_and_near(values):
    shares = integer_shares(values)
    assert shares.sum() == UNIT
    assert all((share > 0) == (value > 0) for share, value in zip(shares, values, strict=True))
    total = sum(Fraction(value) for value in values)
    assert all(
        abs(int(s) - UNIT * Fraction(v) / total) <= len(values)
        for s, v in zip(shares, values, strict=True)
    )


def test_finished_sources_leave_proportions():
    assert integer_shares([1, 2, 1], [True, True, False]).tolist() == [
        round(UNIT / 3),
        UNIT - round(UNIT / 3),
        0,
    ]
    assert integer_shares([1, 2], [False, False]).tolist() == [0, 0]


def test_bad_shares_are_refused():
    with pytest.raises(ConfigError, match="finite and not negative"):
        integer_shares([1, -1])
    with pytest.raises(ConfigError, match="add up to 0"):
        integer_shares([0, 0])


PLACE = np.dtype([("elapsed", np.int64), ("placed", np.int64), ("taken", np.int64)], align=True)


@kernel
def blend(shares, lengths, steps, order, worst, credits, unit, place, due, free):
    """Choose among endless sources; worst[0], worst[1]: furthest behind and ahead, in tokens.

    `order` gets −9 where the trees give another source than a look at every source.
    """
    count, window = len(shares), place[0]
    lines = credits.copy()
    heads = np.arange(count)
    entries = np.zeros(count, ENTRY)
    taken = np.zeros(count, np.int64)
    for source in range(count):
        entries[source].length = lengths[source, 0]
    for step in range(steps):
        source = pick(shares, credits, 0, heads, heads + 1, entries, unit)
        chosen = choose(shares, lines, heads, heads + 1, entries, unit, window, due, free)
        length = entries[source].length
        charge(lines, source, length, unit, window)
        for other in range(count):
            credits[other] += length * shares[other]
        credits[source] -= length * unit
        taken[source] += 1
        entries[source].length = lengths[source, taken[source] % lengths.shape[1]]
        order[step] = source if source == chosen else -9
        worst[0] = max(worst[0], credits.max() / unit)
        worst[1] = min(worst[1], credits.min() / unit)


def blended(shares, lengths, steps, credits=None):
    """(order, worst) of `blend`."""
    count = len(shares)
    worst, order, place = np.zeros(2), np.empty(steps, np.int64), np.zeros(1, PLACE)
    place["taken"] = -1
    due, free = np.empty(tree_size(count)), np.empty(tree_size(count), np.int64)
    begun = np.zeros(count, np.int64) if credits is None else credits
    blend(shares, lengths, steps, order, worst, begun, UNIT, place, due, free)
    return order, worst


def slow_pick(shares, credits, lengths):
    waits = {
        i: (lengths[i] * (UNIT - s) - credits[i]) / s
        for i, s in enumerate(shares)
        if s > 0 and credits[i] >= 0
    }
    return min(waits, key=lambda i: (waits[i], i))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 2**32))
def test_pick_equals_its_twin(weights, seed):
    shares = integer_shares(weights)
    lengths = np.random.default_rng(seed).integers(1, 100, (len(weights), 7))
    order, _ = blended(shares, lengths, 60)
    credits, taken = [0] * len(weights), [0] * len(weights)
    for chosen in order:
        now = [int(lengths[i, taken[i] % 7]) for i in range(len(weights))]
        assert chosen == slow_pick(shares.tolist(), credits, now)
        credits = [
            credit + now[chosen] * int(share) for credit, share in zip(credits, shares, strict=True)
        ]
        credits[chosen] -= now[chosen] * UNIT
        taken[chosen] += 1


@pytest.mark.parametrize("count", [2, 3, 10, 100, 500])
@pytest.mark.parametrize("kind", ["constant", "lognormal", "two sizes", "one long"])
def test_no_source_is_off_by_more_than_one_longest_document(count, kind):
    generator = np.random.default_rng(count)
    lengths = {
        "constant": np.full((count, 50), 700),
        "lognormal": np.clip(np.exp(generator.normal(6, 1, (count, 50))), 1, 9000).astype(np.int64),
        "two sizes": generator.choice([5, 3000], (count, 50)),
        "one long": np.where(np.arange(count)[:, None] == 0, 9000, np.full((count, 50), 10)),
    }[kind]
    for shares in (
        np.ones(count),
        generator.dirichlet(np.full(count, 0.3)) + 1e-9,
        np.r_[1e-6, np.ones(count - 1)],
        0.5 ** np.minimum(np.arange(count), 25.0),
    ):
        order, worst = blended(integer_shares(shares), lengths, 20_000)
        assert order.min() >= 0
        assert worst[0] <= lengths.max()
        assert worst[1] >= -lengths.max()


def test_a_tiny_share_is_visited():
    order, _ = blended(integer_shares([1.0, 1e-4]), np.full((2, 1), 10), 50_000)
    assert np.count_nonzero(order == 1) == pytest.approx(5, abs=1)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(FEW + 1, 70),
    st.sampled_from([2, 5, 100, 5000, MOST_ELAPSED // 8]),
    st.sampled_from(["equal", "few", "any", "tiny"]),
    st.sampled_from([0, 1, 300]),
    st.integers(0, 2**32),
)
def test_trees_choose_as_a_look_at_every_source(count, longest, kind, owed, seed):
    """Also where many are equal, where nobody has credit, and after `MOST_ELAPSED` tokens."""
    generator = np.random.default_rng(seed)
    shares = {
        "equal": np.ones(count),
        "few": generator.integers(1, 4, count),
        "any": generator.random(count) + 1e-6,
        "tiny": 10.0 ** generator.uniform(-8, 0, count),
    }[kind]
    active = generator.random(count) < 0.9
    active[0] = True
    lengths = generator.integers(1, longest, (count, 11))
    credits = generator.integers(-owed - 1, owed + 1, count) * UNIT - (owed == 300) * 200 * UNIT
    order, _ = blended(integer_shares(shares, active), lengths, 400, credits)
    assert order.min() >= 0
    assert active[order].all()


@kernel
def next_of(shares, credits, heads, ends, entries, unit, place, due, free):
    return choose(shares, credits, heads, ends, entries, unit, place[0], due, free)


def test_an_empty_buffer_is_told_before_a_choice():
    count = FEW + 4
    heads, place = np.zeros(count, np.int64), np.zeros(1, PLACE)
    place["taken"] = -1
    ends, shares = heads.copy(), integer_shares(np.ones(count), np.arange(count) != 1)
    entries, trees = np.zeros(count, ENTRY), (np.empty(tree_size(count)), np.empty(32, np.int64))
    heads += np.arange(count)
    ends += heads
    entries["length"] = 7
    given = (shares, np.zeros(count, np.int64), heads, ends, entries, UNIT, place, *trees)
    for source in (0, *range(2, count)):
        assert next_of(*given) == -2 - source
        ends[source] += 1
    assert next_of(*given) == 0
    heads[0], place["taken"] = 1, 0
    assert next_of(*given) == -2
    shares[:], place["placed"], place["taken"] = 0, 0, -1
    assert next_of(*given) == -1
