"""An agent learns to call its tool, from rewards alone: `python examples/calculator.py`.

A small model first imitates chats. In a third of them the assistant calls a calculator; in the
others it answers at once, as somebody does who calculates in the head. The chats are right, but
what this model calculates in its head is not. Then right answers are rewarded, and nothing says how
to get them: each round samples conversations with the calculator, and trains on them. The model
finds out that calling pays.

Right answers to 100 problems that were never trained: 38 % after imitating, 82 % after two rounds,
98 % after eight; 171 seconds of CPU in all. `--model smollm2/` begins with SmolLM2-135M-Instruct,
or another folder of transformers whose tokenizer knows ChatML: 65 % (of 40 problems) after 60
chats, 94 % after one round; 254 seconds.
"""

import argparse
import json
import re
import time
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import penstock as ps

Problem = dict[str, Any]
TEMPLATE = Path(__file__).with_name("calculator.jinja")
QUESTIONS = ("What is {} times {} {} {}?", "Multiply {} by {}, then {} {}.", "{} × {}, {} {}?")
WORDS = {"+": "plus", "-": "minus"}
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "calculate", "parameters": PARAMETERS}}
CALLING = 0.35
"""Share of the chats in which the assistant calls the calculator."""
LAYERS = {"layers": 4, "width": 128, "heads": 4}
NEW = {"chats": 4000, "steps": 500, "rate": 4e-3, "asked": 64, "policy_rate": 2e-4, "held": 100}
KNOWN = {"chats": 60, "steps": 8, "rate": 5e-5, "asked": 16, "policy_rate": 1e-5, "held": 40}
"""Sizes for a new model, and for one that knows its language: chats and steps of imitating,
problems of a round, learning rates, and problems that are held out."""
TRAINING = {"warmup_steps": 1, "schedule": "constant", "weight_decay": 0.0, "progress": False}


def main() -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("calculator"), help="a new folder")
    parser.add_argument("--model", help="folder of a base model; without: a new, small one")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of sampling and training")
    options = parser.parse_args()
    sizes = KNOWN if options.model else NEW
    learn(options.output, sizes, model=options.model, rounds=options.rounds)


def learn(folder: Path, sizes: dict[str, Any], *, model: str | None, rounds: int) -> list[float]:
    """The share of right answers to held-out problems, before the first round and after each."""
    every, shares = problems(), []
    held_out, trained = every[: sizes["held"]], every[sizes["held"] :]
    run = imitate(folder / "chats", trained, sizes, model)
    for number in range(rounds + 1):
        if number:
            asked = Random(number).sample(trained, sizes["asked"])
            run = reinforce(folder / f"round-{number}", run, asked, sizes["policy_rate"])
        found = sample(run, held_out, folder / "held-out" / str(number), samples=2)
        shares.append(found.mean_reward)
        print(
            f"round {number}: {found.mean_reward:.0%} of answers to held-out problems are right, "
            f"{calls(found):.0%} call; {time.process_time():.0f} s of CPU",
            flush=True,
        )
    return shares


def problems() -> list[Problem]:
    """Every problem with a result of two digits, in a fixed and random order."""
    random, found = Random(0), []
    for a, b, sign, c in product(range(2, 10), range(2, 10), "+-", range(1, 10)):
        question = random.choice(QUESTIONS).format(a, b, WORDS[sign], c)
        if value(expression := f"{a}*{b}{sign}{c}") >= 10:
            found.append({"prompt": question, "expression": expression})
    random.shuffle(found)
    return found


def value(expression: str) -> int:
    """What the calculator computes: a*b+c or a*b-c."""
    a, b, c = re.fullmatch(r"(\d)\*(\d)([+-]\d)", expression).groups()
    return int(a) * int(b) + int(c)


def answer(problem: Problem) -> str:
    """The right answer."""
    return f"{problem['expression']}={value(problem['expression'])}"


def environment(messages, reply, record, last):
    """The calculator answers a call; any other reply is the answer, right or wrong."""
    if (called := reply.get("tool_calls")) and not last:
        return [{"role": "tool", "content": calculate(call["function"])} for call in called]
    return float(reply["content"].strip() == answer(record))


def calculate(function: dict[str, Any]) -> str:
    """The result of a call."""
    try:
        return str(value(json.loads(function["arguments"])["expression"]))
    except (AttributeError, KeyError, TypeError):
        return "error"


def chat(problem: Problem, *, calling: bool) -> dict[str, Any]:
    """A conversation to imitate."""
    messages = [{"role": "user", "content": problem["prompt"]}]
    if calling:
        function = {"name": "calculate", "arguments": {"expression": problem["expression"]}}
        call = {"type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": str(value(problem["expression"]))})
    messages.append({"role": "assistant", "content": answer(problem)})
    return {"messages": messages, "tools": [TOOL]}


def imitate(folder: Path, trained: list[Problem], sizes: dict[str, Any], base: str | None):
    """Learn the format, and two habits: to call, and to answer at once."""
    random, data = Random(1), folder / "data"
    chats = [
        chat(random.choice(trained), calling=random.random() < CALLING)
        for _ in range(sizes["chats"])
    ]
    tokenizer = ps.load_tokenizer(base) if base else ps.train_tokenizer(
        [json.dumps(one, ensure_ascii=False) for one in chats], vocab_size=512,
        special_tokens=["<|im_start|>", "<|im_end|>"], output=folder / "tokenizer", progress=False,
    )  # fmt: skip
    ps.prepare(chats, tokenizer=tokenizer, template=TEMPLATE, output=data, progress=False)
    return ps.train(
        f"hf:{base}" if base else ps.build_model(vocab_size=tokenizer.vocab_size, **LAYERS),
        ps.Loader(data, sequence_length=256, rows_per_step=4), output=folder / "run",
        optimizer="adamw" if base else "muon", learning_rate=sizes["rate"], steps=sizes["steps"],
        progress=False,
    )  # fmt: skip


def sample(run: ps.Run, asked: list[Problem], output: Path, *, samples: int):
    """Conversations with the calculator, as a dataset with rewards."""
    return run.rollouts(
        asked, environment=environment, tools=[TOOL], output=output, samples=samples,
        max_tokens=48, max_turns=3, progress=False,
    )  # fmt: skip


def reinforce(folder: Path, run: ps.Run, asked: list[Problem], rate: float) -> ps.Run:
    """One round: sample conversations with a run, and train on them."""
    sample(run, asked, folder / "data", samples=8)
    data = ps.Source(folder / "data", max_epochs=1)
    return ps.train(
        str(run.path), ps.Loader(data, sequence_length=1024, rows_per_step=2),
        policy={"clip_high": 0.28, "normalise": "token"}, learning_rate=rate,
        output=folder / "run", **TRAINING,
    )  # fmt: skip


def calls(found) -> float:
    """Share of the conversations in which the calculator was called."""
    lines = found.dataset.path.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()[1:]
    return sum(len(json.loads(line)["steps"]) > 1 for line in lines) / len(lines)


if __name__ == "__main__":
    main()
