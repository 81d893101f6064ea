"""Objectives written in Python, where the ranks add up their loss weights: the same steps, for the
work of one rank.
"""

import threading
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest

import penstock as ps
from makers.datasets import random_documents
from makers.objectives import PlainObjective
from penstock.core.errors import ConfigError
from penstock.plan.objectives import Written

RANKS = 3


class Halved(PlainObjective):
    """Every other token counts half; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __repr__(self) -> str:
        return "Halved()"

    def write(self, tokens: Any, weights: Any, key: int) -> Written:
        self.calls += 1
        return Written(
            tokens=tokens, weights=np.where(np.arange(len(tokens)) % 2, 0.5, 1.0).astype(np.float32)
        )


class Together:
    """Ranks that run in threads of this process, and sum numbers as a collective does."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=60)
        self._given: list[Any] = [None] * RANKS
        self.calls = 0

    def of(self, rank: int) -> Any:
        def total(numbers: list[float]) -> list[float]:
            self._given[rank] = numbers
            self._barrier.wait()
            found = [sum(each) for each in zip_longest(*self._given)]
            self._barrier.wait()
            self.calls += rank == 0
            return found

        return total

    def run(self, work: Any) -> list[Any]:
        results: list[Any] = [None] * RANKS

        def of(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                results[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=of, args=(rank,)) for rank in range(RANKS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return results


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return ps.write_dataset(tmp_path_factory.mktemp("ranks") / "data", random_documents(120, 1, 60))


def make(data, rank, objective, *, threads=0, **options):
    mixture = ps.Mixture(
        [
            ps.Source(data, 0.6, "python", objective=objective, max_epochs=1),
            ps.Source(data, 0.4, "causal", max_epochs=1),
        ]
    )
    settings = {"sequence_length": 48, "rows_per_step": 6, "seed": 1, "threads": threads, **options}
    return ps.Loader(mixture, data_parallel=(rank, RANKS), **settings)


def taken(loader):
    """All that a rank sees of each step."""
    return [
        (
            step.index, step.loss_denominators, step.num_tokens, step.resume_state,
            [row.tokens.tolist() for row in step], [row.loss_weights.tolist() for row in step],
        )
        for step in loader
    ]  # fmt: skip


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("distances", [1, 3])
def test_steps_are_those_of_ranks_that_do_all(data, threads, distances):
    need = ps.InputRequirements(loss_weights=True, target_distances=distances)
    options = {"threads": threads, "requirements": need}
    every, own = [Halved() for _ in range(RANKS)], [Halved() for _ in range(RANKS)]
    expected = [taken(make(data, rank, every[rank], **options)) for rank in range(RANKS)]
    ranks = Together()
    found = ranks.run(
        lambda rank: taken(make(data, rank, own[rank], sum_over_ranks=ranks.of(rank), **options))
    )
    assert found == expected
    assert ranks.calls == len(expected[0]) > 5
    assert sum(each.calls for each in own) == every[0].calls
    assert max(each.calls for each in own) < 0.6 * every[0].calls


def test_a_state_does_not_depend_on_it(data):
    """Saved with sums, restored without."""
    ranks = Together()

    def four(rank):
        steps = iter(make(data, rank, Halved(), sum_over_ranks=ranks.of(rank)))
        return [next(steps) for _ in range(4)][-1].resume_state

    states = ranks.run(four)
    assert states[0] == states[1] == states[2]
    loader = make(data, 1, Halved())
    loader.load_state_dict(states[0])
    assert taken(loader) == taken(make(data, 1, Halved()))[4:]


def test_it_is_not_called_without_need(data):
    def never(numbers):
        raise AssertionError("called")

    assert taken(make(data, 0, ps.Causal(), sum_over_ranks=never))
    alone = ps.Loader(
        ps.Source(data, objective=Halved(), max_epochs=1),
        sequence_length=48,
        rows_per_step=6,
        sum_over_ranks=never,
    )
    assert list(alone)


def test_an_objective_that_lies_is_an_error_on_its_rank(data):
    class Longer(Halved):
        def write(self, tokens, weights, key):
            return Written(tokens=np.append(tokens, 1) if len(tokens) == 48 else tokens)

    ranks = Together()
    found = ranks.run(lambda rank: taken(make(data, rank, Longer(), sum_over_ranks=ranks.of(rank))))
    errors = [each for each in found if isinstance(each, ConfigError)]
    assert errors
    assert "wrote int64 [49] tokens where it had measured 48" in str(errors[0])


def test_explain_and_pickles_do_without(data):
    loader = make(data, 0, Halved(), sum_over_ranks=lambda numbers: numbers)
    assert loader.explain(0)
