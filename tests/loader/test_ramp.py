"""Batch ramps: steps of other sizes cut the same rows, at any place, on any number of ranks."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from makers.datasets import random_documents
from penstock.core.errors import ConfigError, StateError
from penstock.plan.loader.ramp import Ramp

ramps = st.dictionaries(st.integers(1, 40), st.integers(1, 9), max_size=4).map(
    lambda given: {0: 3, **given}
)


@given(ramps, st.integers(0, 300))
def test_sums_are_those_of_a_loop(given_ramp, rows):
    ramp, total = Ramp(given_ramp), 0
    for step in range(60):
        size = next(
            given_ramp[first] for first in sorted(given_ramp, reverse=True) if first <= step
        )
        assert (ramp.rows(step), ramp.before(step)) == (size, total)
        total += size
    assert ramp.steps(rows) == next(step for step in range(400) if ramp.before(step) >= rows)
    assert ramp.largest == max(given_ramp.values())
    assert all(size % ramp.divisor == 0 for size in given_ramp.values())


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({}, "beginning with step 0"),
        ({5: 4}, "beginning with step 0"),
        ({0: 4, "0": 8}, "beginning with step 0"),
        ({0: 0}, "must be at least 1, got 0"),
        ({0: 4, 3: 2**24 + 1}, "must be at most 16,777,216"),
        ({0: 4, -3: 2}, "a step must be from 0"),
        ({0: 4.0}, "must be a whole number, got 4.0"),
        ({0: 4, 1.5: 4}, "a step must be a whole number, got 1.5"),
        ({0: 4, "x": 4}, "a step must be a whole number, got 'x'"),
        ("4", "must be a whole number, got '4'"),
    ],
)
def test_what_is_no_ramp(value, told):
    with pytest.raises(ConfigError, match=told):
        Ramp(value)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return ps.write_dataset(tmp_path_factory.mktemp("ramp") / "d", random_documents(400, 2, 40))


def make(dataset, rows_per_step, **more):
    source = ps.Source(dataset, max_epochs=2)
    return ps.Loader(
        source, **{"sequence_length": 32, "rows_per_step": rows_per_step, "threads": 0, **more}
    )


def rows_of(steps):
    return [row.tokens.tolist() for step in steps for row in step]


RAMP = {0: 2, 3: 6, 9: 4, 30: 10}


def test_rows_are_those_of_a_constant_step_cut_otherwise(dataset):
    steps = list(make(dataset, RAMP))
    assert rows_of(steps) == rows_of(make(dataset, 1))
    assert [len(step) for step in steps[:-1]] == [
        Ramp(RAMP).rows(number) for number in range(len(steps) - 1)
    ]
    assert make(dataset, RAMP).count_steps() == len(steps)
    assert [step.index for step in steps] == list(range(len(steps)))
    for step in steps:
        assert step.loss_denominator == sum(int((row.targets[0] >= 0).sum()) for row in step)


def test_a_resume_at_every_step_and_a_seek_to_every_step(dataset):
    steps = list(make(dataset, RAMP))
    for number, step in enumerate(steps[:40]):
        later = make(dataset, RAMP)
        later.load_state_dict(json.loads(json.dumps(step.resume_state)))
        assert later.step == number + 1
        assert rows_of(later) == rows_of(steps[number + 1 :])
        assert rows_of(make(dataset, RAMP).seek(number)) == rows_of(steps[number:])
        assert [piece.row for piece in later.explain(number)][-1] == len(step) - 1


def test_ranks_have_their_parts_of_every_step(dataset):
    whole = list(make(dataset, RAMP))
    ranks = [list(make(dataset, RAMP, data_parallel=(rank, 2), threads=2)) for rank in range(2)]
    for step, first, second in zip(whole[:-1], *(one[:-1] for one in ranks), strict=True):
        assert rows_of([step]) == rows_of([first, second])
    with pytest.raises(ConfigError, match=r"10.*divide.*among.*4.*ranks"):
        make(dataset, {0: 4, 20: 10}, data_parallel=(0, 4))


def test_another_ramp_is_refused_by_a_state(dataset):
    loader = make(dataset, RAMP)
    step = next(iter(loader))
    with pytest.raises(StateError, match=r"rows_per_step was.* is 2\. .*continue"):
        make(dataset, 2).load_state_dict(step.resume_state)
    # A ramp with one number is that number.
    constant = next(iter(make(dataset, {0: 2}))).resume_state
    assert constant == next(iter(make(dataset, 2))).resume_state


def test_changes_of_shares_fall_on_the_steps_of_a_ramp(dataset):
    other = ps.write_dataset(dataset.path.parent / "other", [[901] * 16] * 4000)
    ramp = {0: 2, 5: 8}
    sources = [ps.Source(dataset, 1.0, "a"), ps.Source(other, 0.0, "b")]
    mixture = ps.Mixture(sources, [ps.ShareChange(step=7, shares={"a": 0.0, "b": 1.0})])
    loader = ps.Loader(mixture, sequence_length=16, rows_per_step=ramp, threads=0)
    shares = [
        np.mean([(row.tokens == 901).all() for row in step])
        for step, _ in zip(loader, range(12), strict=False)
    ]
    assert shares == [0.0] * 7 + [1.0] * 5


def test_first_steps_count_on(dataset):
    """Rows of the ramp and changes of shares are those of the steps' numbers."""
    steps = list(make(dataset, RAMP, first_step=8))
    assert [step.index for step in steps[:4]] == [8, 9, 10, 11]
    assert [len(step) for step in steps[:4]] == [6, 4, 4, 4]
    assert rows_of(steps) == rows_of(make(dataset, 1))
    assert make(dataset, RAMP, first_step=8).count_steps() == 8 + len(steps)
    assert rows_of(make(dataset, RAMP, first_step=8).seek(20)) == rows_of(steps[12:])
    with pytest.raises(ConfigError, match=r"cannot.*step.*7.*known.*step.*8"):
        make(dataset, RAMP, first_step=8).seek(7)
    resumed = make(dataset, RAMP, first_step=8)
    resumed.load_state_dict(steps[2].resume_state)
    assert rows_of(resumed) == rows_of(steps[3:])
    with pytest.raises(StateError, match="first_step was 8, is None"):
        make(dataset, RAMP).load_state_dict(steps[2].resume_state)


@settings(deadline=None, max_examples=15)
@given(ramps, st.integers(0, 30))
def test_any_ramp_resumed_anywhere(dataset, ramp, at):
    steps = list(make(dataset, ramp))
    step = steps[min(at, len(steps) - 1)]
    later = make(dataset, ramp)
    later.load_state_dict(step.resume_state)
    assert rows_of(later) == rows_of(steps[step.index + 1 :])
