"""Runs a task on a model, and summarises its answers as scores with standard errors.

A killed evaluation continues where it was. `answers.jsonl` begins with a line that names task,
settings, data and model; then there is one answer per line. Each batch is on disk before the next
begins. A last line that a crash cut short is dropped. Answers of another model, other data or other
settings are refused with the name of what differs; `limit` and `unsafe` may change, because they
change no answer.

Lines are JSON of others' readers too: a number that is not finite is null.

Problems are treated as draws from all such problems: the standard error is that of a weighted mean,
√(n / (n − 1) × Σ weight² (score − mean)²) / Σ weight. With equal weights it is the sample's
deviation over √n.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from penstock.core.errors import OutputError, StateError
from penstock.core.json_files import json_text
from penstock.core.json_values import JsonObject, without_nan
from penstock.core.terminal import Progress
from penstock.learn.evaluation.subject import Subject
from penstock.learn.evaluation.tasks import Answer, Task

PROBLEMS_AT_ONCE = 64
"""Problems between two writes to disk, and between two checks for a stop."""
_MAY_CHANGE = ("limit", "unsafe")

Stop = Callable[[], bool]
"""Asks whether to stop now."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """How a model did on a task."""

    name: str
    score: float
    """The mean over all problems (micro)."""
    standard_error: float
    """NaN if unknown."""
    count: int
    """Number of answered problems."""
    groups: Mapping[str, tuple[float, float, int]] = field(default_factory=dict)
    """(score, standard error, problems) of each group."""
    seconds: float = 0.0
    figures: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Further figures of the task: (value, standard error) by name; with groups, also their mean
    (macro).
    """
    cut: int = 0
    """Number of prompts that were shortened to fit the context."""
    total: int | None = None
    """Number of problems of the task, if it was stopped before all were answered."""
    notes: Sequence[str] = ()
    """Remarks that readers of the score must know."""

    def to_json(self) -> JsonObject:
        """The results, JSON-ready: NaN becomes null."""
        found: JsonObject = without_nan(asdict(self))
        return found

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Results":
        """The inverse of `to_json`."""
        return cls(**_with_nans(dict(values), but=("total",)))


