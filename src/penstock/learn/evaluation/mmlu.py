"""MMLU: questions from 57 subjects with four choices each, scored by the log-probability of the
answer's letter.

Plain prompts are those of the published code, byte for byte, with two spaces before the subject and
none after `Answer:`; the letters are scored with a space before them. Solved questions come from
the subject's `dev` file, in its order. If the prompt is too long, the last of them are left out one
by one, and that is counted. Numbers are used as they are in the files, while the published code
lets pandas rewrite columns that are all numbers.

In a chat, each question is a user message, the first one with the line about the subject, and each
letter is an assistant message.

Source: Hendrycks et al. 2021, arXiv:2009.03300, and `evaluate.py` of github.com/hendrycks/test.
"""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from penstock.core.errors import ConfigError, RecordError
from penstock.core.json_values import JsonObject
from penstock.learn.evaluation.recognition import (
    advice,
    converted,
    is_mmlu,
    refuse_file,
    task_of_file,
)
from penstock.learn.evaluation.records import hub_rows
from penstock.learn.evaluation.subject import Subject
from penstock.learn.evaluation.tasks import Answer, Problem, TaskSettings, fingerprint_of

LETTERS = "ABCD"
SUBJECTS = 57
SHOTS = 5
"""As published."""
HUB = "cais/mmlu"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question with its choices."""

    text: str
    choices: tuple[str, ...]
    answer: str
    """The letter of the right choice."""

    def asked(self) -> str:
        """The question as in the prompt, up to the place of the letter."""
        choices = "".join(
            f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices, strict=True)
        )
        return f"{self.text}{choices}\nAnswer:"


def header(subject: str) -> str:
    """The first line of a prompt."""
    return (
        "The following are multiple choice questions (with answers) about  "
        f"{subject.replace('_', ' ')}.\n\n"
    )


def prompt(subject: str, shots: Sequence[Question], question: Question) -> str:
    """The published prompt."""
    return (
        header(subject)
        + "".join(f"{one.asked()} {one.answer}\n\n" for one in shots)
        + question.asked()
    )


@final
class Mmlu:
    """See the module. `data` is a folder with `dev/SUBJECT_dev.csv` and `test/SUBJECT_test.csv`, or
    `.csv.gz`.
    """

    def __init__(self, settings: TaskSettings) -> None:
        self.settings = settings
        self._shots = SHOTS if settings.shots is None else settings.shots
        self._dev, self._test = (
            _from_hub() if settings.data is None else _from_folder(Path(settings.data), self._shots)
        )
        for subject in self._test:
            found = len(self._dev.get(subject, ()))
            if found < self._shots:
                raise ConfigError(
                    f"task mmlu: {settings.data or HUB} has {found} solved questions (dev) of "
                    f"{subject}, but shots asks for {self._shots}; complete the folder, or "
                    "set shots to fewer"
                )

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks if subjects are missing."""
        found = len(self._test)
        return () if found == SUBJECTS else (f"{found} of MMLU's {SUBJECTS} subjects",)

    def problems(self) -> Sequence[Problem]:
        """All questions, or the first `limit` of each subject."""
        return [
            Problem(name=f"{subject}/{number}", group=subject, content=question)
            for subject, questions in self._test.items()
            for number, question in enumerate(questions[: self.settings.limit])
        ]

    def fingerprint(self) -> str:
        """Fingerprint of all questions."""
        every = (self._dev, self._test)
        return fingerprint_of(
            *(
                {name: [asdict(one) for one in each] for name, each in part.items()}
                for part in every
            )
        )

    def answer(self, subject: Subject, problems: Sequence[Problem]) -> Iterator[Answer]:
        """Choose the most likely letter of each question; of equally likely ones, the first."""
        asked = [self._requests(subject, problem) for problem in problems]
        scored = iter(
            subject.log_likelihoods([request for requests, _ in asked for request in requests])
        )
        for problem, (requests, cut) in zip(problems, asked, strict=True):
            logs = [next(scored).log_probability for _ in requests]
            chosen, right = LETTERS[logs.index(max(logs))], problem.content.answer
            detail = {"chosen": chosen, "right": right, "log_probabilities": logs, "cut": cut}
            yield Answer(
                problem=problem.name,
                group=problem.group,
                score=float(chosen == right),
                detail=detail,
            )

    def figures(self, answers: Sequence[Answer]) -> dict[str, tuple[float, float]]:
        """None."""
        return {}

    def _requests(
        self, subject: Subject, problem: Problem
    ) -> tuple[list[tuple[list[int], list[int]]], bool]:
        """(context, letter) ids of each choice, with as many solved questions as fit; and whether
        some did not fit.
        """
        question = problem.content
        letters = LETTERS[: len(question.choices)]
        shots = self._dev.get(problem.group, ())[: self._shots]
        for count in range(len(shots), -1, -1):
            if self.settings.chat:
                messages = _messages(problem.group, shots[:count], question)
                requests = [subject.chat_continuation(messages, letter) for letter in letters]
            else:
                text = prompt(problem.group, shots[:count], question)
                requests = [subject.continuation(text, f" {letter}") for letter in letters]
            fits = all(
                len(before) + len(after) <= subject.context_length + 1 for before, after in requests
            )
            if fits:
                break
        return requests, count < len(shots) or not fits


