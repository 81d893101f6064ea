"""GSM8K: word problems of primary school, solved in words; the last number counts.

Plain prompts are `Question: …` and `Answer: …`, a line each, with solved problems from the beginning of the train split
before it, whose answers end in `#### n`; 8 by default, as Wei et al. have, but with the data's own solutions. A reply
ends before the next `Question:`. Where the prompt leaves too little room the last solved problems are left out, and
that is counted. Through a chat template each problem is a user's message and each solution the assistant's.

Source: Cobbe et al. 2021, arXiv:2110.14168; Wei et al. 2022, arXiv:2201.11903.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

from penstock.errors import ConfigError, RecordError
from penstock.evaluation.numbers import final_number
from penstock.evaluation.records import Origin, read_records
from penstock.evaluation.replies import write_replies
from penstock.evaluation.settings import TaskSettings
from penstock.evaluation.subject import Subject
from penstock.evaluation.task import Answer, Problem, fingerprint_of

SHOTS = 8
HUB = "openai/gsm8k"
STOPS = ("Question:",)
REQUEST = "\n\nSolve it step by step, and end with #### and the number."
"""After the problem in a chat."""

Record = dict[str, Any]


@final
class Gsm8k:
    """See the module; `data` is a folder with `test` and `train`, each `.jsonl`, `.jsonl.gz` or `.parquet`."""

    notes = ()

    def __init__(self, settings: TaskSettings) -> None:
        self.settings = settings
        count = SHOTS if settings.shots is None else settings.shots
        self._test = _read(settings.data, "test")
        self._shots = _read(settings.data, "train")[:count] if count else []
        if len(self._shots) < count:
            raise ConfigError(
                f"task gsm8k: the train split has {len(self._shots)} problems, and {count} solved ones are asked for; "
                "give fewer --shots"
            )

    def problems(self) -> Sequence[Problem]:
        """The test split."""
        return [Problem(name=str(number), content=one) for number, one in enumerate(self._test[: self.settings.limit])]

    def fingerprint(self) -> str:
        """Of the test split and the solved problems."""
        return fingerprint_of(self._test, self._shots)

    def answer(self, subject: Subject, problems: Sequence[Problem]) -> Iterator[Answer]:
        """The share of each problem's replies whose number is right."""
        prompts = [self._prompt(subject, problem.content["question"]) for problem in problems]
        stop = () if self.settings.chat else STOPS
        replies = write_replies(
            subject, [problem.name for problem in problems], [ids for ids, _ in prompts], self.settings, stop=stop
        )
        for problem, (_, cut), written in zip(problems, prompts, replies, strict=True):
            right = final_number(problem.content["answer"])
            found = [final_number(one.text) for one in written]
            passed = sum(number is not None and number == right for number in found)
            detail = {
                "replies": [one.text for one in written],
                "found": [None if number is None else str(number) for number in found],
                "right": str(right),
                "cut": cut,
            }
            yield Answer(problem=problem.name, score=passed / len(written), detail=detail)

    def figures(self, answers: Sequence[Answer]) -> dict[str, tuple[float, float]]:
        """None."""
        return {}

    def _prompt(self, subject: Subject, question: str) -> tuple[list[int], bool]:
        """Ids with as many solved problems as fit, and whether some did not."""
        room = subject.room(self.settings.max_tokens)
        for count in range(len(self._shots), -1, -1):
            shots = self._shots[:count]
            if self.settings.chat:
                ids = subject.chat_ids(_messages(shots, question))
            else:
                ids = subject.prompt_ids(prompt(shots, question))
            if len(ids) <= room:
                break
        return ids, count < len(self._shots) or len(ids) > room


def prompt(shots: Sequence[Record], question: str) -> str:
    """The plain prompt."""
    solved = "".join(f"Question: {one['question']}\nAnswer: {one['answer']}\n\n" for one in shots)
    return f"{solved}Question: {question}\nAnswer:"


def _messages(shots: Sequence[Record], question: str) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    for one in shots:
        messages.append({"role": "user", "content": one["question"] + REQUEST})
        messages.append({"role": "assistant", "content": one["answer"]})
    return [*messages, {"role": "user", "content": question + REQUEST}]


def _read(data: str | None, split: str) -> list[Record]:
    if data is not None and Path(data).is_file():
        raise ConfigError(f"task gsm8k: {data} is a file; give the folder with both splits, test and train")
    origin = Origin(files=(split,), hub=HUB, configuration="main", splits=(split,))
    records, where = read_records(data, origin, "gsm8k")
    return [_checked(record, f"{where}: record {number}") for number, record in enumerate(records, 1)]


def _checked(row: Record, where: str) -> Record:
    """A problem whose solution has a number."""
    if not all(isinstance(row.get(name), str) for name in ("question", "answer")):
        raise RecordError(f"{where}: has no texts question and answer; is it the file of GSM8K?")
    if final_number(row["answer"]) is None:
        raise RecordError(f"{where}: the answer has no number; due is a line #### n at its end")
    return {"question": row["question"], "answer": row["answer"]}
