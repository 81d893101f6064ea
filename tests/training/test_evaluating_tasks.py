"""Real tasks as evaluators: the score is the task's, and the run does not notice them."""

import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from training_makers import WORDS, losses, make, on_two_processes, train

from penstock.core.errors import ConfigError
from penstock.learn.evaluation.results import weighted_mean
from penstock.learn.evaluation.tasks import Answer, Problem, TaskSettings
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.evaluator_settings import EvaluatorSettings
from penstock.learn.training.evaluators import evaluate, make_evaluators

pytestmark = pytest.mark.usefixtures("plain_torch")
LOOK = "training.evaluators={next: {kind: task, task: {name: mmlu}, every: 3}}"


class NextWord:
    """How likely one word is after another, and what the model writes there: scored and written, of
    any weights.
    """

    def __init__(self, settings, number=75):
        self.settings, self.number, self.asked = settings, number, []

    def problems(self):
        return [
            Problem(name=f"word {n}", content=(WORDS[n % 15], WORDS[n % 7]))
            for n in range(self.number)
        ]

    def answer(self, subject, problems):
        self.asked += [problem.name for problem in problems]
        pairs = [
            subject.continuation(one, f" {other}")
            for one, other in (problem.content for problem in problems)
        ]
        for problem, scored in reversed(
            [*zip(problems, subject.log_likelihoods(pairs), strict=True)]
        ):
            score = math.exp(scored.log_probability)
            yield Answer(problem=problem.name, score=score, weight=1.0 + len(problem.content[0]))


@pytest.fixture
def task(monkeypatch):
    """The task that is made next."""
    made = []

    def make_task(settings):
        made.append(NextWord(settings))
        return made[-1]

    monkeypatch.setattr("penstock.learn.training.evaluators.make_task", make_task)
    return made


def test_the_run_does_not_notice_it(data, tmp_path, task):
    looked = train(data, tmp_path / "looked", LOOK, "training.steps=7")
    plain = train(data, tmp_path / "plain", "training.steps=7")
    assert losses(looked) == losses(plain)
    scores = {record["step"]: record["next/score"] for record in looked if "next/score" in record}
    assert [*scores] == [3, 6, 7]
    assert scores[7] != scores[3]
    assert all(record["next/standard_error"] > 0 for record in looked if record["step"] in scores)


def test_a_look_leaves_weights_place_and_randomness(data, tmp_path, task):
    trainer = make(data, tmp_path / "run", LOOK)
    weights = [p.clone() for p in trainer.model.parameters()]
    place = trainer.loader.state_dict()
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    [(_, look)] = trainer.evaluators.values()
    assert look(trainer.model) == look(trainer.model)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == state[1:]
    assert trainer.loader.state_dict() == place
    assert all(
        torch.equal(p, w) and p.grad is None
        for p, w in zip(trainer.model.parameters(), weights, strict=True)
    )


def test_the_score_is_that_of_all_answers(data, tmp_path, task):
    trainer = make(data, tmp_path / "run", LOOK)
    [(_, look)] = trainer.evaluators.values()
    found = look(trainer.model)
    answers = [*task[0].answer(look._subject(trainer.model), task[0].problems())]
    due = weighted_mean([one.score for one in answers], [one.weight for one in answers])
    assert (found["score"], found["standard_error"]) == pytest.approx(due, rel=1e-4)
    assert due[0] > 0


def test_a_model_that_is_not_finite_is_told_and_does_not_end_the_run(data, tmp_path, task):
    trainer = make(data, tmp_path / "run", LOOK)
    said = []
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(math.nan)
    figures, stopped = evaluate(trainer.evaluators, ["next"], trainer.model, say=said.append)
    assert math.isnan(figures["next/score"])
    assert "next/standard_error" not in figures
    assert stopped == []
    assert said == ["next/score: NaN, as the model's outputs are not finite"]


def test_it_is_given_up_when_the_run_is_asked_to_stop(data, tmp_path, task):
    trainer = make(data, tmp_path / "run", LOOK)
    [(_, look)] = trainer.evaluators.values()
    calls = []

    def stop(share=None):
        calls.append(1)
        return len(calls) == 2

    assert look(trainer.model, stop) == {}
    assert len(task[0].asked) == 64


def test_a_single_problem_has_no_standard_error(data, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "penstock.learn.training.evaluators.make_task", lambda settings: NextWord(settings, 1)
    )
    trainer = make(data, tmp_path / "run", LOOK)
    [(_, look)] = trainer.evaluators.values()
    assert [*look(trainer.model)] == ["score"]


