"""TensorBoard, W&B, trackio and MLflow get each figure of a run once, over all its starts.

The packages are stood in for by what they are asked; `tests/integrations/test_real_trackers.py`
asks those that are installed.
"""

import json
import math
import sys
import types

import pytest

from penstock.core.errors import ConfigError, MissingExtraError
from penstock.learn.training.metrics import Metrics, read_metrics
from penstock.learn.training.settings import TrainSettings

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
ENDED = ("tensorboard", ("wandb", 0), "trackio", ("mlflow", "FINISHED"))


def record(step: int, **more) -> dict:
    return {
        "step": step,
        "loss": 5.0 / step,
        "tokens": 100 * step,
        "seconds": 0.4,
        "wait_seconds": 0.1,
        **more,
    }


def write(run, records, **options) -> None:
    records = list(records)
    done = options.pop("done", records[0]["step"] - 1)
    with Metrics(run, total_steps=10, done=done, **options) as metrics:
        for one in records:
            metrics.see(one)


class Peers:
    """Stands in for all four packages; `points` are those that each would draw."""

    def __init__(self):
        self.points = {name: [] for name in TRACKERS}
        self.begun, self.ended, self.failing = [], [], False

    def point(self, name, step, figures):
        if self.failing:
            raise OSError("no route to host")
        self.points[name].append((step, figures["loss"]))

    def install(self, monkeypatch):
        def writer(folder, purge_step):
            if purge_step is not None:
                kept = [p for p in self.points["tensorboard"] if p[0] < purge_step]
                self.points["tensorboard"] = kept
            self.begun.append(("tensorboard", purge_step))
            return types.SimpleNamespace(
                add_scalar=lambda name, value, step: (
                    self.point("tensorboard", step, {"loss": value}) if name == "loss" else None
                ),
                add_text=lambda name, text, step: self.begun.append((name, text, step)),
                close=lambda: self.ended.append("tensorboard"),
            )

        def wandb_init(**options):
            self.begun.append(("wandb", options["project"], options["name"], options["id"]))
            return types.SimpleNamespace(
                id="abc",
                config=types.SimpleNamespace(update=lambda values, allow_val_change: None),
                define_metric=lambda *_, **__: None,
                log=lambda figures: self.point("wandb", figures["step"], figures),
                finish=lambda exit_code: self.ended.append(("wandb", exit_code)),
            )

        def trackio_init(**options):
            self.begun.append(("trackio", options["project"], options["name"], options["resume"]))
            return types.SimpleNamespace(
                name=options["name"],
                log=lambda figures, step: self.point("trackio", step, figures),
                finish=lambda: self.ended.append("trackio"),
            )

        def batch(identity, metrics=(), params=()):
            assert identity == "m1"
            if params:
                self.begun.append(("mlflow", {one.key: one.value for one in params}))
            if metrics:
                figures = {one.key: one.value for one in metrics}
                self.point("mlflow", metrics[0].step, figures)

        client = types.SimpleNamespace(
            get_experiment_by_name=lambda name: None,
            create_experiment=lambda name: name,
            create_run=lambda experiment, run_name: types.SimpleNamespace(
                info=types.SimpleNamespace(run_id="m1")
            ),
            update_run=lambda identity, status: self.begun.append(("mlflow", identity)),
            log_batch=batch,
            set_terminated=lambda identity, status: self.ended.append(("mlflow", status)),
        )
        entities = types.SimpleNamespace(
            Metric=lambda key, value, timestamp, step: types.SimpleNamespace(
                key=key, value=value, step=step
            ),
            Param=lambda key, value: types.SimpleNamespace(key=key, value=value),
        )
        for name, module in {
            "torch.utils.tensorboard": types.SimpleNamespace(SummaryWriter=writer),
            "wandb": types.SimpleNamespace(init=wandb_init),
            "trackio": types.SimpleNamespace(init=trackio_init),
            "mlflow": types.SimpleNamespace(MlflowClient=lambda: client),
            "mlflow.entities": entities,
        }.items():
            monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def peers(monkeypatch):
    for name in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    found = Peers()
    found.install(monkeypatch)
    return found


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_names_its_extra(tmp_path, name, monkeypatch):
    module = "torch.utils.tensorboard" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"penstock\[{name}\]"):
        Metrics(tmp_path, total_steps=1, log=[name])


