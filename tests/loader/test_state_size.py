"""States stay small however long a run lasts, and give back what was saved."""

import base64
import json
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Loader, Mixture, Source, write_dataset
from penstock.core.errors import StateError
from penstock.plan.loader import PlanState
from penstock.plan.loader._plan_kernels import CURSOR
from penstock.plan.loader.state import pack, unpack
from penstock.plan.loader.step_planner import StepState
from penstock.plan.sampling._kernels import SKIPPED

numbers = st.one_of(
    st.just(0), st.integers(-3, 3), st.integers(-(2**62), 2**62), st.integers(-(2**63), 2**63 - 1)
)


@settings(deadline=None)
@given(
    st.integers(1, 12).flatmap(
        lambda rows: st.lists(st.lists(numbers, min_size=7, max_size=7), min_size=rows)
    )
)
def test_packed_numbers_come_back(lines):
    given_numbers = np.array(lines, np.int64)
    np.testing.assert_array_equal(unpack(pack(given_numbers), len(lines), 7), given_numbers)


def test_packed_numbers_of_another_shape_are_refused():
    packed = pack(np.arange(70, dtype=np.int64).reshape(10, 7))
    for rows in (5, 40):
        with pytest.raises(ValueError, match=r"left over|cannot reshape"):
            unpack(packed, rows, 7)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("state") / "d", [[1, 2, 3]] * 50)


def plan_state(counters):
    cursors, skipped = (np.ascontiguousarray(part) for part in (counters[:, :2], counters[:, 3:]))
    return PlanState(
        row=2**40,
        window=2**30,
        cursors=cursors.view(CURSOR)[:, 0],
        credits=counters[:, 2],
        skipped=skipped.view(SKIPPED)[:, 0],
    )


# Columns that a policy can fill: documents taken, first token of the next part, credit, empty,
# dropped, their tokens, tokens cut off. A source that splits drops nothing, one that drops has no
# parts.
FILLED = {
    "split": (0, 1, 2, 3),
    "drop": (0, 2, 3, 4, 5),
    "truncate": (0, 2, 3, 6),
    "error": (0, 2, 3),
}


@pytest.mark.parametrize(
    "policies", [("drop",), ("split",), ("drop", "truncate", "split", "error")]
)
def test_a_hundred_sources_far_into_a_run_stay_under_4_kb(dataset, policies):
    """Random counters up to 2^40 in every field: nothing about them can be left out but what is
    always 0.
    """
    kinds = [policies[i % len(policies)] for i in range(100)]
    sources = [
        Source(dataset, 1 / (i + 1), f"source number {i}", too_long=kind)
        for i, kind in enumerate(kinds)
    ]
    loader = Loader(
        Mixture(sources), sequence_length=8192, rows_per_step=4096, seed=2**31, threads=0
    )
    generator = np.random.default_rng(0)
    counters = np.zeros((100, 7), np.int64)
    for line, kind in zip(counters, kinds, strict=True):
        line[list(FILLED[kind])] = generator.integers(1, 2**40, len(FILLED[kind]))
    counters[:, 2] -= 2**39
    start = plan_state(counters)
    loader._after = StepState(step=2**28, window_start=start, rows_used=1023)
    state = loader.state_dict()
    size = len(json.dumps(state))
    assert size <= 4000

    loader.load_state_dict(json.loads(json.dumps(state)))
    found = loader._after
    assert (found.step, found.rows_used, found.window_start.row, found.window_start.window) == (
        2**28,
        1023,
        2**40,
        2**30,
    )
    for name in ("cursors", "credits", "skipped"):
        np.testing.assert_array_equal(getattr(found.window_start, name), getattr(start, name))


def test_two_sources_far_into_a_run_stay_far_under_1_kb(dataset):
    loader = Loader(
        Mixture([Source(dataset, name="a"), Source(dataset, name="b")]),
        sequence_length=8,
        rows_per_step=4,
    )
    counters = np.random.default_rng(0).integers(1, 2**60, (2, 7))
    start = plan_state(counters)
    loader._after = StepState(step=2**28, window_start=start, rows_used=1023)
    assert len(json.dumps(loader.state_dict())) <= 600


