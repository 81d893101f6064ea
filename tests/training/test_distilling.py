"""Runs that learn from teachers: exact resume, nothing that depends on ranks or threads, and
refusals.
"""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from training_makers import losses, make, make_teacher, on_two_processes, train, values

from penstock import load_tokenizer
from penstock.core.errors import ConfigError, StateError

pytestmark = pytest.mark.usefixtures("plain_torch")

STEPS = "training.steps=6"


@pytest.fixture(scope="session")
def other(tmp_path_factory):
    """The same sentences in a smaller vocabulary, and a teacher that learnt them."""
    return make_teacher(tmp_path_factory.mktemp("other"), 20)


@pytest.fixture(scope="session")
def same(data, tmp_path_factory):
    """A teacher with the student's tokenizer."""
    folder = tmp_path_factory.mktemp("same") / "teacher"
    train(data, folder, "training.steps=20", "model.width=32")
    return folder


def teach(*teachers, **settings):
    """The assignment that gives a run file its section `teacher`."""
    return f"teacher={json.dumps({'teachers': list(teachers), **settings})}"


def teacher(path, kind, **settings):
    loss = {"kind": kind, **settings.pop("loss", {})}
    return {"model": str(path), "loss": loss, **settings}


def test_a_teacher_of_the_same_tokenizer_is_approached(data, tmp_path, same):
    found = train(
        data, tmp_path / "run", teach(teacher(same, "kl"), cross_entropy=0), "training.steps=30"
    )
    assert found[-1]["distillation"] < 0.5 * found[0]["distillation"]
    assert found[-1]["loss"] < found[0]["loss"] - 0.3, (
        "cross entropy is told although it is not in the loss"
    )


@pytest.mark.parametrize("kind", ["p_kl", "h_kl", "alm", "uld"])
def test_a_teacher_of_another_tokenizer_is_approached(data, tmp_path, other, kind):
    found = train(
        data, tmp_path / "run", teach(teacher(other, kind), cross_entropy=0.1), "training.steps=30"
    )
    assert found[-1]["distillation"] < found[0]["distillation"]
    assert all(value >= 0 for value in values(found, "distillation"))
    assert all(value > 0 for value in values(found, "chunks"))


def test_a_student_that_is_its_teacher_has_nothing_to_learn(data, tmp_path, same):
    alone = teach(teacher(same, "kl"), cross_entropy=0)
    found = train(
        data,
        tmp_path / "run",
        f'model="from:{same}"',
        alone,
        "training.steps=2",
        "training.schedule.warmup_steps=2",
        "training.optimizer.weight_decay=0",
    )
    assert found[0]["distillation"] == pytest.approx(0, abs=1e-6)
    assert found[0]["gradient_norm"] < 1e-5


@pytest.mark.parametrize(
    "section",
    ["kl", "learnt", "balanced", "two"],
)
def test_a_run_that_is_given_up_goes_on_to_the_last_bit(data, tmp_path, same, other, section):
    learnt = teacher(other, "p_kl", learn_projection=True, loss={"top_k": 8, "temperature": 2.0})
    told = {
        "kl": teach(teacher(same, "kl", loss={"top_k": 5})),
        "learnt": teach(learnt),
        "balanced": teach(teacher(other, "alm"), balance="balanced", cross_entropy=0.5),
        "two": teach(teacher(same, "kl"), learnt, choose="by_score", sharpness=2.0),
    }[section]
    due = train(data, tmp_path / "whole", told, STEPS)
    train(data, tmp_path / "run", told, STEPS, until=3)
    found = train(data, tmp_path / "run", told, STEPS, resume=True)
    assert losses(found) == losses(due)
    assert values(found, "distillation") == values(due, "distillation")


def test_a_teacher_in_a_process_of_its_own_gives_the_same_bits(data, tmp_path, other):
    here = train(data, tmp_path / "here", teach(teacher(other, "p_kl")), STEPS)
    own = train(
        data, tmp_path / "own", teach(teacher(other, "p_kl", process="own", threads=1)), STEPS
    )
    assert losses(own) == losses(here)


