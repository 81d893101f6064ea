"""Measures a run's model: its scores on tasks, and its loss on held-out data."""

import glob
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, OutputError, StateError
from penstock.core.folders import is_url
from penstock.core.json_files import json_text, read_object
from penstock.core.json_values import JsonObject
from penstock.core.terminal import visible
from penstock.data.shards.tables.corpus import Corpus
from penstock.learn.evaluation.lm_eval_tasks import LmEvalTasks
from penstock.learn.evaluation.results import Results, run_task
from penstock.learn.evaluation.subject import Subject
from penstock.learn.evaluation.tasks import (
    LM_EVAL,
    Task,
    TaskSettings,
    check_name,
    make_task,
    settings_of_all,
)
from penstock.learn.training.distributed import Ranks
from penstock.plan.loader.mixture import Mixture, Source
from penstock.use.runs.generating import take_opening
from penstock.use.runs.keywords import EvaluateKeywords, OpeningKeywords
from penstock.use.runs.opening import Opened
from penstock.use.runs.run_document import check_names

SLOTS_CPU, SLOTS_GPU = 8, 64
"""Number of replies generated at the same time."""

Data = str | Source | Mixture
"""A dataset's folder, or sources."""


def evaluate_run(
    open_model: Callable[[OpeningKeywords], Opened],
    what: Sequence[str | Path | Corpus | Source | Mixture | TaskSettings],
    output: Path | None,
    rows: int | None,
    worst: int,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """See `Run.evaluate`."""
    check_names("Run.evaluate", settings, EvaluateKeywords, "output", "rows", "worst")
    opening = take_opening(settings)
    names = [one for one in what if isinstance(one, str) and not _is_data(one)]
    if settings.get("data") is not None and len(names) != 1:
        raise ConfigError(
            f"Run.evaluate: data belongs to one task, and {len(names)} are named; call it "
            "once per task"
        )
    place = settings.pop("data", None)
    named = iter(settings_of_all(names, dict.fromkeys(names, place), settings))
    tasks: list[TaskSettings] = []
    data: list[Data] = []
    for one in what:
        if isinstance(one, TaskSettings):
            tasks.append(one)
        elif isinstance(one, str) and one in names:
            tasks.append(next(named))
        elif isinstance(one, str | Path):
            data.append(str(one))
        else:
            data.append(one if isinstance(one, Source | Mixture) else Source(one))
    return evaluate(lambda: open_model(opening), data, tasks, output, rows, worst)


def _is_data(name: str) -> bool:
    """Whether a string is the place of data, rather than the name of a task."""
    if is_url(name) or glob.has_magic(name) or Path(name).exists():
        return True
    return "/" in name and not name.startswith(LM_EVAL)


def evaluate(
    open_model: Callable[[], Opened],
    data: Sequence[Data],
    settings: Sequence[TaskSettings],
    output: Path | None = None,
    rows: int | None = None,
    worst: int = 0,
) -> dict[str, Any]:
    """Measure a model: its loss on datasets and its scores on tasks.

    Args:
        open_model: Called once the tasks are known to exist.
        data: Held-out data; each document is used once.
        settings: Settings of the tasks.
        output: Folder for answers and results.json, which keeps what it has of other tasks and
            datasets; None: nothing is saved.
        rows: Approximate number of rows to use of each dataset; None: all.
        worst: How many documents of each dataset to name, those with the highest loss.

    Returns:
        The figures as JSON values.

    Raises:
        ConfigError: There is nothing to measure, no such task or no data for it, two tasks have one
            name and one folder, or chats are requested of a model without a chat template.
        StateError: The folder has results of another model.
    """
    if not data and not settings:
        raise ConfigError("nothing to measure: name a task, such as gsm8k, or held-out data")
    if output is not None:
        _refuse_twins(settings)
    tasks = _make(settings)
    found = open_model()
    if any(one.chat for one in settings) and found.template is None:
        raise ConfigError(f"{found.run.path}: it has no chat template; leave out chat")
    figures: dict[str, Any] = {
        "model": str(found.run.path),
        "step": found.run.step,
        "context_length": found.context_length,
        "results": [],
    }
    before = {} if output is None else _results_before(output, figures)
    figures["results"] = _losses(found, data, rows, worst)
    if settings:
        figures["tasks"] = []
    if output is not None:
        _save(output, before, figures)
    for scores in _run_tasks(found, settings, tasks, output) if settings else ():
        figures["tasks"] += [one.to_json() for one in scores]
        # A later task may fail.
        if output is not None:
            _save(output, before, figures)
    return figures


def _refuse_twins(settings: Sequence[TaskSettings]) -> None:
    """Refuse tasks that would write answers into one file."""
    names = [one.name for one in settings]
    twins = [name for place, name in enumerate(names) if name in names[:place]]
    if twins:
        raise ConfigError(
            f"task {twins[0]} is given twice, and its answers go into one folder; give each its "
            "own output in a call of its own, or leave out output"
        )


def _make(settings: Sequence[TaskSettings]) -> list[Task | LmEvalTasks]:
    """Create the tasks, before the model is loaded.

    Raises:
        ConfigError: There is no such task, or no data.
        MissingExtraError: A task is lm-eval's, which is not installed.
    """
    for one in settings:
        check_name(one.name)
    return [
        LmEvalTasks(
            [one.name.removeprefix(LM_EVAL)],
            folder=None if one.data is None else Path(one.data),
            temperature=one.temperature,
            max_tokens=one.max_tokens,
        )
        if one.name.startswith(LM_EVAL)
        else make_task(one)
        for one in settings
    ]


def _run_tasks(
    found: Opened,
    settings: Sequence[TaskSettings],
    tasks: Sequence[Task | LmEvalTasks],
    output: Path | None,
) -> Iterator[list[Results]]:
    """The results of each task, in the given order."""
    subject = Subject(
        found.model,
        found.tokenizer,
        context_length=found.context_length,
        stop_ids=found.run.stop_ids,
        template=found.template,
        begin_ids=found.begin_ids,
        slots=SLOTS_CPU if found.model.device.type == "cpu" else SLOTS_GPU,
    )
    for one, made in zip(settings, tasks, strict=True):
        if isinstance(made, LmEvalTasks):
            yield made.run(
                subject,
                limit=one.limit,
                shots=one.shots,
                chat=one.chat,
                seed=one.seed,
                cache=output,
            )
        else:
            answers = None if output is None else output / one.name / "answers.jsonl"
            yield [run_task(made, subject, answers=answers)]


def _losses(
    found: Opened, data: Sequence[Data], rows: int | None, worst: int
) -> list[dict[str, Any]]:
    """The figures of all datasets; a dataset that does not fit the model is refused before any is
    measured.
    """
    from penstock.learn.training.held_out_loss import HeldOutLoss
    from penstock.learn.training.stop import Watched

    looks = [
        HeldOutLoss(
            one,
            sequence_length=found.row_length,
            tokenizer=found.tokenizer,
            model=found.model,
            ranks=Ranks(found.model.device),
            rows=rows,
            worst=worst,
        )
        for one in data
    ]
    figures = []
    for one, look in zip(data, looks, strict=True):
        watched = Watched(
            _name(one), lambda line: print(visible(line), file=sys.stderr, flush=True)
        )
        figures.append({"data": _name(one), **look(found.model, watched)})
    return figures


def _name(data: Data) -> str:
    if isinstance(data, Mixture):
        return ", ".join(source.name for source in data.sources)
    return data.name if isinstance(data, Source) else data


def _results_before(output: Path, figures: Mapping[str, Any]) -> JsonObject:
    """The content of `results.json`; empty if there is none, or only losses of another model.

    Raises:
        StateError: It has tasks of another model, or cannot be read.
    """
    path = output / "results.json"
    if not path.exists():
        return {}
    before = read_object(path, StateError)
    # One folder may be named in two ways.
    known = {**before, "model": Path(str(before.get("model"))).resolve()}
    now = {**figures, "model": Path(figures["model"]).resolve()}
    for name in ("model", "step", "context_length"):
        if known.get(name) == now[name]:
            continue
        if before.get("tasks"):
            raise StateError(
                f"{path}: has tasks of another {name} ({before.get(name)!r}, now "
                f"{figures[name]!r}); give another folder with -o, or remove the file"
            )
        return {}
    return before


def _merged(before: object, now: Sequence[JsonObject], key: str) -> list[JsonObject]:
    """Results by name: those of this call in place of older ones."""
    older = [one for one in before if isinstance(one, dict)] if isinstance(before, list) else []
    names = {one[key] for one in now}
    return [*(one for one in older if one.get(key) not in names), *now]


def _save(output: Path, before: Mapping[str, Any], figures: dict[str, Any]) -> None:
    """Write `results.json` atomically, with what it had of other tasks and datasets."""
    tasks = _merged(before.get("tasks"), figures.get("tasks", []), "name")
    figures = {**figures, "results": _merged(before.get("results"), figures["results"], "data")}
    if tasks or "tasks" in figures:
        figures["tasks"] = tasks
    try:
        output.mkdir(parents=True, exist_ok=True)
        partial = output / "results.json.partial"
        partial.write_text(
            json_text(figures, output / "results.json", indent=1) + "\n", encoding="utf-8"
        )
        partial.replace(output / "results.json")
    except OSError as error:
        raise OutputError(
            f"{output}: cannot be written: {error.strerror}; give another folder"
        ) from error
