"""Choosing tokens: the distribution is the slow twin's, and a row's draw is its own."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.processes import run_code
from penstock.core.errors import ConfigError, StateError
from penstock.learn.generation import Sampling
from penstock.learn.generation.sampling import Sampler, draw, sequence_key

CPU = torch.device("cpu")
WAYS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.sampled_from([0.07, 0.35, 0.61, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.04, 0.3, 1.0]),
)
LOGITS = st.lists(st.integers(-6, 6).map(lambda number: number / 2), min_size=2, max_size=10)


def slow_distribution(logits: list[float], way: Sampling) -> list[float]:
    """Probabilities by the words of `Sampling`."""
    if way.temperature == 0:
        return [float(place == logits.index(max(logits))) for place in range(len(logits))]
    scores = [(logit - max(logits)) / way.temperature for logit in logits]
    ordered = sorted(scores, reverse=True)
    least = ordered[min(way.top_k, len(scores)) - 1] if way.top_k else -math.inf
    if way.top_p < 1:
        total, reached = sum(math.exp(score) for score in scores if score >= least), 0.0
        for score in ordered:
            reached += math.exp(score)
            if reached >= way.top_p * total:
                least = max(least, score)
                break
    if way.min_p:
        least = max(least, math.log(way.min_p))
    weights = [math.exp(score) if score >= least else 0.0 for score in scores]
    return [weight / sum(weights) for weight in weights]


def chosen(logits: list[float], way: Sampling, numbers: np.ndarray) -> np.ndarray:
    rows = torch.tensor([logits]).expand(len(numbers), -1)
    return Sampler([way] * len(numbers), CPU).choose(rows, numbers).numpy()


@settings(deadline=None, max_examples=300)
@given(LOGITS, WAYS)
def test_each_token_has_its_share_of_the_numbers(logits, way):
    numbers = (np.arange(1000) + 0.5) / 1000
    shares = np.bincount(chosen(logits, way, numbers), minlength=len(logits)) / 1000
    assert np.abs(shares - slow_distribution(logits, way)).max() <= 0.002


@pytest.mark.parametrize(
    "way",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(top_k=5),
        Sampling(top_p=0.8),
        Sampling(min_p=0.1),
        Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02),
    ],
)
def test_draws_follow_the_distribution(way):
    logits = (np.random.default_rng(1).normal(0, 2, 60)).tolist()
    expected = np.array(slow_distribution(logits, way))
    count = 20_000
    key = sequence_key(3, 0)
    found = np.bincount(chosen(logits, way, draw([key] * count, range(count))), minlength=60)
    kept = expected > 0
    assert found[~kept].sum() == 0
    statistic = ((found[kept] - count * expected[kept]) ** 2 / (count * expected[kept])).sum()
    # Mean and standard deviation of chi-square; five of the latter.
    freedom = kept.sum() - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(-9, 9), min_size=7, max_size=7), WAYS),
        min_size=2,
        max_size=5,
    )
)
def test_rows_do_not_know_each_other(rows):
    logits = torch.tensor([row for row, _ in rows], dtype=torch.float32)
    numbers = draw([7] * len(rows), range(len(rows)))
    together = Sampler([way for _, way in rows], CPU).choose(logits, numbers)
    alone = [
        Sampler([way], CPU).choose(logits[i : i + 1], numbers[i : i + 1])
        for i, (_, way) in enumerate(rows)
    ]
    assert together.tolist() == torch.cat(alone).tolist()


def test_numbers_are_of_place_alone():
    keys = [sequence_key(seed, choice) for seed in (0, 1) for choice in (0, 1)]
    assert len(set(keys)) == 4
    whole = draw([keys[0]] * 10, range(10))
    assert draw([keys[1], keys[0]], [4, 7])[1] == whole[7]
    many = draw([keys[2]] * 50_000, range(50_000))
    assert many.min() >= 0
    assert many.max() < 1
    assert np.abs(np.histogram(many, 50, (0, 1))[0] - 1000).max() < 5 * math.sqrt(1000)


def test_the_highest_number_chooses_a_possible_token():
    last = 1 - 2.0**-52
    assert chosen([0.0, 1.0, -math.inf], Sampling(), np.array([0.0, last])).tolist() == [0, 1]


def test_logits_that_are_no_numbers_are_refused():
    with pytest.raises(StateError, match="not finite"):
        chosen([0.0, math.nan], Sampling(), np.array([0.5]))
    with pytest.raises(StateError, match="not finite"):
        chosen([-math.inf, -math.inf], Sampling(temperature=0), np.array([0.5]))


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"temperature": -1}, "temperature must be 0, or 1e-06 or more, got -1"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"temperature": 1e-320}, "temperature must be"),
        ({"top_k": 0}, "top_k must be a whole number of 1 or more"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"min_p": 1.5}, "min_p must be 0 to 1"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens 9 is more than max_tokens 8"),
        ({"stop": "END"}, "stop must be a tuple"),
        ({"stop": ("",)}, "stop must be a tuple"),
        ({"stop": ("a\ud800",)}, "stop must be a tuple of Unicode texts"),
        ({"logprobs": 101}, "logprobs must be"),
        ({"seed": 1.5}, "seed must be a whole number"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, reported):
    with pytest.raises(ConfigError, match=reported):
        Sampling(**wrong)


def test_settings_and_verbs_need_no_torch():
    code = (
        "import sys; from penstock.learn.generation import Sampling; Sampling();"
        "import penstock.use.cli.generate, penstock.use.cli.chat;"
        "print([name for name in ('torch', 'transformers', 'jax') if name in sys.modules])"
    )
    assert run_code(code, check=True).stdout.strip() == "[]"


def test_any_whole_number_of_tokens_may_be_kept():
    assert chosen([0.0, 9.0], Sampling(top_k=10**30), np.array([0.5])) == chosen(
        [0.0, 9.0], Sampling(), np.array([0.5])
    )
