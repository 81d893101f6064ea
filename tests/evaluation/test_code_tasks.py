"""The tasks whose answers are code, from the model's text to the score."""

import json
from pathlib import Path

import pytest
from evaluation_makers import Writer
from sandbox_makers import sandbox_or_skip

from makers.texts import write_json_lines
from penstock.core.errors import ConfigError
from penstock.learn.evaluation.code import CodeTask
from penstock.learn.evaluation.results import run_task
from penstock.learn.evaluation.sandbox import sandbox as sandbox_module
from penstock.learn.evaluation.tasks import TaskSettings, make_task

RIGHT, WRONG = "    return x + 1\n", "    return x - 1\n"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    sandbox_or_skip(packages=("numpy",))
    record = {
        "prompt": "def next_one(x):\n",
        "entry_point": "next_one",
        "canonical_solution": RIGHT,
        "test": "def check(candidate):\n    assert candidate(1) == 2\n",
    }
    records = ({"task_id": f"HumanEval/{number}", **record} for number in range(3))
    return str(write_json_lines(tmp_path / "HumanEval.jsonl", records).parent)


def test_completions_are_scored(folder: str) -> None:
    writer = Writer([RIGHT, WRONG, RIGHT + "\nprint(1"])
    results = run_task(
        make_task(TaskSettings(name="humaneval", data=folder)), writer.subject, progress=False
    )
    assert (results.name, results.count) == ("humaneval", 3)
    assert results.score == pytest.approx(2 / 3)
    assert results.standard_error == pytest.approx(1 / 3)
    assert writer.prompts == ["def next_one(x):\n"] * 3
    assert {one.stop for one in writer.sampling} == {("\nclass", "\ndef", "\n#", "\nif", "\nprint")}
    assert results.figures == {}


def test_samples_give_pass_at_k(folder: str) -> None:
    writer = Writer([RIGHT, WRONG, WRONG, WRONG] + [WRONG] * 4 + [RIGHT] * 4)
    settings = TaskSettings(name="humaneval", data=folder, samples=4, temperature=0.8)
    results = run_task(CodeTask(settings, workers=2), writer.subject, progress=False)
    assert results.score == pytest.approx((1 / 4 + 0 + 1) / 3)
    assert results.figures["pass@4"][0] == pytest.approx(2 / 3)
    assert len({one.seed for one in writer.sampling}) == 12
    assert {one.temperature for one in writer.sampling} == {0.8}


def test_chats_ask_for_a_fenced_block(folder: str) -> None:
    writer = Writer(["Here:\n```python\ndef next_one(x):\n    return x + 1\n```\nDone."])
    settings = TaskSettings(name="humaneval", data=folder, chat=True)
    task = CodeTask(settings)
    answers = list(task.answer(writer.subject, task.problems()))
    assert [answer.score for answer in answers] == [1, 1, 1]
    (message,) = json.loads(writer.prompts[0])
    assert message["role"] == "user"
    assert "```python\ndef next_one(x):\n```" in message["content"]
    assert {one.stop for one in writer.sampling} == {()}
    assert json.loads(json.dumps(answers[0].detail))["samples"][0]["verdict"] == "passed"


def test_answers_are_kept_and_not_asked_again(folder: str, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    first = Writer([WRONG])
    run_task(
        CodeTask(TaskSettings(name="humaneval", data=folder, limit=2)),
        first.subject,
        answers=answers,
        progress=False,
    )
    second = Writer([RIGHT])
    settings = TaskSettings(name="humaneval", data=folder)
    results = run_task(CodeTask(settings), second.subject, answers=answers, progress=False)
    assert (len(first.prompts), len(second.prompts)) == (2, 1)
    assert results.score == pytest.approx(1 / 3)
    kept = [json.loads(line) for line in answers.read_text().splitlines()]
    assert "AssertionError" in kept[1]["detail"]["samples"][0]["why"]


def test_without_a_sandbox_the_task_refuses_before_the_model_writes(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sandbox_module, "working_enclosure", lambda packages: (None, "it was taken away")
    )
    with pytest.raises(ConfigError, match="none works here: it was taken away"):
        CodeTask(TaskSettings(name="humaneval", data=folder))
    with pytest.warns(UserWarning, match="WITHOUT a sandbox"):
        task = CodeTask(TaskSettings(name="humaneval", data=folder, unsafe=True))
    assert [answer.score for answer in task.answer(Writer([RIGHT]).subject, task.problems())] == [
        1,
        1,
        1,
    ]


def test_another_file_is_another_task(folder: str, tmp_path: Path) -> None:
    before = CodeTask(TaskSettings(name="humaneval", data=folder)).fingerprint()
    assert CodeTask(TaskSettings(name="humaneval", data=folder, limit=1)).fingerprint() == before
    path = tmp_path / "HumanEval.jsonl"
    path.write_text(path.read_text().replace("candidate(1) == 2", "candidate(2) == 3"))
    assert CodeTask(TaskSettings(name="humaneval", data=folder)).fingerprint() != before
