"""The trainer in one process: what it learns, and that a run given up anywhere goes on to the last
bit.
"""

import itertools

import pytest
from training_makers import losses, make, train, values

pytestmark = pytest.mark.usefixtures("plain_torch")


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The records of an uninterrupted run."""
    return train(data, tmp_path_factory.mktemp("whole") / "run")


def test_it_learns(whole):
    assert values(whole, "step") == list(range(1, 13))
    assert whole[-1]["loss"] < whole[0]["loss"] - 0.5
    assert whole[0]["learning_rate"] == pytest.approx(0.01 / 3)
    assert all(later["tokens"] > before["tokens"] for before, later in itertools.pairwise(whole))


@pytest.mark.parametrize("until", [1, 2, 5, 11, 12])
def test_a_run_that_is_given_up_goes_on_to_the_last_bit(data, tmp_path, whole, until):
    train(data, tmp_path / "run", until=until)
    assert losses(train(data, tmp_path / "run", resume=True)) == losses(whole)


def test_a_run_that_is_done_stays_done(data, tmp_path, whole):
    train(data, tmp_path / "run")
    said = []
    assert losses(train(data, tmp_path / "run", resume=True, say=said.append)) == losses(whole)
    assert "the run is complete at step 12" in " ".join(said)


def test_more_steps_for_a_run_that_is_done(data, tmp_path):
    shape = "training.schedule.shape=constant"
    train(data, tmp_path / "run", shape, "training.steps=6")
    assert len(train(data, tmp_path / "run", shape, resume=True)) == 12
    assert losses(train(data, tmp_path / "run", shape, resume=True)) == losses(
        train(data, tmp_path / "other", shape)
    )


@pytest.mark.parametrize(
    "assignments",
    [
        ("training.optimizer.kind=muon",),
        ("training.micro_sequences=4",),
        ("training.lora={rank: 2}",),
        ("model.prediction_heads=2", "training.z_loss=0.0001"),
        ("model.dtype=bfloat16", "training.schedule.shape=cosine"),
        ("data.loader.packing=concat", "data.loader.seed=5"),
    ],
    ids=lambda assignments: assignments[0].split("=")[0],
)
def test_whatever_is_trained_goes_on_to_the_last_bit(data, tmp_path, assignments):
    options = (*assignments, "training.steps=6")
    due = train(data, tmp_path / "whole", *options)
    train(data, tmp_path / "run", *options, until=3)
    assert losses(train(data, tmp_path / "run", *options, resume=True)) == losses(due)


def test_other_threads_are_told_and_not_refused(data, tmp_path, whole):
    train(data, tmp_path / "run", until=5)
    said: list[str] = []
    found = train(data, tmp_path / "run", "training.threads=2", resume=True, say=said.append)
    assert values(found) == pytest.approx(values(whole), rel=1e-5)
    assert any("changes the last bits: threads: 2 now, 1 then" in line for line in said)


def test_a_run_without_steps_ends_with_its_data(data, tmp_path):
    ends = ("training.steps=null", "data.sources.0.max_epochs=1")
    trainer = make(data, tmp_path / "run", *ends)
    assert len(list(trainer.train())) == trainer.steps > 5
    assert not list(trainer.loader)
