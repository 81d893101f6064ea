"""`examples/calculator.py` with sizes of a few seconds: it imitates, samples, trains, judges, and
its environment is right about calls and answers.
"""

import importlib.util
import json
from pathlib import Path

import pytest

import penstock as ps

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator.py"
TINY = {"chats": 30, "steps": 2, "rate": 1e-3, "asked": 2, "policy_rate": 1e-4, "held": 3}


@pytest.fixture(scope="module")
def calculator():
    spec = importlib.util.spec_from_file_location("calculator", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.LAYERS = {"layers": 1, "width": 32, "heads": 2}
    return module


@pytest.fixture(scope="module")
def learned(calculator, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calculator")
    return folder, calculator.learn(folder, TINY, model=None, rounds=1)


def test_a_round_samples_trains_and_judges(calculator, learned):
    folder, shares = learned
    assert len(shares) == 2
    assert all(0 <= share <= 1 for share in shares)
    assert len(ps.open_dataset(folder / "round-1" / "data")) == TINY["asked"]
    assert len(ps.open_run(folder / "round-1" / "run").metrics) >= 1
    judged = [
        (folder / "held-out" / f"{number}.jsonl").read_text(encoding="utf-8") for number in range(2)
    ]
    held_out = {one["prompt"] for one in calculator.problems()[: TINY["held"]]}
    tokenizer = ps.load_tokenizer(folder / "chats" / "tokenizer")
    lines = (folder / "round-1" / "data.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    for prompt in (json.loads(line)["steps"][0]["prompt_ids"] for line in lines):
        asked = tokenizer.decode(prompt).split("user\n")[1]
        assert "?" in asked or "Multiply" in asked
        assert not any(one in asked for one in held_out)
    assert all(len(text.splitlines()) == 1 + 2 * TINY["held"] for text in judged)


def test_it_begins_with_a_folder_of_transformers(calculator, learned, tmp_path):
    ps.open_run(learned[0] / "chats" / "run").export(tmp_path / "base")
    sizes = {**TINY, "chats": 8, "steps": 1}
    shares = calculator.learn(tmp_path / "out", sizes, model=str(tmp_path / "base"), rounds=0)
    assert len(shares) == 1


def test_the_calculator_answers_calls_and_judges_answers(calculator):
    problem = next(one for one in calculator.problems() if one["expression"] == "7*8+5")

    def said(content, *expressions):
        calls = [
            {"function": {"name": "calculate", "arguments": json.dumps({"expression": one})}}
            for one in expressions
        ]
        return {"role": "assistant", "content": content, "tool_calls": calls}

    def answers(reply, last=False):
        return calculator.environment([], reply, problem, last)

    assert answers(said("", "7*8+5")) == [{"role": "tool", "content": "61"}]
    assert answers(said("", "9*9-9", "7*")) == [
        {"role": "tool", "content": "72"},
        {"role": "tool", "content": "error"},
    ]
    assert answers({"role": "assistant", "content": "7*8+5=61"}) == 1
    assert answers({"role": "assistant", "content": "7*8+5=51"}) == 0
    # The last reply is judged, whatever it says.
    assert answers(said("", "7*8+5"), last=True) == 0


def test_chats_are_right_and_only_the_assistant_is_trained(calculator, learned):
    problem = calculator.problems()[-1]
    tokenizer = ps.load_tokenizer(learned[0] / "chats" / "tokenizer")
    for calling, replies in ((False, 1), (True, 2)):
        encoded = ps.chat.encode(
            calculator.chat(problem, calling=calling),
            tokenizer=tokenizer,
            template=calculator.TEMPLATE,
        )
        assert encoded.certificate.ok
        assert len(encoded.trained_text) == replies
        assert encoded.trained_text[-1][1].startswith(calculator.answer(problem))