def test_no_problems_are_told_before_training(data, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "penstock.learn.training.evaluators.make_task", lambda settings: NextWord(settings, 0)
    )
    with pytest.raises(ConfigError, match=r"evaluator.*'next'.*problems"):
        make(data, tmp_path / "run", LOOK)


@pytest.mark.parametrize(
    ("look", "message"),
    [
        ("{a: {kind: task}}", "kind task and the key task"),
        ("{a: {data: x, task: {name: mmlu}}}", "kind task and the key task"),
        ("{a: {kind: task, task: {name: mmlu, limt: 3}}}", "did you mean 'limit'"),
        ("{a: {kind: task, task: {name: nothing}}}", "no task 'nothing'"),
        (
            "{a: {kind: task, task: {name: mmlu, chat: true}}}",
            "evaluator 'a': no source is of chats",
        ),
    ],
)
def test_what_cannot_be_given_is_refused_before_training(data, tmp_path, look, message):
    with pytest.raises(ConfigError, match=message):
        make(data, tmp_path / "run", f"training.evaluators={look}")
    assert not (tmp_path / "run").exists()


def test_a_first_source_without_tokenizer_is_refused(data, tmp_path):
    trainer = make(data, tmp_path / "run")
    settings = EvaluatorSettings(kind="task", task=TaskSettings(name="mmlu"))
    with pytest.raises(ConfigError, match="stores no tokenizer"):
        make_evaluators(
            {"a": settings},
            [SimpleNamespace(tokenizer=None, loaded_tokenizer=None)],
            64,
            trainer.model,
            Ranks(torch.device("cpu")),
        )


SCRIPT = """
    import json, os, sys
    from pathlib import Path
    import torch
    from penstock.learn.training import evaluators as task_scores
    from penstock.learn.training.distributed import Ranks
    from test_evaluating_tasks import LOOK, NextWord
    from training_makers import make

    asked = {}
    with Ranks(torch.device("cpu")) as ranks:
        for name, assignments in (("copied", []), ("sharded", ["training.shard=true"])):
            task_scores.make_task = lambda settings: asked.setdefault(name, NextWord(settings))
            trainer = make(Path(sys.argv[1]), Path(sys.argv[2]) / name, LOOK, *assignments, ranks=ranks)
            [(_, look)] = trainer.evaluators.values()
            trainer.model.eval()
            stops = []
            def stop(share=None):
                stops.append(1)
                return ranks.agree(False)
            print(json.dumps([name, look(trainer.model, stop), sorted(asked[name].asked), len(stops)]), flush=True)
    # Gloo's threads may still hold tensors, and abort an interpreter that ends (pytorch/pytorch#179291).
    os._exit(0)
"""  # noqa: E501


@pytest.mark.slow
def test_ranks_share_the_problems(data, tmp_path, task):
    """And have the figures of one; a sharded model answers all on each."""
    trainer = make(data, tmp_path / "one", LOOK)
    [(_, look)] = trainer.evaluators.values()
    due = look(trainer.model)
    ended = on_two_processes(tmp_path / "script.py", SCRIPT, data, tmp_path)
    (copied, sharded), others = (
        [json.loads(line) for line in out.splitlines()[-2:]] for out, _ in ended
    )
    assert copied[:2] == others[0][:2]
    assert sharded == others[1]
    for found in (copied, sharded):
        assert found[1] == pytest.approx(due, rel=1e-5)
    names = sorted(problem.name for problem in task[0].problems())
    assert sorted(copied[2] + others[0][2]) == names
    assert sharded[2] == names
    assert copied[3] == others[0][3] == 2


def test_questions_of_mmlu_are_a_figure(data, tmp_path):
    """From files to metrics."""
    for split in ("dev", "test"):
        rows = [f"{WORDS[n % 15]} sees,{n},b,c,d,{'ABCD'[n % 4]}\n" for n in range(6)]
        (tmp_path / "mmlu" / split).mkdir(parents=True)
        (tmp_path / "mmlu" / split / f"words_{split}.csv").write_text("".join(rows))
    task = f"{{name: mmlu, data: {tmp_path / 'mmlu'}, shots: 1, limit: 5}}"
    looks = f"training.evaluators={{mmlu: {{kind: task, task: {task}, every: 4}}}}"
    records = train(data, tmp_path / "run", looks, "training.steps=4")
    found = records[-1]["mmlu/score"]
    assert found * 5 == pytest.approx(round(found * 5))
    assert records[-1]["mmlu/seconds"] > 0