def test_filling_threads_change_nothing(data, tmp_path, other, monkeypatch):
    from penstock.use.config import training

    due = train(data, tmp_path / "one", teach(teacher(other, "alm")), STEPS)
    monkeypatch.setattr(training, "FILLING_THREADS", 3)
    assert losses(train(data, tmp_path / "three", teach(teacher(other, "alm")), STEPS)) == losses(
        due
    )


def test_the_best_teacher_of_each_document(data, tmp_path, same, other):
    both = teacher(same, "kl"), teacher(other, "alm")
    best = train(data, tmp_path / "best", teach(*both, choose="best"), STEPS)
    every = train(data, tmp_path / "all", teach(*both), STEPS)
    assert best[0]["chunks"] == every[0]["chunks"]
    assert 0 < best[0]["distillation"] < every[0]["distillation"]
    assert best[0]["distillation_0"] + best[0]["distillation_1"] == pytest.approx(
        best[0]["distillation"]
    )


@pytest.mark.parametrize("kind", ["p_kl", "alm", "h_kl"])
def test_a_rank_without_chunks_adds_nothing_and_joins_every_sum(data, tmp_path, other, kind):
    trainer = make(
        data, tmp_path / "run", teach(teacher(other, kind, learn_projection=kind == "p_kl"))
    )
    row = next(iter(next(iter(trainer.loader))))
    lists = ("student_bounds", "teacher_bounds", "weights", "documents")
    empty = tuple(
        dataclasses.replace(seen, **{name: getattr(seen, name)[:0] for name in lists})
        for seen in row.distillation
    )
    summed = []

    def total(values):
        summed.append(list(values))
        return [value + 5 for value in values]  # what the other ranks have

    distiller, tensors = trainer.distiller, trainer.model.tensors(row)
    distiller.begin([empty], total)
    hidden = trainer.model(tensors)
    loss = distiller.row_loss(trainer.model.logits, hidden[0], tensors.targets[0], empty)
    loss.backward()
    assert loss == 0
    for weight in [*trainer.model.parameters(), *distiller.parameters()]:
        assert weight.grad is not None
        assert not weight.grad.any()
    [mine] = distiller.pending().values()
    assert mine == 0
    assert distiller.end({"distillation 0": 5.0}, 1.0) == {"distillation": 1.0, "chunks": 5.0}
    assert summed == [[0.0]]


SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from penstock.learn.training.distributed import Ranks
from training_makers import train

data, folder = Path(sys.argv[1]), Path(sys.argv[2])
with Ranks(torch.device("cpu")) as ranks:
    for name in ("copied", "sharded"):
        assignments = ("training.steps=6", f"training.shard={str(name == 'sharded').lower()}", sys.argv[3])
        train(data, folder / name, *assignments, ranks=ranks)
        ranks.barrier()
os._exit(0)
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["p_kl", "alm"])
def test_two_ranks_train_what_one_does(data, tmp_path, other, kind):
    from penstock.learn.training.metrics import read_metrics

    told = teach(teacher(other, kind), balance="balanced")
    due = train(data, tmp_path / "one", told, STEPS)
    on_two_processes(tmp_path / "script.py", SCRIPT, data, tmp_path, told)
    for name in ("copied", "sharded"):
        found = read_metrics(tmp_path / name)
        assert values(found) == pytest.approx(values(due), rel=1e-6)
        assert values(found, "distillation") == pytest.approx(values(due, "distillation"), rel=1e-5)
        assert values(found, "chunks") == values(due, "chunks")