def test_a_resumed_run_continues_each_curve_and_no_point_is_there_twice(tmp_path, peers):
    """The run was killed after step 6, and its checkpoint is of step 4."""
    run = tmp_path / "first"
    write(run, map(record, range(1, 7)), log=TRACKERS)
    write(run, map(record, range(5, 11)), log=TRACKERS)
    steps = [(step, 5.0 / step) for step in range(1, 11)]
    assert peers.points == dict.fromkeys(TRACKERS, steps)
    assert [one for one in peers.begun if one[0] != "run file"] == [
        ("tensorboard", 1),
        ("wandb", "penstock", "first", None),
        ("trackio", "penstock", "first", "never"),
        ("tensorboard", 5),
        ("wandb", "penstock", "first", "abc"),
        ("trackio", "penstock", "first", "allow"),
        ("mlflow", "m1"),
    ]
    assert peers.ended == 2 * [*ENDED]
    assert json.loads((run / "trackers.json").read_text()) == {
        "wandb": "abc",
        "trackio": "first",
        "mlflow": "m1",
    }


def test_a_step_that_comes_out_otherwise_is_sent_again(tmp_path, peers):
    write(tmp_path, map(record, range(1, 4)), log=["wandb"])
    write(tmp_path, [record(3, loss=9.0)], log=["wandb"])
    assert peers.points["wandb"] == [(1, 5.0), (2, 2.5), (3, 5.0 / 3), (3, 9.0)]


def test_an_evaluation_that_is_made_up_is_sent(tmp_path, peers):
    write(tmp_path, map(record, range(1, 4)), log=["wandb"])
    write(tmp_path, [record(3, **{"held/loss": 2.0})], done=3, log=["wandb"])
    assert [step for step, _ in peers.points["wandb"]] == [1, 2, 3, 3]


def test_projects_names_and_the_run_file(tmp_path, peers, monkeypatch):
    config = {"training": {"steps": 3, "name": {"a": 1}}}
    names = {"log": TRACKERS, "log_project": "chats", "log_name": "third", "config": config}
    write(tmp_path, [record(1)], **names)
    assert ("wandb", "chats", "third", None) in peers.begun
    assert ("trackio", "chats", "third", "never") in peers.begun
    assert ("mlflow", {"training.steps": "3", "training.name.a": "1"}) in peers.begun
    text = "    training:\n      steps: 3\n      name:\n        a: 1\n"
    assert ("run file", text, 0) in peers.begun
    monkeypatch.setenv("WANDB_PROJECT", "of the environment")
    write(tmp_path / "other", [record(1)], log=["wandb"])
    assert ("wandb", "of the environment", "other", None) in peers.begun


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path, peers, caplog):
    with Metrics(tmp_path, total_steps=4, log=["wandb", "mlflow"]) as metrics:
        metrics.see(record(1))
        peers.failing = True
        metrics.see(record(2))
        metrics.see(record(3))
    assert [one["step"] for one in read_metrics(tmp_path)] == [1, 2, 3]
    told = [one.getMessage() for one in caplog.records]
    assert [text.split(" (")[0] for text in told] == [
        "wandb took no figures from step 2 on",
        "mlflow took no figures from step 2 on",
    ]
    assert "no route to host" in told[0]
    assert peers.ended == [("wandb", 0), ("mlflow", "FINISHED")]


def test_steps_that_a_failing_tracker_missed_are_sent_when_they_are_done_again(tmp_path, peers):
    with Metrics(tmp_path, total_steps=10, log=["wandb"]) as metrics:
        for step in range(1, 9):
            peers.failing = step >= 6
            metrics.see(record(step))
    peers.failing = False
    write(tmp_path, map(record, range(5, 11)), log=["wandb"])
    assert [step for step, _ in peers.points["wandb"]] == [*range(1, 11)]


