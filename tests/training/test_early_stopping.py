"""A run ends when its held-out loss no longer improves, at the same step after a kill."""

import pytest
from training_makers import losses, make, train

from penstock.core.errors import ConfigError
from penstock.learn.training.early_stopping import EarlyStopping
from penstock.learn.training.evaluator_settings import EvaluatorSettings

pytestmark = pytest.mark.usefixtures("plain_torch")


def held(data, patience: int, every: int = 2) -> str:
    return (
        f"training.evaluators={{held: {{data: {data}/data/validation, every: {every}, rows: 1, "
        f"patience: {patience}}}}}"
    )


FAR = ("training.steps=40", "training.optimizer={learning_rate: 0.3}")
"""With so high a rate, the loss soon rises."""


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    said: list[str] = []
    run = tmp_path_factory.mktemp("whole") / "run"
    return train(data, run, held(data, 2), *FAR, say=said.append), said


def test_a_run_ends_when_its_loss_no_longer_improves(whole):
    records, said = whole
    held_out = [record["held/loss"] for record in records if "held/loss" in record]
    assert 3 <= len(held_out) < 20
    # Two evaluations after the best, and no earlier one with two after it.
    assert held_out.index(min(held_out)) == len(held_out) - 3
    assert records[-1]["step"] == 2 * len(held_out)
    [line] = [one for one in said if one.startswith("held:")]
    best = 2 * (len(held_out) - 2)
    assert f"the best was {min(held_out):.4f} after step {best}" in line


def test_a_killed_run_ends_at_the_same_step(whole, data, tmp_path):
    records, _ = whole
    train(data, tmp_path / "run", held(data, 2), *FAR, until=records[-1]["step"] - 1)
    again = train(data, tmp_path / "run", held(data, 2), *FAR, resume=True)
    assert losses(again) == losses(records)


def test_an_ended_run_goes_on_with_more_patience_only(data, tmp_path):
    ended = train(data, tmp_path / "run", held(data, 1), *FAR)
    said: list[str] = []
    assert train(data, tmp_path / "run", held(data, 1), *FAR, resume=True, say=said.append) == ended
    assert any("To go on, give more patience" in line for line in said)
    more = train(data, tmp_path / "run", held(data, 3), *FAR, resume=True)
    assert more[-1]["step"] > ended[-1]["step"]
    assert losses(more[: len(ended)]) == losses(ended)


def test_evaluations_of_others_do_not_count():
    waits = EarlyStopping(
        {
            "a": EvaluatorSettings(data="x", patience=2),
            "b": EvaluatorSettings(data="x"),
        }
    )
    for step, figures in enumerate(
        ({"a/loss": 2.0}, {"b/loss": 9.0}, {"a/loss": 2.0}, {}, {"a/loss": float("nan")}), 1
    ):
        assert waits.over is None
        waits.see(step, figures)
    assert waits.over is not None
    assert waits.seen == {"a": {"loss": 2.0, "step": 1, "since": 2}}


def test_patience_goes_with_losses(data, tmp_path):
    with pytest.raises(ConfigError, match=r"patience goes with kind loss"):
        EvaluatorSettings(kind="samples", patience=2)
    with pytest.raises(ConfigError, match=r"patience"):
        make(data, tmp_path / "run", held(data, 0))
