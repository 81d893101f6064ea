"""Gives a task to a model, and keeps the answers as they come, so that a killed evaluation goes on where it was.

`answers.jsonl` begins with a line that tells task, settings, data and model; an answer a line follows. Each batch is on
disk before the next begins. A last line that a crash cut short is dropped. Answers of another model, other data or
other settings are refused, by name of what differs; `limit` and `unsafe` may change, as they change no answer.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.errors import OutputError, StateError
from penstock.evaluation.results import Results, summarise
from penstock.evaluation.subject import Subject
from penstock.evaluation.task import Answer, Task
from penstock.progress import Progress

PROBLEMS_AT_ONCE = 64
"""Between two times that answers are written, and that a stop is asked for."""
_MAY_CHANGE = ("limit", "unsafe")

Stop = Callable[[], bool]


def never() -> bool:
    """A `Stop` that never says so."""
    return False


def run_task(
    task: Task, subject: Subject, *, answers: Path | None = None, stop: Stop = never, progress: bool = True
) -> Results:
    """Answer all problems, or those that are not answered yet.

    Args:
        task: What is asked.
        subject: Who is asked.
        answers: File that keeps the answers; None: nothing is kept.
        stop: Asked between batches; where it says so, the results are of what was answered so far.
        progress: Show a bar with the time left.

    Raises:
        StateError: The file has the answers of another task, model, data or settings, or is damaged.
        OutputError: It cannot be written.
    """
    began = time.monotonic()
    problems = task.problems()
    found = {} if answers is None else _open(answers, _header(task, subject))
    left = [problem for problem in problems if problem.name not in found]
    with Progress(task.settings.name, total=len(problems), unit=" problems", enabled=progress) as bar:
        bar.advance(len(problems) - len(left))
        for begin in range(0, len(left), PROBLEMS_AT_ONCE):
            if stop():
                break
            part = left[begin : begin + PROBLEMS_AT_ONCE]
            new = list(task.answer(subject, part))
            found |= {one.problem: one for one in new}
            if answers is not None:
                _append(answers, [asdict(one) for one in new])
            bar.advance(len(part))
    given = [found[problem.name] for problem in problems if problem.name in found]
    return summarise(
        task.settings.name,
        given,
        figures=task.figures(given),
        seconds=time.monotonic() - began,
        cut=sum(isinstance(one.detail, dict) and bool(one.detail.get("cut")) for one in given),
        total=len(problems),
        notes=(*task.notes, *subject.notes),
    )


def _header(task: Task, subject: Subject) -> dict[str, Any]:
    settings = {name: value for name, value in asdict(task.settings).items() if name not in (*_MAY_CHANGE, "data")}
    return {**settings, "data": task.fingerprint(), "model": subject.fingerprint()}


def _open(path: Path, header: dict[str, Any]) -> dict[str, Answer]:
    """The answers that a file has; it is begun where it is not there yet."""
    try:
        content = path.read_bytes() if path.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with path.open("r+b") as file:
                file.truncate(len(whole))
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror}; give another folder") from error
    if not whole:
        _append(path, [header])
        return {}
    lines = [_line(path, number, line) for number, line in enumerate(whole.splitlines(), 1)]
    _check(path, lines[0], header)
    try:
        return {line["problem"]: Answer(**line) for line in lines[1:]}
    except (KeyError, TypeError):
        raise StateError(f"{path}: has a line that is no answer; remove the file, or give another folder") from None


def _line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise StateError(f"{path}:{number}: is no JSON object; the file is damaged: remove it, or give another folder")
    return found


def _check(path: Path, found: dict[str, Any], header: dict[str, Any]) -> None:
    """Refuse answers that were not given to this."""
    for name in ("name", "model", "data", *header):
        if found.get(name) != header[name]:
            raise StateError(
                f"{path}: has answers of another {'task' if name == 'name' else name} ({found.get(name)!r}, now "
                f"{header[name]!r}); give another folder, or remove the file"
            )


def _append(path: Path, lines: list[dict[str, Any]]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}; give another folder with -o") from error
