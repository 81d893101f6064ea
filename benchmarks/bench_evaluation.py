"""Code evaluations: canonical solutions through the sandbox, and what the sandbox adds to a
program's own time.

Every canonical solution of HumanEval, MBPP and MBPP+ runs with its tests in the sandbox as
`penstock eval` runs them; all must pass. A program's own time is that of the same text given to a
plain `python -I` as a file, with no limits. Both run in turn, one at a time, so that a busy machine
slows them alike; the figure is the median over HumanEval's programs of the difference, each
program's the median of its repeats. Programs a second are with all workers.

MMLU with five solved questions: CPU time of scoring 128 questions with a model of 12 million
parameters, with common beginnings computed once and again for each question, in turn; scores must
be equal up to rounding. Tokens are made in that time, too.

    python benchmarks/bench_evaluation.py --data FOLDER [--every N] [--workers N]

`--data`: a folder with mmlu/ (as unpacked), HumanEval.jsonl.gz, mbpp.jsonl and
MbppPlus-v0.1.0.jsonl.gz; `--every`: of MBPP and MBPP+ only every N-th program, because some of
their references take half a minute.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from common import arguments, cpu_seconds, standard_library, table, take_turns
from penstock import train_tokenizer
from penstock.learn.evaluation import subject
from penstock.learn.evaluation.code import CodeTask
from penstock.learn.evaluation.mmlu import Mmlu
from penstock.learn.evaluation.sandbox import Sandbox
from penstock.learn.evaluation.tasks import TaskSettings
from penstock.models import ModelSettings
from penstock.models.building import build_model


def own_seconds(program: str, folder: Path) -> float:
    path = folder / "program.py"
    path.write_text(program)
    begun = time.perf_counter()
    subprocess.run(
        [sys.executable, "-I", str(path)], check=True, capture_output=True, stdin=subprocess.DEVNULL
    )
    return time.perf_counter() - begun


def enclosed_seconds(sandbox: Sandbox, program: str) -> float:
    begun = time.perf_counter()
    outcome = sandbox.run(program)
    assert outcome.passed, outcome
    return time.perf_counter() - begun


def overheads(
    sandbox: Sandbox, programs: Sequence[str], repeats: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each program alone, in the sandbox, and what the sandbox adds."""
    alone, enclosed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for program in programs:
            pairs = [
                (own_seconds(program, Path(folder)), enclosed_seconds(sandbox, program))
                for _ in range(repeats)
            ]
            alone.append(statistics.median(own for own, _ in pairs))
            enclosed.append(statistics.median(inside for _, inside in pairs))
    return alone, enclosed, [inside - own for own, inside in zip(alone, enclosed, strict=True)]


def milliseconds(seconds: Sequence[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f} ms"


def mmlu_lines(folder: Path, repeats: int) -> list[tuple[str, str, str]]:
    """Scoring with and without shared beginnings."""
    import torch

    torch.set_num_threads(1)
    task = Mmlu(TaskSettings(name="mmlu", data=str(folder), limit=64))
    problems = task.problems()[:128]
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = train_tokenizer(
            standard_library(2_000_000),
            vocab_size=4096,
            output=f"{scratch}/tokenizer",
            progress=False,
        )
    settings = ModelSettings(layers=6, width=384, heads=6, mlp_width=1024)
    model = build_model(settings, vocab_size=4096).eval()
    shares, found = subject._may_share, {}

    def score(name: str, rule: Callable[..., bool]) -> None:
        subject._may_share = rule
        one = subject.Subject(model, tokenizer, context_length=2048)
        answers = [
            answer for begin in (0, 64) for answer in task.answer(one, problems[begin : begin + 64])
        ]
        found[name] = [value for answer in answers for value in answer.detail["log_probabilities"]]

    rules = {"once": shares, "again": lambda model, row_tokens: False}
    seconds = take_turns(
        {name: partial(cpu_seconds, partial(score, name, rule)) for name, rule in rules.items()},
        repeats,
    )
    assert max(abs(one - other) for one, other in zip(*found.values(), strict=True)) < 1e-4
    note = f"{seconds['once']:.1f} against {seconds['again']:.1f} s for 128 questions; goal: 3"
    return [
        (
            "MMLU 5-shot, beginnings once / again",
            f"{seconds['again'] / seconds['once']:.1f} ×",
            note,
        )
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--workers", type=int)
    given = parser.parse_args()
    rows = mmlu_lines(Path(given.data) / "mmlu", min(given.repeats, 3))
    for name in ("humaneval", "mbpp", "mbpp_plus"):
        task = CodeTask(TaskSettings(name=name, data=given.data), workers=given.workers)
        problems = [problem.content for problem in task.problems()][
            :: 1 if name == "humaneval" else given.every
        ]
        programs = [problem.of_canonical() for problem in problems]
        begun = time.perf_counter()
        outcomes = list(task.sandbox.run_all(programs, workers=given.workers))
        seconds = time.perf_counter() - begun
        verdicts = Counter(outcome.verdict for outcome in outcomes)
        rate = f"{len(programs) / seconds:.1f} programs/s"
        rows.append(
            (f"{name}: canonical solutions pass", f"{verdicts['passed']} of {len(programs)}", rate)
        )
        for problem, outcome in zip(problems, outcomes, strict=True):
            if not outcome.passed:
                rows.append((f"  {problem.name}", outcome.verdict, outcome.detail[:80]))
        if name == "humaneval":
            alone, enclosed, added = overheads(task.sandbox, programs, given.repeats)
    rows.append(("HumanEval: a program alone, python -I", milliseconds(alone), ""))
    rows.append(("HumanEval: in the sandbox", milliseconds(enclosed), ""))
    rows.append(
        (
            "HumanEval: the sandbox adds",
            milliseconds(added),
            f"at most {1000 * max(added):.1f} ms; due: 60",
        )
    )
    table("Code evaluations", rows)


if __name__ == "__main__":
    main()