def test_refusals(data, tmp_path, same, other):
    for told, error, sentence in (
        (teach(teacher(other, "kl")), ConfigError, "loss kl needs one tokenizer"),
        (teach(), ConfigError, "teachers is empty"),
        (teach({"model": "a", "cache": "b"}), ConfigError, "found both"),
        (
            teach(teacher(other, "alm", learn_projection=True)),
            ConfigError,
            "the only one that projects",
        ),
        (
            teach(teacher(other, "alm", projection="file")),
            ConfigError,
            "alm uses none: leave it out",
        ),
        (
            teach(teacher(other, "alm", control_tokens={"<a>": "<b>"})),
            ConfigError,
            "has no control token '<a>'",
        ),
    ):
        with pytest.raises(error, match=sentence):
            make(data, tmp_path / "run", told)
    with pytest.raises(ConfigError, match="micro_sequences and teacher"):
        make(data, tmp_path / "run", teach(teacher(same, "kl")), "training.micro_sequences=2")


def test_a_projection_knows_the_control_tokens_that_were_told(data, tmp_path, other):
    tokenizer = load_tokenizer(other / "tokenizer")
    end = min(tokenizer.special_tokens)
    told = teacher(other, "p_kl", control_tokens={"[NLU]": end})
    student = load_tokenizer(data / "tokenizer").special_tokens["[NLU]"]
    for assignment, due in (
        (teach(told), [tokenizer.special_tokens[end]]),
        (teach(teacher(other, "p_kl")), []),
    ):
        (one,) = make(data, tmp_path / f"run {len(due)}", assignment).distiller.teachers
        row = one.projection.indices[student]
        assert row[row >= 0].tolist() == due
        one.projection.save(tmp_path / f"{len(due)}.safetensors")
    with_file = [
        teach({**told, "projection": str(tmp_path / f"{count}.safetensors")}) for count in range(2)
    ]
    with pytest.raises(ConfigError, match=r"does not project '\[NLU\]'.*--control '\[NLU\]="):
        make(data, tmp_path / "run", with_file[0])
    make(data, tmp_path / "run", with_file[1])


def test_a_run_is_not_resumed_with_or_without_a_teacher(data, tmp_path, same):
    train(data, tmp_path / "run", STEPS, until=3)
    with pytest.raises(StateError, match=r"teacher.*without"):
        make(data, tmp_path / "run", teach(teacher(same, "kl")), STEPS, resume=True)


def test_learnt_weights_are_not_taken_for_those_of_another_projection(data, tmp_path, same, other):
    train(
        data, tmp_path / "run", teach(teacher(other, "p_kl", learn_projection=True)), STEPS, until=3
    )
    for changed in (teacher(same, "p_kl", learn_projection=True), teacher(other, "p_kl")):
        with pytest.raises(StateError, match=r"teacher\.teachers\.0"):
            make(data, tmp_path / "run", teach(changed), STEPS, resume=True)


def test_a_teacher_reads_no_more_than_it_was_trained_on(data, tmp_path, other):
    """Longer documents than its rows it has never seen; what is past them teaches nothing."""
    run = tmp_path / "short"
    shutil.copytree(other, run)
    text = (run / "run.yaml").read_text()
    (run / "run.yaml").write_text(text.replace("sequence_length: 64", "sequence_length: 16"))
    for path, most in ((other, 64), (run, 16)):
        row = next(iter(make(data, tmp_path / f"of {most}", teach(teacher(path, "alm"))).loader))[0]
        seen = row.distillation[0].input
        assert np.diff(seen.cu_seqlens).max() <= most
    whole = next(
        iter(make(data, tmp_path / "told", teach(teacher(run, "alm", max_tokens=64))).loader)
    )[0]
    assert whole.distillation[0].input.num_tokens > seen.num_tokens


def test_settings_say_what_each_key_means():
    from penstock.learn.distillation.settings import DistillationSettings, TeacherSettings
    from penstock.use.config.models import field_notes

    for settings in (TeacherSettings, DistillationSettings):
        assert field_notes(settings).keys() == {
            field.name for field in dataclasses.fields(settings)
        }
