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
    after_thoughts,
    fingerprint_of,
    write_replies,
)

SHOTS = 8
HUB = "openai/gsm8k"
STOPS = ("Question:",)
REQUEST = "\n\nSolve it step by step, and end with #### and the number."
"""Follows the problem in a chat."""
MARK = "####"

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))"
"""With or without commas, decimals; not the dot at the end of a sentence."""
_NUMBER = re.compile(
    r"(?:(?<==)[ \t]*[-−][ \t]*|(?<![\w)])[-−])?[$€£]?(?:(?<=[$€£])[-−])?" + _DIGITS
)
"""Sign, currency and digits. A space after a minus is only read after `=`; elsewhere it is a dash,
or begins an item of a list.
"""
_BETWEEN = r"[*$€£\\ \t]*"
_MARKED = re.compile(rf"{MARK}\s*{_BETWEEN}[-−]?{_BETWEEN}{_DIGITS}")
"""The mark, and at once its number; bold, currencies and LaTeX's backslash may be between."""

Record = dict[str, Any]


def final_number(text: str, *, chat: bool = False) -> Decimal | None:
    """The number that follows `####` at once; else the last number of the text.

    Signs, currencies, commas between thousands and decimals are read; units and percent signs are
    ignored, so 5% is 5.

    Args:
        text: A solution.
        chat: It is a chat's reply: what the model thought is left out, and of several `####` the
            last one counts, as a reply ends with its answer. Else the first one counts, as in
            lm-eval: a continuation may go on with problems of its own.
    """
    if chat:
        text = after_thoughts(text)
    found = _numbers(_MARKED, text)
    if found:
        return found[-1 if chat else 0]
    found = _numbers(_NUMBER, text)
    return found[-1] if found else None


def _numbers(pattern: re.Pattern[str], text: str) -> list[Decimal]:
    return [
        Decimal(re.sub(r"[^-\d.]", "", match.group().replace("−", "-")))
        for match in pattern.finditer(text)
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
            found = [final_number(one.text, chat=self.settings.chat) for one in written]
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
        room = subject.room(self.settings.reply_tokens)
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
