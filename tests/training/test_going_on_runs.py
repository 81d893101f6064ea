"""Runs with a batch ramp, with more epochs than at first, and from another run, killed and
resumed.
"""

import json
import os
import signal

import pytest
from training_makers import losses, make, train, values

import penstock as ps
from makers.forked import run_python
from makers.processes import child_environment
from penstock.core.errors import ConfigError, StateError
from penstock.use.cli import plan as plan_verb

pytestmark = pytest.mark.usefixtures("plain_torch")
RAMP = 'data.loader.rows_per_step={"0": 2, "4": 6, "9": 4}'
EPOCHS = "data.sources.0.max_epochs="


def open_steps(data, **more):
    loader = ps.Loader(
        ps.Source(data / "data" / "train", max_epochs=1),
        sequence_length=64,
        seed=1,
        threads=0,
        **more,
    )
    return list(loader)


def test_steps_of_a_ramp_have_its_rows(data, tmp_path):
    records = train(data, tmp_path / "run", RAMP)
    steps = open_steps(data, rows_per_step={0: 2, 4: 6, 9: 4})[:12]
    totals = [sum(step.num_tokens for step in steps[: number + 1]) for number in range(12)]
    assert values(records, "tokens") == totals
    assert [len(step) for step in steps] == [2] * 4 + [6] * 5 + [4] * 3
    # The learning rate is a function of steps.
    assert values(records, "learning_rate") == values(
        train(data, tmp_path / "constant"), "learning_rate"
    )


def test_a_ramp_is_resumed_at_any_step(data, tmp_path):
    due = losses(train(data, tmp_path / "whole", RAMP, "training.checkpoints.every=1"))
    for until in (4, 5, 6, 10):
        train(data, tmp_path / str(until), RAMP, "training.checkpoints.every=1", until=until)
        found = train(
            data, tmp_path / str(until), RAMP, "training.checkpoints.every=1", resume=True
        )
        assert losses(found) == due
    with pytest.raises(StateError, match=r"was \[\[0, 2\], .*\[9, 4\]\], is 4"):
        make(data, tmp_path / "whole", resume=True)


def test_a_ramp_to_the_end_of_the_data(data, tmp_path):
    records = train(data, tmp_path / "run", RAMP, EPOCHS + "1", "training.steps=null")
    steps = open_steps(data, rows_per_step={0: 2, 4: 6, 9: 4})
    assert [record["step"] for record in records] == list(range(1, len(steps) + 1))
    assert records[-1]["tokens"] == sum(step.num_tokens for step in steps)


def test_a_ramp_in_passes_of_several_rows(data, tmp_path):
    one = train(data, tmp_path / "one", RAMP, "training.rows_per_pass=1")
    for count in ("null", "3", "4"):
        found = train(data, tmp_path / count, RAMP, f"training.rows_per_pass={count}")
        assert values(found) == pytest.approx(values(one), rel=1e-5)


@pytest.mark.parametrize("steps", ["training.steps=null", "training.steps=12"])
def test_more_epochs_of_a_run_under_way(data, tmp_path, steps):
    """No row before changes, and the run goes on as one that had them from the start; but for a
    rate that decays.
    """
    constant = "training.schedule.shape=constant"
    due = train(data, tmp_path / "whole", EPOCHS + "2", steps, constant)
    train(data, tmp_path / "run", EPOCHS + "1", steps, constant, until=7)
    said = []
    found = train(
        data, tmp_path / "run", EPOCHS + "2", steps, constant, resume=True, say=said.append
    )
    assert losses(found) == losses(due)
    assert "max_epochs of source 'train' was 1, is 2" in said
    assert "resumed with data.sources.0.max_epochs: 2; it was 1" in said


