"""GSM8K: word problems of primary school, solved in words; the final number is scored.

A plain prompt has the lines `Question: …` and `Answer: …`, after solved problems from the beginning
of the train split with answers that end in `#### n`; 8 by default, as in Wei et al., but with the
data's own solutions. A reply ends before the next `Question:`. If the prompt leaves too little
room, the last solved problems are left out, and that is counted. In a chat, each problem is a user
message and each solution an assistant message.

Source: Cobbe et al. 2021, arXiv:2110.14168; Wei et al. 2022, arXiv:2201.11903.
"""

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, final

from penstock.core.errors import ConfigError, RecordError
from penstock.learn.evaluation.recognition import converted, refuse_file
from penstock.learn.evaluation.records import Origin, read_records
from penstock.learn.evaluation.subject import Subject
from penstock.learn.evaluation.tasks import (
    Answer,
    Problem,
    TaskSettings,
    fingerprint_of,
    write_replies,
)

SHOTS = 8
HUB = "openai/gsm8k"
STOPS = ("Question:",)
REQUEST = "\n\nSolve it step by step, and end with #### and the number."
"""Follows the problem in a chat."""
MARK = "####"

_NUMBER = re.compile(
    r"(?:(?<![\w)])[-−]\s?)?[$€£]?(?:(?<=[$€£])[-−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))"
)
"""Sign, currency, digits with or without commas, decimals; not the dot at the end of a sentence."""

Record = dict[str, Any]


def final_number(text: str) -> Decimal | None:
    """The first number after the first `####` with a number on its line; else the last number of
    the text.

    Signs, currencies, commas between thousands and decimals are read; units and percent signs are
    ignored, so 5% is 5.
    """
    for part in text.split(MARK)[1:]:
        found = _numbers(part.lstrip().partition("\n")[0])
        if found:
            return found[0]
    every = _numbers(text)
    return every[-1] if every else None


def _numbers(text: str) -> list[Decimal]:
    return [
        Decimal(re.sub(r"[,$€£\s]", "", match.group()).replace("−", "-"))
        for match in _NUMBER.finditer(text)
        if any(character.isdigit() for character in match.group())
    ]


@final
class Gsm8k:
    """See the module. `data` is a folder with `test` and `train`, each `.jsonl`, `.jsonl.gz` or
    `.parquet`.
    """

    notes = ()

    def __init__(self, settings: TaskSettings) -> None:
        self.settings = settings
        count = SHOTS if settings.shots is None else settings.shots
        self._test = _read(settings.data, "test")
        self._shots = _read(settings.data, "train")[:count] if count else []
        if len(self._shots) < count:
            raise ConfigError(
                f"task gsm8k: the train split has {len(self._shots)} problems, but shots asks "
                f"for {count}; set shots to fewer"
            )

    def problems(self) -> Sequence[Problem]:
        """The test split, or its first problems."""
        return [
            Problem(name=str(number), content=one)
            for number, one in enumerate(self._test[: self.settings.limit])
        ]

    def fingerprint(self) -> str:
        """Fingerprint of the test split and the solved problems."""
        return fingerprint_of(self._test, self._shots)

    def answer(self, subject: Subject, problems: Sequence[Problem]) -> Iterator[Answer]:
        """Write replies to each problem; the score is the share with the right number."""
        prompts = [self._prompt(subject, problem.content["question"]) for problem in problems]
        stop = () if self.settings.chat else STOPS
        replies = write_replies(
            subject,
            [problem.name for problem in problems],
            [ids for ids, _ in prompts],
            self.settings,
            stop=stop,
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
        """Ids of a prompt with as many solved problems as fit, and whether some did not fit."""
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
        refuse_file(data, "gsm8k")
        raise ConfigError(
            f"task gsm8k: {data} is a file; give a folder with both splits, test and train"
        )
    origin = Origin(files=(split,), hub=HUB, configuration="main", splits=(split,))
    records, where = read_records(data, origin, "gsm8k")
    return [
        converted(_checked, record, f"{where}: record {number}", "gsm8k")
        for number, record in enumerate(records, 1)
    ]


def _checked(row: Record, where: str) -> Record:
    """A problem, checked to have a number in its answer."""
    if not all(isinstance(row.get(name), str) for name in ("question", "answer")):
        raise RecordError(
            f"{where}: expected texts question and answer, found {sorted(row)}; give a file "
            "of GSM8K"
        )
    if final_number(row["answer"]) is None:
        raise RecordError(f"{where}: the answer has no number; expected a line #### n at its end")
    return {"question": row["question"], "answer": row["answer"]}
