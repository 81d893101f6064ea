"""Measures a run's model: its scores on tasks, and its loss on held-out data."""

import glob
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, OutputError
from penstock.core.folders import is_url
from penstock.core.json_files import json_text
from penstock.core.terminal import visible
from penstock.data.shards.tables.corpus import Corpus
from penstock.learn.evaluation.results import run_task
from penstock.learn.evaluation.subject import Subject
from penstock.learn.evaluation.tasks import LM_EVAL, TaskSettings, check_name, make_task
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
    tasks: list[TaskSettings] = []
    data: list[Data] = []
    for one in what:
        if isinstance(one, TaskSettings):
            tasks.append(one)
        elif isinstance(one, str) and one in names:
            tasks.append(TaskSettings(name=one, **settings))
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
        output: Folder for answers and results.json; None: nothing is saved.
        rows: Approximate number of rows to use of each dataset; None: all.
        worst: How many documents of each dataset to name, those with the highest loss.

    Returns:
        The figures as JSON values.

    Raises:
        ConfigError: There is nothing to measure, no such task or no data for it, or chats are
            requested of a model without a chat template.
    """
    if not data and not settings:
        raise ConfigError("nothing to measure: name a task, such as gsm8k, or held-out data")
    tasks = _make(settings)
    found = open_model()
    if any(one.chat for one in settings) and found.template is None:
        raise ConfigError(f"{found.run.path}: it has no chat template; leave out chat")
    losses = _losses(found, data, rows, worst)
    scores = _run_tasks(found, settings, tasks, output) if settings else []
    figures: dict[str, Any] = {
        "model": str(found.run.path),
        "step": found.run.step,
        "context_length": found.context_length,
        "results": losses,
    }
    if settings:
        figures["tasks"] = [one.to_json() for one in scores]
    if output is not None:
        _save(output, figures)
    return figures


def _make(settings: Sequence[TaskSettings]) -> list[Any]:
    """Create the tasks, before the model is loaded; None for tasks of lm-eval.

    Raises:
        ConfigError: There is no such task, or no data.
    """
    for one in settings:
        check_name(one.name)
    return [None if one.name.startswith(LM_EVAL) else make_task(one) for one in settings]


def _run_tasks(
    found: Opened, settings: Sequence[TaskSettings], tasks: list[Any], output: Path | None
) -> list[Any]:
    """The results of all tasks, in the given order."""
    subject = Subject(
        found.model,
        found.tokenizer,
        context_length=found.context_length,
        stop_ids=found.run.stop_ids,
        template=found.template,
        begin_ids=found.begin_ids,
        slots=SLOTS_CPU if found.model.device.type == "cpu" else SLOTS_GPU,
    )
    results: list[Any] = []
    for one, made in zip(settings, tasks, strict=True):
        if made is None:
            results += _run_lm_eval(subject, one, output)
        else:
            answers = None if output is None else output / one.name / "answers.jsonl"
            results.append(run_task(made, subject, answers=answers))
    return results


def _run_lm_eval(subject: Any, one: TaskSettings, output: Path | None) -> Any:
    from penstock.learn.evaluation.lm_eval_tasks import run_lm_eval

    return run_lm_eval(
        [one.name.removeprefix(LM_EVAL)],
        subject,
        limit=one.limit,
        shots=one.shots,
        chat=one.chat,
        seed=one.seed,
        folder=None if one.data is None else Path(one.data),
        cache=output,
    )


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


def _save(output: Path, figures: dict[str, Any]) -> None:
    """Write `results.json` atomically."""
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