def weighted_mean(
    scores: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[float, float]:
    """The mean and its standard error. The mean is NaN without weight, the error also for fewer
    than two scores.
    """
    if not scores:
        return math.nan, math.nan
    each = [1.0] * len(scores) if weights is None else weights
    total = math.fsum(each)
    if not total:
        return math.nan, math.nan
    mean = math.fsum(w * s for w, s in zip(each, scores, strict=True)) / total
    if len(scores) == 1:
        return mean, math.nan
    squares = math.fsum((w * (s - mean)) ** 2 for w, s in zip(each, scores, strict=True))
    return mean, math.sqrt(squares * len(scores) / (len(scores) - 1)) / total


def summarise(
    name: str,
    answers: Sequence[Answer],
    *,
    figures: Mapping[str, tuple[float, float]],
    seconds: float,
    cut: int,
    total: int,
    notes: Sequence[str] = (),
) -> Results:
    """Summarise answers; `total`: the number of all problems of the task."""
    mean, error = weighted_mean([one.score for one in answers], [one.weight for one in answers])
    by_group: dict[str, list[Answer]] = {}
    for one in answers:
        by_group.setdefault(one.group, []).append(one)
    groups = {
        group: (
            *weighted_mean([one.score for one in members], [one.weight for one in members]),
            len(members),
        )
        for group, members in sorted(by_group.items())
        if group
    }
    macro: dict[str, tuple[float, float]] = {}
    if len(groups) > 1:
        errors = math.sqrt(math.fsum(error**2 for _, error, _ in groups.values())) / len(groups)
        macro["mean of groups"] = (
            math.fsum(score for score, _, _ in groups.values()) / len(groups),
            errors,
        )
    return Results(
        name=name,
        score=mean,
        standard_error=error,
        count=len(answers),
        groups=groups,
        seconds=seconds,
        figures={**macro, **figures},
        cut=cut,
        total=None if len(answers) == total else total,
        notes=tuple(notes),
    )


def table(results: Sequence[Results], *, groups: bool = True) -> Any:
    """A rich table with a line for each task, and below it its further figures and its groups."""
    from rich.table import Table

    made = Table("task", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("score", "± s.e.", "problems", "seconds"):
        made.add_column(name, justify="right")
    for one in results:
        count = f"{one.count:,}" if one.total is None else f"{one.count:,} of {one.total:,}"
        made.add_row(
            one.name,
            *_figures(one.score, one.standard_error),
            count,
            f"{one.seconds:,.1f}",
            style="bold",
        )
        for name, (value, error) in one.figures.items():
            made.add_row(f"  {name}", *_figures(value, error), "", "")
        for note in one.notes:
            made.add_row(f"  {note}")
        if one.cut:
            made.add_row("  prompts shortened", "", "", f"{one.cut:,}", "")
        for group, (score, error, members) in one.groups.items() if groups else ():
            made.add_row(f"  {group}", *_figures(score, error), f"{members:,}", "", style="dim")
    return made


def _figures(value: float, error: float) -> tuple[str, str]:
    return (
        "–" if math.isnan(value) else f"{value:.4f}",
        "–" if math.isnan(error) else f"{error:.4f}",
    )


def _with_nans(value: Any, but: Sequence[str] = ()) -> Any:
    """A JSON value with NaN for null, except at some keys."""
    if isinstance(value, Mapping):
        return {key: each if key in but else _with_nans(each) for key, each in value.items()}
    if isinstance(value, list):
        return tuple(map(_with_nans, value))
    return math.nan if value is None else value


def never() -> bool:
    """A `Stop` that never stops."""
    return False


def run_task(
    task: Task,
    subject: Subject,
    *,
    answers: Path | None = None,
    stop: Stop = never,
    progress: bool = True,
) -> Results:
    """Answer all problems that are not answered yet, and return the results of all.

    Args:
        task: The task.
        subject: The model.
        answers: File for the answers; None: they are not stored.
        stop: Called between batches; if it returns True, the results are of the answers so far.
        progress: Show a progress bar with the time left.

    Raises:
        StateError: The file has the answers of another task, model, data or settings, or is
            damaged; or the model's log-probabilities are NaN.
        OutputError: The file cannot be read or written.
    """
    began = time.monotonic()
    problems = task.problems()
    found = {} if answers is None else _open(answers, _header(task, subject))
    left = [problem for problem in problems if problem.name not in found]
    with Progress(
        task.settings.name, total=len(problems), unit=" problems", enabled=progress
    ) as bar:
        bar.advance(len(problems) - len(left))
        for begin in range(0, len(left), PROBLEMS_AT_ONCE):
            if stop():
                break
            part = left[begin : begin + PROBLEMS_AT_ONCE]
            new = list(task.answer(subject, part))
            found |= {one.problem: one for one in new}
            if answers is not None:
                _append(answers, [without_nan(asdict(one)) for one in new])
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


def _header(task: Task, subject: Subject) -> JsonObject:
    settings = {
        name: value
        for name, value in task.settings.used().items()
        if name not in (*_MAY_CHANGE, "data")
    }
    return {**settings, "data": task.fingerprint(), "model": subject.fingerprint()}


def _open(path: Path, header: dict[str, object]) -> dict[str, Answer]:
    """The answers in a file; a missing file is begun."""
    try:
        content = path.read_bytes() if path.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with path.open("r+b") as file:
                file.truncate(len(whole))
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be read: {error.strerror}; give another folder"
        ) from error
    if not whole:
        _append(path, [header])
        return {}
    lines = [_line(path, number, line) for number, line in enumerate(whole.splitlines(), 1)]
    _check(path, lines[0], header)
    try:
        return {line["problem"]: _answer(line) for line in lines[1:]}
    except (KeyError, TypeError):
        raise StateError(
            f"{path}: the file is damaged, a line is not an answer; remove it, or give "
            "another folder"
        ) from None


def _answer(line: JsonObject) -> Answer:
    """The answer in a line; a score that is not finite is null there."""
    return Answer(**line | {"score": math.nan if line["score"] is None else line["score"]})


def _line(path: Path, number: int, line: bytes) -> JsonObject:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise StateError(
            f"{path}:{number}: the file is damaged, not a JSON object; remove it, or give "
            "another folder"
        )
    return found


def _check(path: Path, found: dict[str, object], header: dict[str, object]) -> None:
    """Refuse answers of another task, model, data or settings."""
    # Settings first: other shots are also other data.
    for name in ("name", "model", *header):
        if found.get(name) != header[name]:
            raise StateError(
                f"{path}: has answers of another {'task' if name == 'name' else name} "
                f"({found.get(name)!r}, now {header[name]!r}); give another folder, or remove "
                "the file"
            )


def _append(path: Path, lines: list[dict[str, object]]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json_text(line, path) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written: {error.strerror}; give another folder with -o"
        ) from error
