"""A companion of the loader: called for each row, in threads, and nothing else changes by it."""

import threading
from itertools import islice

import numpy as np
import pytest

from contracts import assert_exact_resume, assert_ranks_share_steps, assert_same_step
from makers.datasets import random_documents
from penstock import Denoise, Loader, Mixture, Source, write_dataset
from penstock.core.errors import ConfigError
from penstock.plan.loader._plan_kernels import PIECE
from penstock.plan.objectives import SpanCorruption


class Sums:
    """Makes, of each row, the sum of its tokens and its pieces; remembers threads and sources."""

    def __init__(self, fail_at=None):
        self.threads, self.sources, self.rows, self.fail_at = set(), None, 0, fail_at

    def begin(self, sources):
        self.sources = sources
        return self

    def __call__(self, row, pieces):
        self.threads.add(threading.current_thread().name)
        self.rows += 1
        assert (pieces.shape, pieces.dtype) == ((row.num_documents,), PIECE)
        assert pieces["length"].sum() == row.num_tokens
        if row.tokens[0] == self.fail_at:
            raise ConfigError("the companion does not like this row")
        return int(row.tokens.sum()), pieces.copy()


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    documents = random_documents(120, 1, 200, seed=1)
    return [
        write_dataset(tmp_path_factory.mktemp(name) / name, documents[i::2])
        for i, name in enumerate("ab")
    ]


def build(datasets, companion, **settings):
    defaults = {
        "sequence_length": 128,
        "rows_per_step": 8,
        "seed": 3,
        "window_rows": 32,
        "threads": 0,
    }
    sources = [
        Source(dataset, name=name, max_epochs=2)
        for name, dataset in zip("ab", datasets, strict=True)
    ]
    return Loader(Mixture(sources), companion=companion, **{**defaults, **settings})


def results(steps):
    return [row.distillation for step in steps for row in step]


def assert_same_results(left, right):
    assert len(left) == len(right)
    for (my_sum, my_pieces), (their_sum, their_pieces) in zip(left, right, strict=True):
        assert my_sum == their_sum
        np.testing.assert_array_equal(my_pieces, their_pieces)


def test_each_row_has_its_own_result(datasets):
    for step in build(datasets, Sums()):
        for row in step:
            total, pieces = row.distillation
            assert total == row.tokens.sum()
            np.testing.assert_array_equal(pieces["source"], row.source_ids)


def test_steps_and_states_are_those_without_one(datasets):
    plain = list(build(datasets, None))
    for mine, theirs in zip(build(datasets, Sums(), threads=2), plain, strict=True):
        assert_same_step(mine, theirs)
    assert all(row.distillation is None for step in plain for row in step)
    state = plain[3].resume_state
    loader = build(datasets, Sums())
    loader.load_state_dict(state)
    assert_same_step(next(iter(loader)), plain[4])


def test_resume_and_seek_and_threads_give_the_same_results(datasets):
    whole = results(assert_exact_resume(lambda: build(datasets, Sums()), 6))
    for threads in (1, 3):
        assert_same_results(
            results(islice(build(datasets, Sums(), threads=threads, prefetch=3), 6)), whole
        )
    assert_same_results(
        results(islice(build(datasets, Sums(), threads=2).seek(4), 2)), whole[4 * 8 :]
    )


def test_ranks_share_the_results(datasets):
    assert_ranks_share_steps(lambda rank: build(datasets, Sums(), data_parallel=rank), [1, 2, 4], 5)
    whole = results(islice(build(datasets, Sums()), 5))
    ranks = [list(islice(build(datasets, Sums(), data_parallel=(rank, 4)), 5)) for rank in range(4)]
    assert_same_results(
        results(part for parts in zip(*ranks, strict=True) for part in parts), whole
    )


def test_it_works_in_the_filling_threads_on_the_rows_of_its_rank_alone(datasets):
    companion = Sums()
    steps = list(islice(build(datasets, companion, threads=2, prefetch=1, data_parallel=(1, 4)), 4))
    assert {name.split("-")[0] for name in companion.threads} == {"penstock"}
    assert companion.rows >= sum(len(step) for step in steps) == 8
    assert companion.rows <= 8 + 2 * 4


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_comes_at_its_step(datasets, threads):
    plain = list(build(datasets, None))
    loader = build(datasets, Sums(fail_at=plain[3][5].tokens[0]), threads=threads)
    before = next(
        i
        for i, step in enumerate(plain)
        if any(row.tokens[0] == plain[3][5].tokens[0] for row in step)
    )
    steps = iter(loader)
    assert len(list(islice(steps, before))) == before
    with pytest.raises(ConfigError, match="does not like"):
        next(steps)


def test_it_is_told_the_sources(datasets):
    companion = Sums()
    denoise = Denoise([SpanCorruption(0.15, 3)], sentinels=list(range(800, 900)))
    sources = [
        Source(datasets[0], name="plain"),
        Source(datasets[1], name="noisy", objective=denoise),
    ]
    Loader(Mixture(sources), sequence_length=256, rows_per_step=4, companion=companion)
    assert [(source.name, source.is_rewritten) for source in companion.sources] == [
        ("plain", False),
        ("noisy", True),
    ]
    assert [source.objective for source in companion.sources] == ["causal", "denoise"]
    assert [len(source.dataset) for source in companion.sources] == [60, 60]


def test_arrays_that_a_result_keeps_are_not_filled_again(datasets):
    class Keeper(Sums):
        def __call__(self, row, pieces):
            return row

    kept = [
        (row.distillation, row.distillation.tokens.copy())
        for step in build(datasets, Keeper())
        for row in step
    ]
    for row, tokens in kept:
        np.testing.assert_array_equal(row.tokens, tokens)