def _messages(subject: str, shots: Sequence[Question], question: Question) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    for one in (*shots, question):
        head = "" if messages else header(subject)
        messages.append({"role": "user", "content": head + one.asked()})
        messages.append({"role": "assistant", "content": one.answer})
    return messages[:-1]


Questions = dict[str, tuple[Question, ...]]


def _from_folder(folder: Path, shots: int) -> tuple[Questions, Questions]:
    files = _files(folder, "test")
    refuse_file(str(folder), "mmlu")
    if not files:
        raise ConfigError(
            f"task mmlu: {folder} has no test/SUBJECT_test.csv; give the unpacked folder of MMLU"
        )
    solved = _files(folder, "dev")
    missing = [subject for subject in files if subject not in solved]
    if missing and shots:
        raise ConfigError(
            f"task mmlu: {folder / 'dev' / missing[0]}_dev.csv is missing, but shots asks for "
            f"{shots} solved questions; complete the folder, or set shots to 0"
        )
    dev = {subject: _read(solved[subject]) for subject in files if subject in solved}
    return dev, {subject: _read(file) for subject, file in files.items()}


def _files(folder: Path, split: str) -> dict[str, Path]:
    """The file of each subject, by name; a file may be compressed with gzip."""
    found = {
        file.name.removesuffix(".gz").removesuffix(f"_{split}.csv"): file
        for end in ("csv.gz", "csv")
        for file in (folder / split).glob(f"*_{split}.{end}")
    }
    return dict(sorted(found.items()))


def _read(file: Path) -> tuple[Question, ...]:
    """Rows of question, choices and answer (a letter, or a number from 0); a header line is
    skipped.
    """
    rows = _rows(file)
    if rows and not is_mmlu(rows[0]) and (found := task_of_file(file)):
        raise RecordError(f"{file}: line 1: is no question with choices{advice(found, 'mmlu')}")
    begin = 1 if rows and rows[0] and (rows[0][0], rows[0][-1]) == ("question", "answer") else 0
    return tuple(
        _question(f"{file}: record {number}", row[0], row[1:-1], row[-1])
        for number, row in enumerate(rows[begin:], begin + 1)
        if row
    )


def _rows(file: Path) -> list[list[str]]:
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return list(csv.reader(io.StringIO(content.decode("utf-8-sig"), newline="")))
    except UnicodeDecodeError as error:
        line = 1 + content[: error.start].count(b"\n")
        raise RecordError(
            f"{file}: line {line}: not UTF-8 (byte {content[error.start]:#04x}); convert the "
            "file, for example with iconv -f WINDOWS-1252 -t UTF-8"
        ) from error
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise RecordError(f"{file}: cannot be read: {error}; fetch the file again") from error


def _from_hub() -> tuple[Questions, Questions]:
    parts: list[Questions] = []
    for split in ("dev", "test"):
        found: dict[str, list[Question]] = {}
        for row in hub_rows(HUB, "all", split, "mmlu"):
            where = f"{HUB} ({split})"
            question = converted(_of_hub, row, where, "mmlu")
            found.setdefault(str(row.get("subject")), []).append(question)
        parts.append({subject: tuple(found[subject]) for subject in sorted(found)})
    return parts[0], parts[1]


def _of_hub(row: JsonObject, where: str) -> Question:
    return _question(where, row["question"], row["choices"], str(row["answer"]))


def _question(where: str, text: str, choices: Sequence[str], answer: str) -> Question:
    letter = LETTERS[int(answer)] if answer in ("0", "1", "2", "3") else answer
    if len(choices) != len(LETTERS) or letter not in LETTERS or len(letter) != 1:
        raise RecordError(
            f"{where}: has {len(choices)} choices and the answer {answer!r:.60}; expected 4 "
            "choices and a letter A to D or a number 0 to 3"
        )
    return Question(text=text, choices=tuple(choices), answer=letter)
