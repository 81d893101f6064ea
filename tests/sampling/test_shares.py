"""Integer shares, and the pick that keeps every source within one longest document of its share."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.compiled import kernel
from penstock.core.errors import ConfigError
from penstock.plan.sampling import integer_shares
from penstock.plan.sampling._kernels import ENTRY, charge, pick
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


@kernel
def blend(shares, lengths, steps, order, worst, credits, unit):
    """Run the pick over endless sources; worst[0], worst[1]: furthest behind and ahead, in
    tokens.
    """
    count = len(shares)
    heads = np.arange(count)
    entries = np.zeros(count, ENTRY)
    taken = np.zeros(count, np.int64)
    for source in range(count):
        entries[source].length = lengths[source, 0]
    for step in range(steps):
        source = pick(shares, credits, heads, heads + 1, entries, unit)
        length = entries[source].length
        charge(shares, credits, source, length, unit)
        taken[source] += 1
        entries[source].length = lengths[source, taken[source] % lengths.shape[1]]
        order[step] = source
        worst[0] = max(worst[0], credits.max() / unit)
        worst[1] = min(worst[1], credits.min() / unit)


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
    order = np.empty(60, np.int64)
    blend(shares, lengths, 60, order, np.zeros(2), np.zeros(len(weights), np.int64), UNIT)
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
        worst, order = np.zeros(2), np.empty(20_000, np.int64)
        blend(
            integer_shares(shares),
            lengths,
            len(order),
            order,
            worst,
            np.zeros(count, np.int64),
            UNIT,
        )
        assert worst[0] <= lengths.max()
        assert worst[1] >= -lengths.max()


def test_a_tiny_share_is_visited():
    order = np.empty(50_000, np.int64)
    blend(
        integer_shares([1.0, 1e-4]),
        np.full((2, 1), 10),
        len(order),
        order,
        np.zeros(2),
        np.zeros(2, np.int64),
        UNIT,
    )
    assert np.count_nonzero(order == 1) == pytest.approx(5, abs=1)
