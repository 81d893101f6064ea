"""The learning rate as a function of the step."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.learn.training.optimizer_settings import ScheduleSettings

SHAPES = ["constant", "linear", "cosine", "wsd"]


def test_wsd_by_hand():
    schedule = ScheduleSettings(shape="wsd", warmup_steps=4, decay=0.4, floor=0.0)
    shares = [schedule.share(step, 10) for step in range(11)]
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


def test_the_default_warm_up_is_a_hundred_steps_or_a_tenth_of_a_short_run():
    schedule = ScheduleSettings(shape="constant")
    totals = (1, 5, 60, 2000)
    steps_below_peak = {
        total: sum(schedule.share(step, total) < 1 for step in range(total)) for total in totals
    }
    assert steps_below_peak == {1: 0, 5: 0, 60: 5, 2000: 99}


def test_linear_and_cosine_by_hand():
    linear = ScheduleSettings(shape="linear", warmup_steps=0, floor=0.2)
    assert [linear.share(step, 4) for step in range(5)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    cosine = ScheduleSettings(shape="cosine", warmup_steps=0)
    assert [cosine.share(step, 4) for step in (0, 1, 2, 4)] == pytest.approx(
        [1, 0.5 + math.sqrt(0.5) / 2, 0.5, 0]
    )


@given(
    shape=st.sampled_from(SHAPES),
    warmup=st.integers(0, 50),
    total=st.integers(1, 60),
    decay=st.floats(0, 1),
    floor=st.floats(0, 1),
)
def test_up_then_never_up_again_and_never_zero_while_training(shape, warmup, total, decay, floor):
    schedule = ScheduleSettings(shape=shape, warmup_steps=warmup, decay=decay, floor=floor)
    shares = [schedule.share(step, total) for step in range(total)]
    assert all(0 < share <= 1 for share in shares)
    peak = min(warmup, total)
    assert shares[:peak] == sorted(shares[:peak])
    falling = shares[max(0, peak - 1) :]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(falling))
    if shape != "constant" and warmup < total and (shape != "wsd" or round(decay * total)):
        assert schedule.share(total, total) == pytest.approx(floor, abs=1e-12)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"shape": "step"}, "schedule.shape"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"floor": 1.5}, "floor"),
    ],
)
def test_wrong_settings_are_named(wrong, match):
    with pytest.raises(ConfigError, match=match):
        ScheduleSettings(**wrong)


@pytest.mark.parametrize(("total", "falls"), [(15, 4), (13, 3), (19, 5), (17, 4), (14, 4)])
def test_wsd_falls_over_the_nearest_whole_number_of_steps(total, falls):
    """A quarter of 15 steps is 3.75, of 13 it is 3.25, of 14 it is 3.5, which goes to the even
    4.
    """
    schedule = ScheduleSettings(shape="wsd", warmup_steps=0, decay=0.25)
    shares = [schedule.share(step, total) for step in range(total)]
    expected = [1.0] * (total - falls) + [1 - step / falls for step in range(falls)]
    assert shares == pytest.approx(expected)


def test_wsd_falls_from_the_peak_where_the_warm_up_leaves_less_than_its_decay():
    schedule = ScheduleSettings(shape="wsd", warmup_steps=50, decay=1.0)
    shares = [schedule.share(step, 60) for step in range(61)]
    assert shares[49:] == pytest.approx([1.0, *(1 - step / 10 for step in range(11))])
