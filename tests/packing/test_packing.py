"""Packing: whole documents, full rows, the order kept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.packing import pack

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=120)


def slow_best_fit(lengths, size, window_rows):
    """The fullest open row that still fits; among equals the one touched last."""
    rows, base, touched = [], 0, {}
    out = []
    for time, length in enumerate(lengths):
        fitting = [row for row in range(len(rows)) if rows[row] >= length]
        if not fitting and len(rows) == window_rows:
            base += len(rows)
            rows, touched = [], {}
        if not fitting:
            rows.append(size)
            row = len(rows) - 1
        else:
            row = min(fitting, key=lambda r: (rows[r], -touched[r]))
        rows[row] -= length
        touched[row] = time
        out.append(base + row)
    return out


@settings(deadline=None)
@given(LENGTHS, st.integers(200, 9000), st.integers(1, 20))
def test_best_fit_equals_its_twin(lengths, size, window_rows):
    row_of, rows = pack(lengths, size, "best_fit", window_rows)
    assert row_of.tolist() == slow_best_fit(lengths, size, window_rows)
    assert rows == max(row_of) + 1


@settings(deadline=None)
@given(LENGTHS, st.integers(200, 900))
def test_best_fit_decreasing_equals_its_twin(lengths, size):
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows = slow_best_fit([lengths[i] for i in order], size, len(lengths))
    row_of, _ = pack(lengths, size, "best_fit_decreasing", window_rows=100_000)
    assert {i: row_of[i] for i in order} == dict(zip(order, rows, strict=True))


@settings(deadline=None)
@given(LENGTHS, st.sampled_from(["best_fit", "best_fit_decreasing", "next_fit", "none"]))
def test_no_row_overflows_and_none_is_empty(lengths, packing):
    row_of, rows = pack(lengths, 256, packing, window_rows=8)
    used = np.bincount(row_of, lengths, minlength=rows)
    assert len(used) == rows
    assert used.min() > 0
    assert used.max() <= 256


def lognormal(count: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    return np.clip(np.exp(generator.normal(np.log(775) - 0.5, 1.0, count)), 1, 4096).astype(np.int64)


def test_padding_is_small():
    lengths = lognormal(60_000)
    for packing, most in (("best_fit", 0.01), ("best_fit_decreasing", 0.002)):
        _, rows = pack(lengths, 4096, packing)
        assert 1 - lengths.sum() / (rows * 4096) <= most


def test_a_step_keeps_its_shares():
    lengths = lognormal(60_000)
    mine = np.random.default_rng(1).random(len(lengths)) < 0.3

    def spread(packing):
        row_of, rows = pack(lengths, 4096, packing)
        used, marked = np.bincount(row_of, lengths), np.bincount(row_of, lengths * mine, minlength=rows)
        steps = rows // 64 * 64
        return (marked[:steps].reshape(-1, 64).sum(1) / used[:steps].reshape(-1, 64).sum(1)).std()

    assert spread("best_fit") <= 1.2 * spread("next_fit")


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"lengths must be 1 … 8, got 3 … 9"):
        pack([3, 9], 8)
    with pytest.raises(ConfigError, match="keeps documents whole"):
        pack([3], 8, "concat")
