"""`penstock train --dry-run` in this process: what it plans, what it finds, and that it leaves no
trace.
"""

import json

import pytest
import yaml

from penstock.core.errors import ConfigError, OutputError
from penstock.learn.training import trackers
from penstock.use.cli.plan import run as plan_verb
from penstock.use.cli.train import run as train_verb
from penstock.use.runs.dry_runs import PLANNED_ROWS
from penstock.use.runs.planning import STEPS


@pytest.fixture
def run_file(made):
    """The run file of the run `plain`."""
    return made / "plain.yaml"


def plan(run_file, capsys, *assignments, **options):
    given = {"dry_run": True, "as_json": True, "assignments": list(assignments), **options}
    train_verb(run_file=str(run_file), **given)
    return json.loads(capsys.readouterr().out)


def test_it_plans_the_steps_of_the_run(run_file, capsys):
    told = plan(run_file, capsys)
    assert (told["planned below"], told["plan"]["steps"]) == ("all 6 steps", 6)
    told = plan(run_file, capsys, "training.steps=9")
    assert (told["planned below"], told["plan"]["steps"]) == ("all 9 steps", 9)


def test_the_verb_plan_takes_the_steps_of_the_run(run_file, capsys):
    def steps(*assignments, **options):
        plan_verb(run_file=str(run_file), assignments=list(assignments), as_json=True, **options)
        return json.loads(capsys.readouterr().out)["steps"]

    assert [steps(), steps("training.steps=9"), steps(steps=3)] == [6, 9, 3]
    assert steps("training=null") == STEPS


def test_of_a_long_run_it_plans_the_beginning_and_says_so(run_file, capsys, monkeypatch):
    monkeypatch.setattr("penstock.use.runs.dry_runs.PLANNED_ROWS", 20)
    told = plan(run_file, capsys, "training.steps=100000")
    assert (told["planned below"], told["plan"]["steps"]) == ("the first 5 of 100,000 steps", 5)
    assert PLANNED_ROWS > 10_000


def test_a_plan_to_read(run_file, capsys):
    train_verb(run_file=str(run_file), dry_run=True)
    told = capsys.readouterr().out
    assert "planned below: all 6 steps" in told
    assert "parameters: " in told


def test_sources_that_end_before_the_run(run_file, capsys):
    with pytest.raises(ConfigError, match=r"after \d+ steps, before 5000; lower"):
        plan(run_file, capsys, "training.steps=5000", "data.sources.0.max_epochs=1")


def test_the_folder_is_looked_at_and_left_alone(made, run_file, capsys, tmp_path):
    with pytest.raises(OutputError, match=r"run.*already.*\(--resume.*resume=True\)"):
        plan(run_file, capsys, output=str(made / "plain"))
    before = {path: path.lstat().st_mtime_ns for path in (made / "plain").rglob("*")}
    plan(run_file, capsys, "training.steps=8", output=str(made / "plain"), resume=True)
    assert {path: path.lstat().st_mtime_ns for path in (made / "plain").rglob("*")} == before
    plan(run_file, capsys, output=str(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []


def test_resuming_needs_a_folder(run_file):
    with pytest.raises(ConfigError, match=r"--output.*missing.*folder"):
        train_verb(run_file=str(run_file), dry_run=True, resume=True)


def test_writers_get_the_run_file_with_its_overrides(run_file, tmp_path, monkeypatch):
    seen = []

    class Writer:
        replaces = True

        def __init__(self, start):
            seen.append((start.project, start.config))

        def see(self, record):
            """Nothing is kept."""

        def close(self):
            """Nothing is open."""

    monkeypatch.setitem(trackers._TRACKERS, "wandb", Writer)
    monkeypatch.setattr("penstock.learn.training.checks.find_spec", lambda name: name)
    changes = [
        "training.steps=2",
        "training.schedule.warmup_steps=1",
        "training.log=[wandb]",
        "training.log_project=mine",
        "training.evaluators={}",
    ]
    train_verb(run_file=str(run_file), output=str(tmp_path / "run"), assignments=changes)
    [(project, config)] = seen
    assert project == "mine"
    assert config["training"]["steps"] == 2
    assert config == yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
