"""Runs lm-eval's tasks on our models, with results in the same form as those of our own tasks.

lm-eval seeds the global random generators so that its tasks are the same each time; their state is
restored afterwards. Tasks that run code from a model are refused, because lm-eval runs it
unprotected; our own `humaneval`, `mbpp` and so on run it in the sandbox. Cost: lm-eval first reads
the list of its 10,000 task files, which takes some seconds; tasks that are given as mappings do not
need it.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.core.errors import ConfigError, MissingExtraError, PenstockError
from penstock.learn.evaluation.results import Results
from penstock.learn.evaluation.subject import Subject
from penstock.learn.evaluation.tasks import LM_EVAL

Found = Mapping[str, Any]
"""Result of lm-eval."""


def run_lm_eval(
    tasks: Sequence[str | Mapping[str, object]],
    subject: Subject,
    *,
    limit: int | None = None,
    shots: int | None = None,
    chat: bool = False,
    seed: int = 0,
    folder: Path | None = None,
    cache: Path | None = None,
) -> list[Results]:
    """Run tasks of lm-eval.

    Args:
        tasks: lm-eval's names of tasks, groups or tags; paths of task files (YAML); or the contents
            of such a file.
        subject: The model.
        limit: Maximum problems of each task, from the first in lm-eval's order.
        shots: Solved problems in each prompt; None: as in the task.
        chat: Use the model's chat template.
        seed: Seed of the draws.
        folder: Folder of further task files, which `tasks` may name.
        cache: Folder for a file of this model's greedy answers, from which a later call continues.

    Returns:
        One for each metric of each task. A group of tasks with a metric of its own gives one result
        per metric, with its tasks as groups.

    Raises:
        MissingExtraError: lm-eval is not installed.
        ConfigError: There is no such task, or it cannot run on this model; the message is
            lm-eval's.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise MissingExtraError("lm-eval", "eval") from None
    from penstock.learn.evaluation.lm_eval_model import LmEvalModel

    known = TaskManager(
        include_path=None if folder is None else str(folder),
        include_defaults=not all(isinstance(task, Mapping) for task in tasks),
    )
    began, cut = time.monotonic(), subject.num_cut
    with _randomness_restored(subject.model.device):
        try:
            found = lm_eval.simple_evaluate(
                model=LmEvalModel(subject, seed=seed),
                tasks=[dict(task) if isinstance(task, Mapping) else task for task in tasks],
                task_manager=known,
                num_fewshot=shots,
                limit=limit,
                apply_chat_template=chat,
                use_cache=None
                if cache is None
                else str(cache / f"lm-eval-{subject.fingerprint()}"),
                log_samples=False,
            )
        except PenstockError:
            raise
        except (
            KeyError,
            ValueError,
            OSError,
        ) as error:  # OSError: the hub or its cache gave nothing
            raise ConfigError(f"lm-eval: {_sentence(error)}{_cure(error)}") from error
    return results_of(found, time.monotonic() - began, subject.num_cut - cut)


def results_of(found: Found, seconds: float, cut: int) -> list[Results]:
    """Convert lm-eval's results to ours.

    Args:
        found: Has `results`, `groups`, `group_subtasks` and `n-samples`.
        seconds: Time that all tasks took together.
        cut: Number of prompts, over all tasks, that were shortened.
    """
    groups: Found = found.get("groups", {})
    tasks = {**found["results"], **groups}
    children: dict[str, list[str]] = {
        name: found.get("group_subtasks", {}).get(name, []) for name in groups
    }
    inside = {name for names in children.values() for name in names}
    return [
        Results(
            name=_name(task, metric),
            score=score,
            standard_error=error,
            count=_count(found, task),
            groups={
                child: (*_metrics(tasks[child])[metric], _count(found, child))
                for child in children.get(task, [])
                if metric in _metrics(tasks[child])
            },
            seconds=seconds,
            cut=cut,
        )
        for task, entry in tasks.items()
        if task not in inside
        for metric, (score, error) in _metrics(entry).items()
    ]


def _metrics(entry: Found) -> dict[str, tuple[float, float]]:
    """(score, standard error) by "metric,filter"; NaN if lm-eval gives no error."""
    found = {}
    for key, value in entry.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = entry.get(f"{metric}_stderr,{chosen}")
        found[key] = float(value), float(error) if isinstance(error, int | float) else float("nan")
    return found


def _name(task: str, metric: str) -> str:
    """A name such as `lm-eval:gsm8k exact_match (strict-match)`."""
    name, _, chosen = metric.partition(",")
    return f"{LM_EVAL}{task} {name}" + ("" if chosen == "none" else f" ({chosen})")


def _count(found: Found, task: str) -> int:
    """Number of problems of a task, or of all tasks in a group."""
    inside = found.get("group_subtasks", {}).get(task)
    if inside:
        return sum(_count(found, child) for child in inside)
    return int(found["n-samples"][task]["effective"])


def _sentence(error: Exception) -> str:
    return str(error.args[0] if error.args else error)


def _cure(error: Exception) -> str:
    if isinstance(error, OSError):
        return (
            ". Its data come from the hub: fetch them while online, or set data to a folder of "
            "task files (--task-data)"
        )
    unsafe = "marked as unsafe" in str(error)
    return (
        ". It would run the model's code unprotected: use penstock's own task, in the sandbox"
        if unsafe
        else ""
    )


@contextmanager
def _randomness_restored(device: torch.device) -> Iterator[None]:
    """Restore the state of the global random generators afterwards."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