def test_a_tracker_that_is_added_or_was_left_out_gets_the_steps_that_are_done_again(
    tmp_path, peers
):
    write(tmp_path, map(record, range(1, 8)), log=["wandb"])
    write(tmp_path, map(record, range(5, 10)))
    write(tmp_path, map(record, range(5, 11)), log=["wandb", "mlflow"])
    assert [step for step, _ in peers.points["wandb"]] == [*range(1, 11)]
    assert [step for step, _ in peers.points["mlflow"]] == [*range(5, 11)]


def test_another_run_there_has_no_steps(tmp_path, peers):
    write(tmp_path, map(record, range(1, 8)), log=["mlflow"])
    (tmp_path / "trackers.json").unlink()
    sent = tmp_path / "sent.jsonl"
    sent.write_text(sent.read_text().replace('"m1"', '"the former"'))
    write(tmp_path, map(record, range(5, 8)), log=["mlflow"])
    assert [step for step, _ in peers.points["mlflow"]] == [*range(1, 8), 5, 6, 7]


def test_a_run_that_is_killed_again_before_it_passed_what_it_had_sent(tmp_path, peers):
    """Also where the kill cut the last line."""
    write(tmp_path, map(record, range(1, 8)), log=TRACKERS)
    with (tmp_path / "sent.jsonl").open("a") as file:
        file.write('\n{"step": 8, "to": ["wa')
    write(tmp_path, [record(5)], log=TRACKERS)
    write(tmp_path, map(record, range(5, 9)), log=TRACKERS)
    write(tmp_path, map(record, range(8, 11)), log=TRACKERS)
    steps = [(step, 5.0 / step) for step in range(1, 11)]
    assert peers.points == dict.fromkeys(TRACKERS, steps)


def test_a_run_of_more_steps_and_figures_that_are_no_number(tmp_path, peers):
    odd = {"held/loss": math.nan, "held/most": [1.0, math.inf]}
    write(tmp_path, (record(step, **odd) for step in range(1, 8)), log=["wandb"])
    with Metrics(tmp_path, total_steps=20, done=4, log=["wandb"]) as metrics:
        for step in range(5, 9):
            metrics.see(record(step, **odd))
    assert [step for step, _ in peers.points["wandb"]] == [*range(1, 9)]


def test_a_run_that_is_begun_again_before_its_first_checkpoint(tmp_path, peers):
    write(tmp_path, map(record, range(1, 4)), log=TRACKERS)
    write(tmp_path, map(record, range(1, 6)), log=TRACKERS)
    assert [step for step, _ in peers.points["tensorboard"]] == [*range(1, 6)]
    assert peers.points["wandb"] == peers.points["tensorboard"]


def test_a_run_that_breaks_off_is_shown_as_failed(tmp_path, peers):
    def train():
        with Metrics(tmp_path, total_steps=4, log=TRACKERS) as metrics:
            metrics.see(record(1))
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        train()
    assert peers.ended == ["tensorboard", ("wandb", 1), "trackio", ("mlflow", "FAILED")]


def test_a_tracker_that_refuses_to_begin_says_what_to_do(tmp_path, peers, monkeypatch):
    def init(**_):
        raise RuntimeError("api_key not configured (no-tty)")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with pytest.raises(ConfigError, match=r"wandb cannot begin: api_key.*WANDB_MODE=offline"):
        Metrics(tmp_path, total_steps=1, log=["mlflow", "wandb"])
    assert peers.ended == [("mlflow", "FAILED")]


def test_on_other_ranks_nobody_is_asked(tmp_path, peers):
    write(tmp_path, [record(1)], log=TRACKERS, shown=False)
    assert peers.points == {name: [] for name in TRACKERS}
    assert peers.begun == []


def test_an_unknown_tracker_is_refused():
    with pytest.raises(ConfigError, match="tensorboard, wandb, trackio, mlflow, got 'comet'"):
        TrainSettings(log=("comet",))
    assert TrainSettings(log="wandb").trackers == ("wandb",)
