"""Rows with a limit of patches: best fit by slots among the rows that have room for the patches."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.plan.loader.extras as extras_module
import penstock.plan.loader.stream as stream_module
from penstock import Mixture, Source, write_dataset
from penstock.core.errors import ConfigError, RecordError
from penstock.plan.loader.plan import Plan, PlanSettings
from penstock.plan.loader.step_planner import StepPlanner, balanced_order

SLOTS, WINDOW = 64, 16


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    lengths = np.random.default_rng(0).integers(1, SLOTS + 1, 120)
    return write_dataset(tmp_path_factory.mktemp("patches") / "d", [[1] * n for n in lengths])


def plan_of(dataset, patches, limit, monkeypatch=None, documents_per_row=None, **source):
    known = SimpleNamespace(has_images=True, has_trees=False, patches=lambda: np.array(patches))
    for module in (stream_module, extras_module):
        (monkeypatch or pytest.MonkeyPatch()).setattr(module, "extras_of", lambda _: known)
    mixture = Mixture([Source(dataset, max_epochs=1, shuffle="none", **source)])
    plan_settings = PlanSettings(
        sequence_length=SLOTS, rows_per_step=4, window_rows=WINDOW, patches_per_row=limit,
        documents_per_row=documents_per_row,
    )  # fmt: skip
    return Plan(mixture, [dataset], plan_settings)


def slow_rows(lengths, patches, limit, documents_per_row):
    """Documents of each row, window after window: the obvious best fit."""
    most = documents_per_row or len(lengths)
    windows, rows = [], []  # a row: [free slots, patches left, time of the last touch, documents]
    for time, (document, (length, needed)) in enumerate(
        enumerate(zip(lengths, patches, strict=True))
    ):
        if needed > limit:
            continue
        open_rows = [
            row for row in rows if row[0] >= length and row[1] >= needed and len(row[3]) < most
        ]
        if not open_rows and len(rows) == WINDOW:
            windows.append(rows)
            rows = []
        if not open_rows:
            rows.append([SLOTS, limit, -1, []])
            open_rows = [rows[-1]]
        best = min(open_rows, key=lambda row: (row[0], -row[2]))
        best[0] -= length
        best[1] -= needed
        best[2] = time
        best[3].append(document)
    return [row[3] for window in [*windows, rows] for row in window]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_are_those_of_the_slow_twin(dataset, data):
    limit = data.draw(st.integers(1, 60))
    patches = data.draw(st.lists(st.integers(0, 50), min_size=120, max_size=120))
    most = data.draw(st.none() | st.integers(1, 6))
    with pytest.MonkeyPatch.context() as patched:
        plan = plan_of(dataset, patches, limit, patched, most, too_long="drop")
        found = []
        for window in plan.windows():
            bounds = zip(window.row_starts, window.row_starts[1:], strict=False)
            found += [
                sorted(window.pieces["document"][begin:end].tolist()) for begin, end in bounds
            ]
        dropped = int(plan.state().skipped["dropped"].sum())
    lengths = dataset.table.lengths[:, 0].tolist()
    assert found == [sorted(row) for row in slow_rows(lengths, patches, limit, most)]
    assert dropped == sum(needed > limit for needed in patches)


def test_a_document_over_the_limit_is_an_error_if_asked_for(dataset, monkeypatch):
    patches = [0] * 119 + [9]
    with pytest.raises(RecordError, match=r"document 119.*9.*patches_per_row"):
        list(plan_of(dataset, patches, 8, monkeypatch, too_long="error").windows())


@pytest.mark.parametrize(
    "wrong", [{"patches_per_row": 0}, {"patches_per_row": 5, "packing": "next_fit"}]
)
def test_limits_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"patches_per_row.*1.*best_fit"):
        PlanSettings(sequence_length=8, rows_per_step=1, **wrong)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=96))
def test_the_balanced_order_has_each_row_once(loads):
    order = balanced_order(np.array(loads))
    assert sorted(order.tolist()) == list(range(len(loads)))


@pytest.mark.parametrize("rows", [16, 48, 64, 256])
def test_ranks_get_about_as_many_patches(rows):
    random = np.random.default_rng(0)
    ratios = {ranks: ([], []) for ranks in (2, 4, 8)}
    for _ in range(50):
        loads = random.exponential(1000, rows).astype(np.int64)
        for ranks, both in ratios.items():
            for found, order in zip(both, (np.arange(rows), balanced_order(loads)), strict=True):
                sums = loads[order].reshape(ranks, -1).sum(1)
                found.append(sums.max() / sums.mean())
    for ranks, (before, after) in ratios.items():
        # What is left is the largest row itself, where a rank has only a few.
        assert np.mean(after) - 1 < (np.mean(before) - 1) * (0.75 if rows // ranks < 4 else 0.4)


def test_steps_are_balanced_whatever_the_ranks(dataset, monkeypatch):
    patches = np.random.default_rng(1).integers(0, 50, 120)

    def steps(multiple):
        planner = StepPlanner(plan_of(dataset, patches, 200, monkeypatch), multiple)
        while (step := planner.next()) is not None:
            yield [
                step.pieces["document"][begin:end].tolist()
                for begin, end in pairwise(step.row_starts)
            ]

    alone = [[row for row in step if row] for step in steps(1)]
    for ranks in (2, 4):
        assert [[row for row in step if row] for step in steps(ranks)] == alone
    plan = plan_of(dataset, patches, 200, monkeypatch)
    planned = [
        window.pieces["document"][begin:end].tolist()
        for window in plan.windows()
        for begin, end in pairwise(window.row_starts)
    ]
    # Each step has the same rows as without, in another order.
    for number, step in enumerate(alone):
        rows = planned[4 * number : 4 * number + 4]
        assert sorted(map(tuple, step)) == sorted(map(tuple, rows))
        loads = [int(patches[row].sum()) for row in rows]
        assert step == [rows[place] for place in balanced_order(np.array(loads))]