def test_unknown_keys_are_refused_by_name(dataset):
    loader = Loader(dataset, sequence_length=8, rows_per_step=4)
    state = loader.state_dict()
    with pytest.raises(StateError, match=r"does.*epoch.*`state_dict\(\)`"):
        loader.load_state_dict({**state, "note": 1, "epoch": 2})
    with pytest.raises(StateError, match=r"does not know: made_from\.shuffle"):
        loader.load_state_dict({**state, "made_from": {**state["made_from"], "shuffle": "full"}})


def test_a_change_that_the_hints_miss_is_still_refused(dataset):
    """Two bytes a source say where to look; that something changed is known from a whole digest.

    States of many sources have no more than that; those of few also have a byte for each setting.
    """

    def loader(share):
        return Loader(Source(dataset, share), sequence_length=8, rows_per_step=4, threads=0)

    state = loader(1.0).state_dict()
    now = loader(1.0).state_dict()["made_from"]["sources"]
    others = (loader(1.0 + i).state_dict() for i in range(1, 5000))
    collision = next(s for s in others if s["made_from"]["sources"][10:] == now[10:])
    few = {name: value for name, value in collision["made_from"].items() if name != "named"}
    with pytest.raises(StateError, match=r"documents.*settings"):
        loader(1.0).load_state_dict({**state, "made_from": few})


def small_state(dataset):
    loader = Loader(Source(dataset, max_epochs=3), sequence_length=8, rows_per_step=4, threads=0)
    next(iter(loader))
    return loader, loader.state_dict()


def with_place(state, **columns):
    """The state with other numbers of its source: `cursor`, `begin`, `credit`."""
    found = unpack(base64.b85decode(state["place"]), 1, 7)
    for number, name in enumerate(("cursor", "begin", "credit")):
        found[0, number] = columns.get(name, found[0, number])
    return {**state, "place": base64.b85encode(pack(found)).decode()}


def test_a_place_behind_the_end_of_a_document(dataset):
    """Else a part of less than no tokens would be packed."""
    loader, state = small_state(dataset)
    for begin in (3, 4, 1000, 2**40):
        loader.load_state_dict(with_place(state, begin=begin))
        with pytest.raises(
            StateError,
            match=rf"token {begin} of document \d+ .*has 3",
        ):
            list(loader)


@pytest.mark.parametrize("number", [0, 1, 149, 150, 2**31, 2**60])
def test_any_place_of_a_stranger_is_harmless(dataset, number):
    loader, state = small_state(dataset)
    for forged in (
        with_place(state, cursor=number),
        with_place(state, credit=number),
        with_place(state, credit=-number),
        {**state, "row": number},
        {**state, "window": number},
        {**state, "rows": number},
        {**state, "step": number},
    ):
        try:
            loader.load_state_dict(forged)
            for step in loader:
                assert all(((row.tokens >= 0) & (row.tokens <= 3)).all() for row in step)
        except StateError:
            continue


@pytest.mark.parametrize("name", ["step", "row", "window", "rows"])
@pytest.mark.parametrize("value", [2**61, 2**70, float("inf"), float("nan"), None, "x", [], -1])
def test_impossible_counts_are_refused(dataset, name, value):
    loader, state = small_state(dataset)
    with pytest.raises(StateError, match=r"state.*loader.*damaged"):
        loader.load_state_dict({**state, name: value})


def test_a_small_state_does_not_unpack_to_gigabytes(dataset):
    loader, state = small_state(dataset)
    bomb = base64.b85encode(zlib.compress(bytes(200_000_000), 9)).decode()
    tracemalloc.start()
    with pytest.raises(StateError, match="not the state of a loader"):
        loader.load_state_dict({**state, "place": bomb})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


@pytest.mark.parametrize("now", ["drop", "split", "truncate", "error"])
@pytest.mark.parametrize("then", ["drop", "split", "truncate", "error"])
def test_another_policy_for_long_documents_is_refused(dataset, then, now):
    """No document here is too long, so only the policy itself tells the two apart."""

    def loader(policy):
        return Loader(
            Source(dataset, too_long=policy), sequence_length=8, rows_per_step=4, threads=0
        )

    first = loader(then)
    next(iter(first))
    if then == now:
        loader(now).load_state_dict(first.state_dict())
        return
    with pytest.raises(StateError, match="source"):
        loader(now).load_state_dict(first.state_dict())
