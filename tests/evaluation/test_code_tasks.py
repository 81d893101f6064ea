"""The tasks whose answers are code, from the model's text to the score."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from sandbox_makers import sandbox_or_skip

from penstock.errors import ConfigError
from penstock.evaluation.code import CodeTask
from penstock.evaluation.running import run_task
from penstock.evaluation.sandbox import sandbox as sandbox_module
from penstock.evaluation.settings import TaskSettings
from penstock.evaluation.subject import Subject
from penstock.evaluation.tasks import make_task
from penstock.generation import Generated, Sampling

RIGHT, WRONG = "    return x + 1\n", "    return x - 1\n"


class Writer:
    """A subject that writes texts by turns, and keeps what it was asked."""

    notes = ()

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts, self.prompts, self.sampling = list(texts), [], []

    def prompt_ids(self, text: str) -> list[int]:
        return list(text.encode())

    def chat_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        return list(json.dumps(messages).encode())

    def room(self, max_tokens: int | None) -> int:
        return 400

    def fingerprint(self) -> str:
        return "writer"

    def write(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]) -> list[Generated]:
        self.prompts += [bytes(prompt).decode() for prompt in prompts]
        self.sampling += sampling
        texts = [self.texts[place % len(self.texts)] for place in range(len(prompts))]
        return [Generated(tokens=(), text=text, finish_reason="stop") for text in texts]

    @property
    def subject(self) -> Subject:
        return cast("Subject", self)


@pytest.fixture
def data(tmp_path: Path) -> str:
    sandbox_or_skip(packages=("numpy",))
    record = {
        "prompt": "def next_one(x):\n",
        "entry_point": "next_one",
        "canonical_solution": RIGHT,
        "test": "def check(candidate):\n    assert candidate(1) == 2\n",
    }
    lines = [json.dumps({"task_id": f"HumanEval/{number}", **record}) for number in range(3)]
    (tmp_path / "HumanEval.jsonl").write_text("\n".join(lines))
    return str(tmp_path)


def test_completions_are_scored(data: str) -> None:
    writer = Writer([RIGHT, WRONG, RIGHT + "\nprint(1"])
    results = run_task(make_task(TaskSettings(name="humaneval", data=data)), writer.subject, progress=False)
    assert (results.name, results.count) == ("humaneval", 3)
    assert results.score == pytest.approx(2 / 3)
    assert results.standard_error == pytest.approx(1 / 3)
    assert writer.prompts == ["def next_one(x):\n"] * 3
    assert {one.stop for one in writer.sampling} == {("\nclass", "\ndef", "\n#", "\nif", "\nprint")}
    assert results.figures == {}


def test_samples_give_pass_at_k(data: str) -> None:
    writer = Writer([RIGHT, WRONG, WRONG, WRONG] + [WRONG] * 4 + [RIGHT] * 4)
    settings = TaskSettings(name="humaneval", data=data, samples=4, temperature=0.8)
    results = run_task(CodeTask(settings, workers=2), writer.subject, progress=False)
    assert results.score == pytest.approx((1 / 4 + 0 + 1) / 3)
    assert results.figures["pass@4"][0] == pytest.approx(2 / 3)
    assert len({one.seed for one in writer.sampling}) == 12
    assert {one.temperature for one in writer.sampling} == {0.8}


def test_chats_ask_for_a_fenced_block(data: str) -> None:
    writer = Writer(["Here:\n```python\ndef next_one(x):\n    return x + 1\n```\nDone."])
    settings = TaskSettings(name="humaneval", data=data, chat=True)
    task = CodeTask(settings)
    answers = list(task.answer(writer.subject, task.problems()))
    assert [answer.score for answer in answers] == [1, 1, 1]
    (message,) = json.loads(writer.prompts[0])
    assert message["role"] == "user"
    assert "```python\ndef next_one(x):\n```" in message["content"]
    assert {one.stop for one in writer.sampling} == {()}
    assert json.loads(json.dumps(answers[0].detail))["samples"][0]["verdict"] == "passed"


def test_answers_are_kept_and_not_asked_again(data: str, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    first = Writer([WRONG])
    run_task(
        CodeTask(TaskSettings(name="humaneval", data=data, limit=2)), first.subject, answers=answers, progress=False
    )
    second = Writer([RIGHT])
    settings = TaskSettings(name="humaneval", data=data)
    results = run_task(CodeTask(settings), second.subject, answers=answers, progress=False)
    assert (len(first.prompts), len(second.prompts)) == (2, 1)
    assert results.score == pytest.approx(1 / 3)
    kept = [json.loads(line) for line in answers.read_text().splitlines()]
    assert "AssertionError" in kept[1]["detail"]["samples"][0]["why"]


def test_without_a_sandbox_the_task_refuses_before_the_model_writes(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "working_enclosure", lambda packages: (None, "it was taken away"))
    with pytest.raises(ConfigError, match="none works here: it was taken away"):
        CodeTask(TaskSettings(name="humaneval", data=data))
    with pytest.warns(UserWarning, match="WITHOUT a sandbox"):
        task = CodeTask(TaskSettings(name="humaneval", data=data, unsafe=True))
    assert [answer.score for answer in task.answer(Writer([RIGHT]).subject, task.problems())] == [1, 1, 1]


def test_another_file_is_another_task(data: str, tmp_path: Path) -> None:
    before = CodeTask(TaskSettings(name="humaneval", data=data)).fingerprint()
    assert CodeTask(TaskSettings(name="humaneval", data=data, limit=1)).fingerprint() == before
    path = tmp_path / "HumanEval.jsonl"
    path.write_text(path.read_text().replace("candidate(1) == 2", "candidate(2) == 3"))
    assert CodeTask(TaskSettings(name="humaneval", data=data)).fingerprint() != before
