"""Runs that learn from the average of several teachers."""

import json

import pytest
from training_makers import losses, make, make_teacher, on_two_processes, train, values

from penstock.core.errors import ConfigError
from penstock.learn.training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("plain_torch")

STEPS = "training.steps=6"


@pytest.fixture(scope="module")
def teachers(data, tmp_path_factory):
    """Two teachers with the student's tokenizer."""
    folder = tmp_path_factory.mktemp("teachers")
    for number in (1, 2):
        train(data, folder / str(number), "training.steps=10", f"training.seed={number}")
    return [str(folder / "1"), str(folder / "2")]


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Two with a tokenizer of their own."""
    run = make_teacher(tmp_path_factory.mktemp("others"), 10)
    train(run.parent, run.parent / "second", "training.steps=10", "training.seed=3")
    return [str(run), str(run.parent / "second")]


def section(models, loss, **settings):
    teachers = [
        {"model": model, "loss": loss, "weight": weight}
        for model, weight in zip(models, (0.25, 0.75), strict=True)
    ]
    return "teacher=" + json.dumps({"teachers": teachers, "combine": "average", **settings})


MIXED = {"kind": "kl", "forward_share": 0.5, "top_k": 8, "temperature": 2.0}


def test_a_forward_kl_trains_as_the_sum_of_losses_does(data, tmp_path, teachers):
    told = section(teachers, {"kind": "kl"}, cross_entropy=0.1)
    average = train(data, tmp_path / "average", told, STEPS)
    added = train(data, tmp_path / "added", told.replace("average", "losses"), STEPS)
    assert values(average) == pytest.approx(values(added), rel=1e-5)
    assert all(
        one < other
        for one, other in zip(
            values(average, "distillation"), values(added, "distillation"), strict=True
        )
    )
    assert "distillation_1" in added[0]
    assert "distillation_1" not in average[0]
    assert average[0]["chunks"] * 2 == pytest.approx(added[0]["chunks"])


@pytest.fixture(scope="module")
def mixed(data, tmp_path_factory, teachers):
    """Settings of two teachers, and the records of a run with both in this process."""
    told = section(teachers, MIXED, choose="by_score")
    return told, train(data, tmp_path_factory.mktemp("mixed") / "whole", told, STEPS)


@pytest.mark.parametrize("process", ["here", "own"])
def test_a_run_that_is_given_up_goes_on_to_the_last_bit(data, tmp_path, mixed, process):
    told, due = mixed
    told = told.replace('"weight"', f'"process": "{process}", "weight"')
    train(data, tmp_path / "run", told, STEPS, until=3)
    found = train(data, tmp_path / "run", told, STEPS, resume=True)
    assert losses(found) == losses(due)
    assert values(found, "distillation") == values(due, "distillation")


@pytest.mark.parametrize("kind", ["p_kl", "h_kl", "alm", "uld"])
def test_teachers_of_another_vocabulary_than_the_student(data, tmp_path, others, kind):
    told = section(others, {"kind": kind}, cross_entropy=0.1)
    found = train(data, tmp_path / "run", told, "training.steps=20")
    assert found[-1]["distillation"] < found[0]["distillation"]


def test_a_learnt_projection_is_one(data, tmp_path, others):
    told = section(others, {"kind": "p_kl"}).replace(
        '"weight"', '"learn_projection": true, "weight"'
    )
    trainer = make(data, tmp_path / "run", told)
    assert len(list(trainer.distiller.parameters())) == 1
    due = train(data, tmp_path / "whole", told, STEPS)
    train(data, tmp_path / "broken", told, STEPS, until=3)
    assert losses(train(data, tmp_path / "broken", told, STEPS, resume=True)) == losses(due)


def test_refusals(data, tmp_path, teachers, others):
    mine, theirs = teachers[0], others[0]
    with pytest.raises(ConfigError, match=r"one vocabulary, but teacher 0 .* ids, and teacher 1"):
        make(data, tmp_path / "run", section([mine, theirs], {"kind": "p_kl"}))
    with pytest.raises(ConfigError, match="set combine to losses, which compares the student"):
        make(data, tmp_path / "run", section([theirs, mine], {"kind": "alm"}))
    short = tmp_path / "short"
    train(data, short, "training.steps=4", "data.loader.sequence_length=32")
    with pytest.raises(ConfigError, match=r"different lengths .*: 64, .*: 32.* of each to 32"):
        make(data, tmp_path / "run", section([mine, str(short)], {"kind": "kl"}))
    with pytest.raises(ConfigError, match=r"teacher.combine: found 'mean', expected"):
        make(
            data,
            tmp_path / "run",
            section(teachers, {"kind": "kl"}).replace("average", "mean"),
        )


@pytest.mark.slow
def test_two_ranks_train_what_one_does(data, tmp_path, teachers):
    code = """
        import os, sys
        from pathlib import Path
        import torch
        from penstock.learn.training.distributed import Ranks
        from training_makers import train

        with Ranks(torch.device("cpu")) as ranks:
            train(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:], ranks=ranks)
            ranks.barrier()
        os._exit(0)
    """
    told = section(teachers, MIXED, balance="balanced")
    due = train(data, tmp_path / "one", told, STEPS)
    on_two_processes(tmp_path / "script.py", code, data, tmp_path / "two", told, STEPS)
    found = read_metrics(tmp_path / "two")
    assert values(found) == pytest.approx(values(due), rel=1e-6)
    assert values(found, "distillation") == pytest.approx(values(due, "distillation"), rel=1e-5)
