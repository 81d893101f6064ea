"""Code tasks: HumanEval, HumanEval+, MBPP and MBPP+, with pass@k.

pass@k is the probability that at least one of k samples passes, estimated from n samples of which c
passed. The estimate is unbiased; 1 − (1 − c/n)^k is not. A problem's score is the share of its
samples that pass, which is its pass@1; the figures have pass@k for other k. The model writes all
samples of some problems, then the sandbox tests several of them at once.

Source: Chen et al. 2021, arXiv:2107.03374, section 2.1.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject
from penstock.learn.evaluation.code_datasets import (
    EXAMPLES,
    humaneval_problem,
    mbpp_plus_problem,
    mbpp_problems_at,
)
from penstock.learn.evaluation.code_problems import CodeProblem
from penstock.learn.evaluation.recognition import converted
from penstock.learn.evaluation.records import Origin, Placed, read_placed
from penstock.learn.evaluation.results import weighted_mean
from penstock.learn.evaluation.sandbox import Limits, Outcome, Sandbox
from penstock.learn.evaluation.tasks import (
    Answer,
    Problem,
    TaskSettings,
    fingerprint_of,
    write_replies,
)

if TYPE_CHECKING:
    from penstock.learn.evaluation.subject import Subject


_KS = (10, 100)
_SAMPLES_AT_ONCE = 64
"""Samples that are written before they are tested."""
_DETAIL_CHARACTERS = 300

_Read = Callable[[list[Placed], TaskSettings, str], list[CodeProblem]]
_PLUS = Limits(wall_seconds=240.0, cpu_seconds=120, memory_bytes=4 << 30)
"""Some references need a minute and gigabytes, and an answer of a hundred million items takes 20 s
to reach the tests. Each input has its own limit, see `differential`.
"""


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """1 − C(n − c, k) / C(n, k): the share of sets of k samples in which at least one passed; exact
    integers.

    Args:
        num_samples: n, the samples of one problem.
        num_passed: c, those that passed.
        k: Size of the sets, at most n.

    Raises:
        ConfigError: A number is out of range.
    """
    if not 0 <= num_passed <= num_samples:
        raise ConfigError(f"pass@k: num_passed must be 0 to {num_samples}, got {num_passed}")
    if not 1 <= k <= num_samples:
        raise ConfigError(
            f"pass@{k} needs at least {k} samples of each problem, got {num_samples}; raise "
            "`samples`"
        )
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Benchmark:
    origin: Origin
    read: _Read
    limits: Limits = Limits()  # noqa: RUF009 (frozen)


def _each(make: Callable[[JsonObject, str], CodeProblem]) -> _Read:
    return lambda records, settings, _: [
        converted(make, record, place, settings.name) for place, record in records
    ]


def _mbpp(records: list[Placed], settings: TaskSettings, where: str) -> list[CodeProblem]:
    return mbpp_problems_at(
        records, len(EXAMPLES) if settings.shots is None else settings.shots, where
    )


_BENCHMARKS = {
    "humaneval": _Benchmark(
        origin=Origin(
            files=("HumanEval", "openai_humaneval", "test"),
            hub="openai/openai_humaneval",
            configuration="openai_humaneval",
        ),
        read=_each(humaneval_problem),
    ),
    "humaneval_plus": _Benchmark(
        origin=Origin(
            files=("HumanEvalPlus", "humaneval_plus", "test"),
            hub="evalplus/humanevalplus",
            configuration="default",
        ),
        read=_each(humaneval_problem),
        limits=_PLUS,
    ),
    "mbpp": _Benchmark(
        origin=Origin(
            files=("mbpp",),
            hub="google-research-datasets/mbpp",
            splits=("train", "test", "validation", "prompt"),
            configuration="full",
        ),
        read=_mbpp,
    ),
    "mbpp_plus": _Benchmark(
        origin=Origin(
            files=("MbppPlus", "mbpp_plus", "test"),
            hub="evalplus/mbppplus",
            configuration="default",
        ),
        read=_each(mbpp_plus_problem),
        limits=_PLUS,
    ),
}


@final
class CodeTask:
    """One of the code benchmarks.

    Args:
        settings: `data` is the benchmark's file or a folder with it; `shots`, 0 to 3, is only for
            MBPP.
        workers: Number of programs that run at once; None: one per core.

    Attributes:
        sandbox: Where its programs run.

    Raises:
        ConfigError: There is no data, or no sandbox works here and `unsafe` is not set.
        RecordError: The data do not belong to this benchmark.
    """

    notes = ()

    def __init__(self, settings: TaskSettings, *, workers: int | None = None) -> None:
        benchmark = _BENCHMARKS[settings.name]
        self.settings, self._workers = settings, workers
        self.sandbox = Sandbox(benchmark.limits, unsafe=settings.unsafe)
        records, where = read_placed(settings.data, benchmark.origin, settings.name)
        self._all = benchmark.read(records, settings, where)

    def problems(self) -> Sequence[Problem]:
        """All problems, or the first ones, in the order of the file."""
        return [
            Problem(name=problem.name, content=problem)
            for problem in self._all[: self.settings.limit]
        ]

    def fingerprint(self) -> str:
        """Fingerprint of the prompts, the code that they continue, and the tests."""
        return fingerprint_of(
            *((one.name, one.prompt, one.request, one.given, one.tests) for one in self._all)
        )

    def answer(self, subject: "Subject", problems: Sequence[Problem]) -> Iterator[Answer]:
        """Write samples for each problem and test them; the score is the share that passes."""
        batch = max(_SAMPLES_AT_ONCE // self.settings.samples, 1)
        for start in range(0, len(problems), batch):
            yield from self._answer(subject, problems[start : start + batch])

    def figures(self, answers: Sequence[Answer]) -> dict[str, tuple[float, float]]:
        """pass@k for the usual k up to the number of samples."""
        samples = self.settings.samples
        passed = [round(answer.score * samples) for answer in answers]
        ks = sorted({k for k in (*_KS, samples) if 1 < k <= samples})
        return {
            f"pass@{k}": weighted_mean([pass_at_k(samples, count, k) for count in passed])
            for k in ks
        }

    def _answer(self, subject: "Subject", problems: Sequence[Problem]) -> Iterator[Answer]:
        prompts = [self._prompt_ids(subject, problem.content) for problem in problems]
        names = [problem.name for problem in problems]
        stops = () if self.settings.chat else problems[0].content.stops
        written = write_replies(subject, names, prompts, self.settings, stop=stops)
        texts = [[reply.text for reply in replies] for replies in written]
        tried = [
            (problem.content, text)
            for problem, own in zip(problems, texts, strict=True)
            for text in own
        ]
        codes = [_code(content, text, self.settings.chat) for content, text in tried]
        tests = [content.tests for content, _ in tried]
        outcomes = iter(list(self.sandbox.run_all(tests, codes, workers=self._workers)))
        room = subject.room(self.settings.reply_tokens)
        for problem, prompt, own in zip(problems, prompts, texts, strict=True):
            yield _answer(problem, own, [next(outcomes) for _ in own], cut=len(prompt) > room)

    def _prompt_ids(self, subject: "Subject", problem: CodeProblem) -> list[int]:
        if self.settings.chat:
            return subject.chat_ids([{"role": "user", "content": problem.request}])
        return subject.prompt_ids(problem.prompt)


def _code(problem: CodeProblem, text: str, chat: bool) -> str:
    return problem.of_reply(text) if chat else problem.of_completion(text)


def _answer(
    problem: Problem, texts: Sequence[str], outcomes: Sequence[Outcome], *, cut: bool
) -> Answer:
    samples = [
        {"text": text, "verdict": outcome.verdict, "why": outcome.detail[:_DETAIL_CHARACTERS]}
        for text, outcome in zip(texts, outcomes, strict=True)
    ]
    passed = sum(outcome.passed for outcome in outcomes)
    return Answer(
        problem=problem.name, score=passed / len(outcomes), detail={"samples": samples, "cut": cut}
    )
