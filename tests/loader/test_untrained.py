"""Sources of which nothing can be trained are named, and the loop over them ends; others are let
through.
"""

from itertools import islice

import numpy as np
import pytest

from makers.objectives import PlainObjective
from penstock import Denoise, Loader, Mixture, Source, write_dataset
from penstock.core.errors import ConfigError
from penstock.plan.objectives import Written

NOTHING = (
    "source 'd': nothing can be trained: each of its {} documents is empty, has one token only, "
    "or has loss weight 0"
)


def load(*sources, **settings):
    return Loader(
        Mixture(sources), **{"sequence_length": 16, "rows_per_step": 2, "threads": 0, **settings}
    )


@pytest.fixture
def good(tmp_path):
    return write_dataset(tmp_path / "good", [[1, 2, 3]] * 50)


@pytest.mark.parametrize(
    "packing", ["best_fit", "best_fit_decreasing", "next_fit", "concat", "none"]
)
@pytest.mark.parametrize(
    ("documents", "spans"),
    [
        ([[7]] * 40, None),
        ([[]] * 3, None),
        ([[], [7], []], None),
        ([[1, 2, 3]] * 5, [[(0, 3, 0.0)]] * 5),
        ([[1, 2, 3]] * 5, [[]] * 5),
        # Its first token is a target of none.
        ([[1, 2, 3]] * 5, [[(0, 1, 1.0)]] * 5),
    ],
)
def test_a_source_without_a_target_is_named(tmp_path, good, packing, documents, spans):
    dataset = write_dataset(tmp_path / "d", documents, spans=spans)
    for sources in (
        [Source(dataset)],
        [Source(good), Source(dataset)],
        [Source(dataset, max_epochs=1)],
    ):
        with pytest.raises(ConfigError, match=NOTHING.format(len(documents))):
            load(*sources, packing=packing)


def test_only_the_slice_counts(tmp_path):
    dataset = write_dataset(tmp_path / "d", [[7]] * 3000 + [[1, 2]] * 3000)
    with pytest.raises(ConfigError, match=NOTHING.format(3000)):
        load(Source(dataset, slice=(0, 0.5)))
    assert next(iter(load(Source(dataset, slice=(0.5, 1))))).loss_denominator > 0
    assert next(iter(load(Source(dataset)))).loss_denominator > 0


def test_what_is_dropped_does_not_count(tmp_path):
    dataset = write_dataset(tmp_path / "d", [[7], [1] * 40])
    with pytest.raises(ConfigError, match=r"16.*too_long='drop'"):
        load(Source(dataset, too_long="drop"))
    for too_long in ("split", "truncate"):
        assert any(
            step.loss_denominator for step in islice(load(Source(dataset, too_long=too_long)), 9)
        )


def test_a_loader_counts_what_it_dropped(tmp_path):
    dataset = write_dataset(tmp_path / "d", [[1, 2, 3], [], [1] * 40, [1] * 41])
    loader = load(Source(dataset, name="d", max_epochs=2, too_long="drop", shuffle="none"))
    assert (loader.dropped, "dropped" in repr(loader)) == ({}, False)
    states = [step.resume_state for step in loader]
    assert loader.dropped["d"] >= 3
    assert f"documents dropped: {loader.dropped['d']} of d)" in repr(loader)
    loader.seek(0)
    assert loader.dropped == {}
    loader.load_state_dict(states[-1])
    assert len(list(loader)) == 0


class Silent(PlainObjective):
    """Writes documents that nothing is learned from, but for those of some lengths."""

    name = "silent"

    def __init__(self, trained=()):
        self.trained = trained

    def write(self, tokens, weights, key):
        return Written(
            tokens=tokens,
            weights=np.full(len(tokens), float(len(tokens) in self.trained), np.float32),
        )


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("count", [3, 50, 1000])
def test_a_whole_epoch_without_a_target_ends_the_loop(tmp_path, threads, count):
    """Of an endless source: found when the lengths do not say it, on any rank, and again after a
    resume.
    """
    dataset = write_dataset(tmp_path / "d", [[1, 2, 3]] * count)
    steps = []
    loader = load(Source(dataset, objective=Silent()), threads=threads)
    with pytest.raises(ConfigError, match=r"'d'.*nothing.*trained"):
        steps.extend(islice(loader, count + 50))
    assert sum(row.num_documents for step in steps for row in step) >= count
    resumed = load(Source(dataset, objective=Silent()), data_parallel=(1, 2))
    resumed.load_state_dict(steps[-1].resume_state)
    with pytest.raises(ConfigError, match="source 'd': nothing can be trained"):
        list(islice(resumed, count + 50))


def test_one_finite_pass_without_a_target(tmp_path):
    dataset = write_dataset(tmp_path / "d", [[1, 2, 3]] * 20)
    with pytest.raises(ConfigError, match=r"none of the \d+ steps of d had a target"):
        list(load(Source(dataset, objective=Silent(), max_epochs=1)))


def test_documents_that_are_too_short_to_denoise(tmp_path):
    dataset = write_dataset(tmp_path / "d", [[1]] * 30, vocab_size=300)
    objective = Denoise.ul2r(modes={"R": 297, "X": 298, "S": 299}, sentinels=range(200, 290))
    with pytest.raises(ConfigError, match="source 'd': nothing can be trained"):
        list(islice(load(Source(dataset, objective=objective)), 100))


@pytest.mark.parametrize("packing", ["best_fit", "best_fit_decreasing", "next_fit", "none"])
@pytest.mark.parametrize("rows_per_step", [1, 4])
def test_steps_without_a_target_may_happen(tmp_path, packing, rows_per_step):
    """Rows of untrained documents only, and a conversation whose reply comes after rows of prompt:
    all is trained.
    """
    documents = [[7]] * 300 + [[5] * 16] + [[9] * 400]
    spans = [[(0, 1, 1.0)]] * 300 + [[(0, 16, 1.0)]] + [[(399, 400, 1.0)]]
    dataset = write_dataset(tmp_path / "d", documents, spans=spans)
    loader = load(Source(dataset), packing=packing, rows_per_step=rows_per_step)
    denominators = [step.loss_denominator for step in islice(loader, 1200)]
    assert len(denominators) == 1200
    assert 0 in denominators
    assert sum(denominators) > 0


def test_the_end_of_a_pass_may_be_without_a_target(tmp_path):
    dataset = write_dataset(tmp_path / "d", [[1, 2]] + [[7]] * 100)
    loader = load(
        Source(dataset, max_epochs=1, shuffle="none"), packing="next_fit", rows_per_step=1
    )
    denominators = [step.loss_denominator for step in loader]
    assert denominators[0] == 1
    assert set(denominators[1:]) == {0}
    assert list(loader) == []
