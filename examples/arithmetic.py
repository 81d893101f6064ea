"""A small model learns to add, first from examples and then from rewards: `python
examples/arithmetic.py`.

The closed loop of reinforcement learning with a reward that can be computed: the model answers each
problem eight times, an answer that is right is worth 1, and the policy gradient of GRPO makes right
answers more likely. Sampling and training take turns: round i samples with the weights of round i −
1, trains on what it sampled, and is a run folder of its own. Each folder is complete or is made
again, so the script may be killed at any moment, and goes on where it was.

A warm start on a few hundred examples teaches the format, and some problems. The rest is learned
from rewards alone.
"""

import argparse
import json
import shutil
import time
from pathlib import Path
from random import Random

import penstock as ps

LARGEST = 20
"""Numbers to add are below it."""
MODEL = {"layers": 4, "width": 128, "heads": 4}
WARM_STEPS, WARM_EXAMPLES = 150, 160
ROUNDS, SAMPLES = 60, 8
HELD_OUT = 80
"""Problems that are never trained."""
SHOWN = 5
"""Rounds from one printed line to the next."""


def main() -> None:
    """Run the loop from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("arithmetic"), help="folder of everything that is made"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="rounds of sampling and training"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    arguments = parser.parse_args()
    folder: Path = arguments.output
    folder.mkdir(exist_ok=True)
    problems = [(a, b) for a in range(LARGEST) for b in range(LARGEST)]
    Random(0).shuffle(problems)
    run = warm_start(folder, problems[:WARM_EXAMPLES], arguments.threads)
    held_out = problems[-HELD_OUT:]
    print(
        f"after the examples: {accuracy(run, held_out):.0%} of {len(held_out)} problems are right"
    )
    began = time.monotonic()
    for number in range(1, arguments.rounds + 1):
        run, mean = learn(
            folder / f"round-{number:02}", run, problems[:-HELD_OUT], number, arguments.threads
        )
        if number % SHOWN == 0 or number == 1:
            print(
                f"round {number:2}: mean reward {mean:.2f}, after {time.monotonic() - began:.0f} s",
                flush=True,
            )
    print(
        f"after {arguments.rounds} rounds: {accuracy(run, held_out):.0%} of problems that it "
        "never saw are right"
    )


def question(problem: tuple[int, int]) -> str:
    """A problem as text."""
    return f"{problem[0]}+{problem[1]}="


def reward(record: dict[str, object], answer: str) -> float:
    """1 if the answer is right, else 0."""
    return float(answer.strip() == str(record["sum"]))


def warm_start(folder: Path, problems: list[tuple[int, int]], threads: int) -> ps.Run:
    """Learn the format from examples: a tokenizer of digits, a dataset, a run."""
    if (folder / "warm" / "done").exists():
        return ps.open_run(folder / "warm" / "run")
    shutil.rmtree(folder / "warm", ignore_errors=True)
    (folder / "warm").mkdir()
    texts = [f"{question((a, b))}{a + b}" for a, b in problems]
    source = folder / "warm" / "examples.jsonl"
    source.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
    )
    # Bytes alone are the vocabulary: each digit is a token.
    ps.train_tokenizer(texts, vocab_size=260, output=folder / "warm" / "tokenizer")
    tokenizer = ps.load_tokenizer(folder / "warm" / "tokenizer")
    ps.prepare(
        str(source),
        tokenizer=tokenizer,
        output=folder / "warm" / "data",
        add_eos="yes",
        progress=False,
    )
    run = ps.train(
        ps.build_model(vocab_size=tokenizer.vocab_size, **MODEL),
        ps.Loader(folder / "warm" / "data", sequence_length=256, rows_per_step=8),
        output=folder / "warm" / "run",
        steps=WARM_STEPS,
        learning_rate=2e-3,
        threads=threads,
        progress=False,
    )
    (folder / "warm" / "done").touch()
    return run


def learn(
    folder: Path, run: ps.Run, problems: list[tuple[int, int]], number: int, threads: int
) -> tuple[ps.Run, float]:
    """One round: sample answers with a run, train on them; a finished round is only opened."""
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        asked = [{"prompt": question(problem), "sum": sum(problem)} for problem in problems]
        found = run.rollouts(
            asked,
            reward,
            output=folder / "data",
            samples=SAMPLES,
            max_tokens=4,
            seed=number,
            threads=threads,
            progress=False,
        )
        ps.train(
            str(run.path),
            ps.Loader(
                ps.Source(folder / "data", max_epochs=1),
                sequence_length=512,
                rows_per_step=2,
                seed=number,
            ),
            output=folder / "run",
            policy={"clip_high": 0.28, "normalise": "token"},
            learning_rate=4e-5,
            warmup_steps=1,
            schedule="constant",
            weight_decay=0.0,
            threads=threads,
            progress=False,
        )
        (folder / "reward").write_text(str(found.mean_reward))
        (folder / "done").touch()
    return ps.open_run(folder / "run"), float((folder / "reward").read_text())


def accuracy(run: ps.Run, problems: list[tuple[int, int]]) -> float:
    """Share of problems whose most likely answer is right."""
    answers = run.generate([question(problem) for problem in problems], temperature=0, max_tokens=4)
    right = [
        answer.strip() == str(sum(problem))
        for answer, problem in zip(answers, problems, strict=True)
    ]
    return sum(right) / len(problems)


if __name__ == "__main__":
    main()
