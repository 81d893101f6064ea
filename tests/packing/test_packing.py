"""Packing: whole documents, full rows, the order kept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.plan.packing import pack

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=120)
LIMITS = st.none() | st.integers(1, 9) | st.just(1000)
"""Of the documents of a row."""


def slow_best_fit(lengths, size, window_rows, most):
    """The fullest open row that still fits and has room for a document; among equals the one
    touched last.
    """
    rows, base, touched = [], 0, {}
    out = []
    for time, length in enumerate(lengths):
        fitting = [
            row
            for row in range(len(rows))
            if rows[row] >= length and out.count(base + row) < (most or 1e9)
        ]
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
@given(LENGTHS, st.integers(200, 9000), st.integers(1, 20), LIMITS)
def test_best_fit_equals_its_twin(lengths, size, window_rows, most):
    row_of, rows = pack(lengths, size, "best_fit", window_rows, most)
    assert row_of.tolist() == slow_best_fit(lengths, size, window_rows, most)
    assert rows == max(row_of) + 1


@settings(deadline=None)
@given(LENGTHS, st.integers(200, 900), LIMITS)
def test_best_fit_decreasing_equals_its_twin(lengths, size, most):
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows = slow_best_fit([lengths[i] for i in order], size, len(lengths), most)
    row_of, _ = pack(
        lengths, size, "best_fit_decreasing", window_rows=100_000, documents_per_row=most
    )
    assert {i: row_of[i] for i in order} == dict(zip(order, rows, strict=True))


@settings(deadline=None)
@given(LENGTHS, st.integers(200, 900), LIMITS)
def test_next_fit_equals_its_twin(lengths, size, most):
    out, row, used, documents = [], 0, 0, 0
    for length in lengths:
        if used + length > size or documents == most:
            row, used, documents = row + 1, 0, 0
        used, documents = used + length, documents + 1
        out.append(row)
    row_of, rows = pack(lengths, size, "next_fit", documents_per_row=most)
    assert row_of.tolist() == out
    assert rows == row + 1


@settings(deadline=None)
@given(LENGTHS, st.sampled_from(["best_fit", "best_fit_decreasing", "next_fit", "none"]), LIMITS)
def test_no_row_overflows_and_none_is_empty(lengths, packing, most):
    row_of, rows = pack(lengths, 256, packing, window_rows=8, documents_per_row=most)
    used = np.bincount(row_of, lengths, minlength=rows)
    assert len(used) == rows
    assert used.min() > 0
    assert used.max() <= 256
    assert np.bincount(row_of).max() <= (most or len(lengths))


@pytest.mark.parametrize("most", [0, -1, 2**31, 1.5, "3"])
def test_what_is_no_limit_of_documents_is_refused(most):
    with pytest.raises(ConfigError, match=r"documents_per_row.*1.*2\^31 − 1"):
        pack([3], 8, documents_per_row=most)


def lognormal(count: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    return np.clip(np.exp(generator.normal(np.log(775) - 0.5, 1.0, count)), 1, 4096).astype(
        np.int64
    )


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
        used, marked = (
            np.bincount(row_of, lengths),
            np.bincount(row_of, lengths * mine, minlength=rows),
        )
        steps = rows // 64 * 64
        return (marked[:steps].reshape(-1, 64).sum(1) / used[:steps].reshape(-1, 64).sum(1)).std()

    assert spread("best_fit") <= 1.2 * spread("next_fit")


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"lengths must be 1 … 8, got 3 … 9"):
        pack([3, 9], 8)
    with pytest.raises(ConfigError, match="keeps documents whole"):
        pack([3], 8, "concat")
