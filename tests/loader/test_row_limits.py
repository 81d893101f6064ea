"""Rows with at most so many documents: every packing against its definition, states, ranks, and
capacities that imply it.
"""

from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import (
    assert_exact_resume,
    assert_no_token_lost,
    assert_other_plans_are_refused,
    assert_ranks_share_steps,
)
from makers.datasets import random_documents
from penstock import (
    Denoise,
    Infill,
    InputRequirements,
    Loader,
    Mixture,
    ShareChange,
    Source,
    write_dataset,
)
from penstock.core.errors import ConfigError, StateError
from penstock.plan.inputs import EVERYTHING
from penstock.plan.loader import Plan, PlanSettings
from penstock.plan.objectives import PrefixLM, SpanCorruption
from penstock.plan.packing import PACKINGS

SLOTS, WINDOW = 64, 8
BLEND = InputRequirements(
    asked_by="a test", cu_seqlens=True, loss_weights=True, positions=True, document_ids=True
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three datasets: long and short documents, very short ones, and some with loss weights."""
    folder = tmp_path_factory.mktemp("limits")
    documents = [random_documents(60, 1, 150, seed=1), random_documents(300, 1, 6, seed=2)]
    weighted = random_documents(40, 1, 200, seed=3)
    spans = [[(len(one) // 2, len(one), 0.5)] for one in weighted]
    return [
        *(
            write_dataset(folder / name, one)
            for name, one in zip(("long", "short"), documents, strict=True)
        ),
        write_dataset(folder / "weighted", weighted, spans=spans),
    ]


def build(data, *, max_epochs=2, changes=(), **options):
    sources = [
        Source(one, share, max_epochs=max_epochs)
        for one, share in zip(data, (0.3, 0.4, 0.3), strict=False)
    ]
    own = {"sequence_length": SLOTS, "rows_per_step": 8, "seed": 3, "window_rows": 32, "threads": 0}
    return Loader(Mixture(sources, changes), **{**own, "documents_per_row": 4, **options})


# -- against definitions
# -----------------------------------------------------------------------------------------------


def slow_rows(packing, lengths, limit):
    """The pieces (document, first token, tokens) of each row of one source in its order, windows
    not counted.
    """
    rows = []  # [free slots, pieces]
    parts = [
        (n, at, min(SLOTS, length - at))
        for n, length in enumerate(lengths)
        for at in range(0, length, SLOTS)
    ]
    if packing == "concat":
        parts = [(n, 0, length) for n, length in enumerate(lengths)]
    for document, begin, tokens in parts:
        while tokens:
            full = (
                not rows
                or not rows[-1][0]
                or len(rows[-1][1]) == (limit or 1e9)
                or packing == "none"
            )
            if full or (packing == "next_fit" and tokens > rows[-1][0]):
                rows.append([SLOTS, []])
            here = min(tokens, rows[-1][0])
            rows[-1][1].append((document, begin, here))
            rows[-1][0] -= here
            begin, tokens = begin + here, tokens - here
    return [pieces for _, pieces in rows]


def slow_best_fit(lengths, limit):
    """The documents of each row, each window by itself; documents fit a row."""
    windows, rows = [], []  # a row: [free slots, time of the last touch, documents]
    for time, length in enumerate(lengths):
        fitting = [row for row in rows if row[0] >= length and len(row[2]) < (limit or 1e9)]
        if not fitting and len(rows) == WINDOW:
            windows.append(rows)
            rows = []
        if not fitting:
            rows.append([SLOTS, -1, []])
            fitting = rows[-1:]
        best = min(fitting, key=lambda row: (row[0], -row[1]))
        best[:2] = best[0] - length, time
        best[2].append(time)
    return [row[2] for window in [*windows, rows] for row in window]


def plan_of(tmp_path_factory, lengths, packing, limit):
    dataset = write_dataset(tmp_path_factory.mktemp("d") / "d", [[1] * n for n in lengths])
    plan_settings = PlanSettings(
        sequence_length=SLOTS,
        rows_per_step=2,
        window_rows=WINDOW,
        packing=packing,
        documents_per_row=limit,
    )
    return Plan(Mixture([Source(dataset, max_epochs=1, shuffle="none")]), [dataset], plan_settings)


def rows_of(plan):
    """The pieces of each row, window by window."""
    for window in plan.windows():
        pieces = window.pieces[["document", "begin", "tokens"]].tolist()
        yield [pieces[begin:end] for begin, end in pairwise(window.row_starts)]


LIMITS = st.none() | st.integers(1, 6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 150), min_size=2, max_size=90),
    st.sampled_from(["next_fit", "concat", "none"]),
    LIMITS,
)
def test_rows_in_order_are_those_of_the_slow_twin(tmp_path_factory, lengths, packing, limit):
    lengths = [2, *lengths]
    found = [
        row
        for window in rows_of(plan_of(tmp_path_factory, lengths, packing, limit))
        for row in window
    ]
    assert found == slow_rows(packing, lengths, limit)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, SLOTS), min_size=2, max_size=120), LIMITS)
def test_best_fit_rows_are_those_of_the_slow_twin(tmp_path_factory, lengths, limit):
    lengths = [2, *lengths]
    windows = rows_of(plan_of(tmp_path_factory, lengths, "best_fit", limit))
    assert [[piece[0] for piece in row] for window in windows for row in window] == slow_best_fit(
        lengths, limit
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, SLOTS), min_size=2, max_size=120), LIMITS)
def test_best_fit_decreasing_rows_are_those_of_the_slow_twin(tmp_path_factory, lengths, limit):
    """Each window has documents in the order of the stream, packed longest first, as many as leave
    it small enough.
    """
    lengths, first = [2, *lengths], 0
    for window in rows_of(plan_of(tmp_path_factory, lengths, "best_fit_decreasing", limit)):
        mine = sorted(piece[0] for row in window for piece in row)
        assert mine == list(range(first, first + len(mine)))
        first += len(mine)
        order = sorted(mine, key=lambda n: (-lengths[n], n))
        rows = {}
        for time, document in enumerate(order):
            fitting = [
                row
                for row in rows.values()
                if row[0] >= lengths[document] and len(row[2]) < (limit or len(lengths))
            ]
            row = min(fitting, key=lambda one: (one[0], -one[1])) if fitting else [SLOTS, -1, []]
            rows[id(row)] = row
            row[:2] = row[0] - lengths[document], time
            row[2].append(document)
        assert sorted(sorted(row[2]) for row in rows.values()) == sorted(
            [piece[0] for piece in row] for row in window
        )
        assert len(window) <= WINDOW
    assert first == len(lengths)


# -- promises
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("limit", [1, 4])
def test_resume_is_exact_at_every_step(data, packing, limit):
    changes = [ShareChange(step=4, shares={"short": 0.9})]
    steps = assert_exact_resume(
        lambda: build(
            data, packing=packing, documents_per_row=limit, max_epochs=1, changes=changes
        ),
        90,
    )
    counts = [row.num_documents for step in steps for row in step]
    assert max(counts) == (1 if packing == "none" else limit)


@pytest.mark.parametrize("packing", PACKINGS)
def test_ranks_share_every_step_and_no_token_is_lost(data, packing):
    assert_ranks_share_steps(
        lambda rank: build(data, packing=packing, data_parallel=rank), [1, 2, 8], 100
    )
    assert_no_token_lost(build(data, packing=packing))


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_limit_that_no_row_reaches_changes_nothing(data, packing):
    free, wide = (build(data, packing=packing, documents_per_row=limit) for limit in (None, SLOTS))
    for mine, theirs in zip(free, wide, strict=True):
        assert [row.tokens.tolist() for row in mine] == [row.tokens.tolist() for row in theirs]


def test_another_limit_is_refused_and_named(data):
    def loader(**change):
        return build(data, **{"documents_per_row": None, **change})

    need = BLEND.merge(InputRequirements(cu_seqlens_capacity=7))
    assert_other_plans_are_refused(
        loader,
        {
            "four": ({"documents_per_row": 4}, "documents_per_row was (4|None), is (4|None)"),
            "implied": ({"requirements": need}, "documents_per_row was (5|None), is (5|None)"),
        },
    )
    four, five = (loader(documents_per_row=limit).state_dict() for limit in (4, 5))
    loader(requirements=need).load_state_dict(five)
    with pytest.raises(StateError, match="documents_per_row was 4, is 5"):
        loader(requirements=need).load_state_dict(four)


def test_without_limits_a_state_says_nothing_of_them(data):
    """States of earlier versions still fit, where no document with loss weights is longer than a
    row.
    """
    state = build(data[:2], documents_per_row=None).state_dict()
    assert set(state["made_from"]) == {
        "sequence_length",
        "rows_per_step",
        "seed",
        "packing",
        "window_rows",
        "num_sources",
        "share_changes",
        "sources",
        "named",
    }


@pytest.mark.parametrize("limit", [0, -3, 1.5, "x"])
def test_what_is_no_limit_is_refused(data, limit):
    with pytest.raises(ConfigError, match="documents_per_row must be a whole number"):
        build(data, documents_per_row=limit)


# -- capacities
# --------------------------------------------------------------------------------------------------


def capacity(entries, **fields):
    own = InputRequirements(
        asked_by="a layer", cu_seqlens=True, cu_seqlens_capacity=entries, prefix=True, **fields
    )
    return BLEND.merge(own)


OBJECTIVES = {
    "causal": None,
    "denoise": Denoise([SpanCorruption(0.3, 2), PrefixLM()], sentinels=range(900, 960)),
    "infill": Infill(tokens=(970, 971, 972)),
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("entries", [3, 4, 9])
def test_a_capacity_never_overflows(data, packing, kind, entries):
    """Rows with and without padding, in one pass or several, whatever objectives make of
    documents.
    """
    if packing == "concat" and kind != "causal":
        return
    options = {} if OBJECTIVES[kind] is None else {"objective": OBJECTIVES[kind]}
    source = Source([data[0].path, data[1].path], name="both", max_epochs=1, **options)
    loader = Loader(
        source,
        sequence_length=SLOTS,
        rows_per_step=6,
        packing=packing,
        requirements=capacity(entries),
        window_rows=16,
    )
    assert loader.settings.documents_per_row == entries - 2
    most = 0
    for step in loader:
        for row in step:
            assert row.cu_seqlens.shape == (entries,)
            assert np.unique(row.cu_seqlens).tolist()[-1] == SLOTS
            most = max(most, row.num_documents)
        assert sum(one.num_tokens for one in step.joined(3)) == len(step) * SLOTS
    assert most == (1 if packing == "none" else entries - 2)


def test_a_capacity_for_all_slots_is_no_limit(data):
    """As many entries as slots and two more suffice for any row: plan and states are those
    without.
    """
    free = build(data, documents_per_row=None)
    enough, less = (
        build(data, documents_per_row=None, requirements=capacity(entries))
        for entries in (SLOTS + 2, SLOTS + 1)
    )
    assert (enough.settings, less.settings.documents_per_row) == (free.settings, SLOTS - 1)
    enough.load_state_dict(free.state_dict())


def test_the_smaller_of_two_limits_counts(data):
    for entries, limit, found in ((9, 4, 4), (5, 4, 3), (9, None, 7)):
        loader = build(data, documents_per_row=limit, requirements=capacity(entries))
        assert loader.settings.documents_per_row == found


@pytest.mark.parametrize("attention", ["document", "row"])
def test_a_capacity_for_less_than_one_document_is_refused_at_once(data, attention):
    with pytest.raises(ConfigError, match=r"layer.*: cu_seqlens_capacity.*2.*needs 3"):
        build(data, requirements=capacity(2), attention=attention)


def test_joined_documents_count_as_one(data):
    loader = build(data, documents_per_row=None, requirements=capacity(3), attention="row")
    assert loader.settings.documents_per_row is None
    rows = [row for step in loader for row in step]
    assert max(row.num_documents for row in rows) > 4
    assert {row.cu_seqlens.shape for row in rows} == {(3,)}


def test_one_document_a_row_has_nothing_to_be_kept_apart_from(data):
    assert not build(data, documents_per_row=1).needs_isolation
    assert build(data, documents_per_row=2).needs_isolation


def test_limits_are_shown(data):
    loader = build(data, max_document_tokens=40)
    assert (
        "best_fit, at most 4 documents a row, at most 40 tokens a document" in loader._repr_html_()
    )
    for step, row in enumerate(islice(loader, 3)):
        pieces = loader.explain(step)
        counts = np.bincount([piece.row for piece in pieces])
        assert counts.max() <= 4
        assert len(pieces) == sum(one.num_documents for one in row)
        assert max(piece.num_tokens for piece in pieces) <= 40


def test_everything_has_no_capacity():
    assert EVERYTHING.documents_per_row is None