def test_more_epochs_after_the_end(data, tmp_path):
    first = train(data, tmp_path / "run", EPOCHS + "1", "training.steps=null")
    ended = [record["step"] for record in first]
    said = []
    second = train(
        data, tmp_path / "run", EPOCHS + "2", "training.steps=null", resume=True, say=said.append
    )
    assert "max_epochs of source 'train' was 1, is 2: goes on after the end, in new rows" in said
    assert second[: len(first)] == first
    assert [record["step"] for record in second] == list(range(1, len(second) + 1))
    assert len(second) > 1.8 * len(ended)
    # Each token of two epochs, once.
    assert second[-1]["tokens"] == 2 * first[-1]["tokens"]
    assert train(data, tmp_path / "run", EPOCHS + "2", "training.steps=null", resume=True) == second
    with pytest.raises(StateError, match=r"max_epochs.*2.*1.*state.*stands"):
        make(data, tmp_path / "run", EPOCHS + "1", "training.steps=null", resume=True)
    killed = tmp_path / "killed"
    train(data, killed, EPOCHS + "1", "training.steps=null")
    train(data, killed, EPOCHS + "2", "training.steps=null", resume=True, until=len(first) + 5)
    again = train(data, killed, EPOCHS + "2", "training.steps=null", resume=True)
    assert losses(again) == losses(second)


def test_data_that_changed_names_the_cure(data, tmp_path):
    train(data, tmp_path / "run", "training.steps=4")
    other = f"data.sources=[{{path: {data}/data/train}}, {{path: {data}/data/validation}}]"
    with pytest.raises(StateError, match=r"num_sources.*1.*continue_from"):
        make(data, tmp_path / "run", other, "training.steps=6", resume=True)


KILL = """
import os, signal

def kill(model, step, record):
    if record["step"] == int(os.environ.get("KILL_AT", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_killed_by_the_system(data, tmp_path):
    """From another run, with a ramp, by the command line: killed twice, and the losses are those of
    a whole run.
    """
    (tmp_path / "killing.py").write_text(KILL)
    train(data, tmp_path / "a", RAMP, until=5)

    def run(output, kill_at, *more):
        options = [
            RAMP,
            f"training.on_step={tmp_path}/killing.py:kill",
            "training.checkpoints.every=1",
        ]
        words = ["-m", "penstock", "train", data / "run.yaml", "-o", tmp_path / output]
        words += [*more, *(word for option in options for word in ("--set", option))]
        return run_python(*words, env=child_environment(KILL_AT=str(kill_at)))

    start = ("--continue-from", str(tmp_path / "a"))
    assert run("whole", 0, *start).returncode == 0
    assert run("b", 7, *start, "--resume").returncode == -signal.SIGKILL
    assert run("b", 10, *start, "--resume").returncode == -signal.SIGKILL
    ended = run("b", 0, "--resume")
    assert ended.returncode == 0, ended.stderr
    due = ps.open_run(tmp_path / "whole").metrics
    assert [record["step"] for record in due] == list(range(5, 13))
    assert losses(ps.open_run(tmp_path / "b").metrics) == losses(due)
    assert os.path.exists(tmp_path / "b" / "continued.json")


def test_a_plan_begins_where_the_run_does(data, tmp_path, capsys):
    train(data, tmp_path / "a", RAMP, until=7)

    def plan(run_file, *assignments):
        plan_verb.run(
            run_file=str(run_file), steps=None, assignments=list(assignments), as_json=True
        )
        return json.loads(capsys.readouterr().out)

    whole = plan(data / "run.yaml", RAMP)
    rest = plan(data / "run.yaml", RAMP, f"training.continue_from={tmp_path / 'a'}")
    assert (whole["steps"], rest["steps"]) == (12, 6)
    assert (whole["rows"], rest["rows"]) == (2 * 4 + 6 * 5 + 4 * 3, 6 * 3 + 4 * 3)
    assert whole["rows_per_step"] == {"0": 2, "4": 6, "9": 4}
    train(data, tmp_path / "b", RAMP, f"training.continue_from={tmp_path / 'a'}", until=9)
    assert plan(tmp_path / "b")["tokens"] == rest["tokens"]


def test_ranks_must_divide_every_step_of_a_ramp(data):
    with pytest.raises(ConfigError, match=r"6.*divide.*among.*4.*ranks"):
        ps.Loader(
            data / "data" / "train",
            sequence_length=64,
            rows_per_step={0: 4, 9: 6},
            data_parallel=(0, 4),
        )
