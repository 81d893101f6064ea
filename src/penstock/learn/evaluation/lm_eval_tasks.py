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
from typing import Any, final

import numpy as np
import torch

from penstock.core.errors import ConfigError, MissingExtraError, PenstockError, reason_of
from penstock.learn.evaluation.results import Results
from penstock.learn.evaluation.subject import Subject
from penstock.learn.evaluation.tasks import LM_EVAL

Found = Mapping[str, Any]
"""Result of lm-eval."""


@final
class LmEvalTasks:
    """Tasks of lm-eval, loaded and checked; `run` gives them to a model, once.

    Args:
        tasks: lm-eval's names of tasks, groups or tags; paths of task files (YAML); or the contents
            of such a file.
        folder: Folder of further task files, which `tasks` may name.
        temperature: Sampling temperature of written texts; None: as in each task.
        max_tokens: Maximum tokens of a written text; None: as in each task.

    Raises:
        MissingExtraError: lm-eval is not installed.
        ConfigError: There is no such task, or lm-eval cannot load it; the message is lm-eval's.
    """

    def __init__(
        self,
        tasks: Sequence[str | Mapping[str, object]],
        *,
        folder: Path | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> None:
        try:
            from penstock.learn.evaluation import lm_eval_loading
        except ImportError as error:
            raise MissingExtraError("lm-eval", "eval") from error
        self._names = ", ".join(
            str(one.get("group", one.get("task", "a task without a name")))
            if isinstance(one, Mapping)
            else one
            for one in tasks
        )
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder with task files; correct data")
        with _randomness_restored(), _errors(self._names):
            self._loaded = lm_eval_loading.LoadedTasks(
                tasks, folder=folder, temperature=temperature, max_tokens=max_tokens
            )

    def run(
        self,
        subject: Subject,
        *,
        limit: int | None = None,
        shots: int | None = None,
        chat: bool = False,
        seed: int = 0,
        cache: Path | None = None,
    ) -> list[Results]:
        """See `run_lm_eval`.

        Raises:
            ConfigError: A task cannot run on this model, or its data or its file are at fault; the
                message is lm-eval's.
        """
        import lm_eval

        from penstock.learn.evaluation.lm_eval_model import LmEvalModel

        began, cut = time.monotonic(), subject.num_cut
        model = LmEvalModel(subject, seed=seed)
        with _randomness_restored(subject.model.device), _errors(self._names):
            found = lm_eval.simple_evaluate(
                model=model,
                tasks=self._loaded.given,
                task_manager=self._loaded,
                num_fewshot=shots,
                limit=limit,
                apply_chat_template=chat,
                use_cache=None
                if cache is None
                else str(cache / f"lm-eval-{subject.fingerprint()}"),
                log_samples=False,
            )
        notes = (*subject.notes, *model.notes, *_fixed_shots(found, shots))
        return results_of(found, time.monotonic() - began, subject.num_cut - cut, notes)


def run_lm_eval(
    tasks: Sequence[str | Mapping[str, object]],
    subject: Subject,
    *,
    limit: int | None = None,
    shots: int | None = None,
    chat: bool = False,
    temperature: float | None = None,
    max_tokens: int | None = None,
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
        temperature: Sampling temperature of written texts; None: as in the task.
        max_tokens: Maximum tokens of a written text; None: as in the task.
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
    loaded = LmEvalTasks(tasks, folder=folder, temperature=temperature, max_tokens=max_tokens)
    return loaded.run(subject, limit=limit, shots=shots, chat=chat, seed=seed, cache=cache)


def results_of(found: Found, seconds: float, cut: int, notes: Sequence[str] = ()) -> list[Results]:
    """Convert lm-eval's results to ours.

    Args:
        found: Has `results`, `groups`, `group_subtasks` and `n-samples`.
        seconds: Time that all tasks took together.
        cut: Number of prompts, over all tasks, that were shortened.
        notes: Remarks on all tasks.
    """
    groups: Found = found.get("groups", {})
    tasks = {**found["results"], **groups}
    children = {name: _members(found, name) for name in groups}
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
            notes=tuple(notes),
        )
        for task, entry in tasks.items()
        if task not in inside
        for metric, (score, error) in _metrics(entry).items()
    ]


def _members(found: Found, group: str) -> list[str]:
    """The tasks and groups in a group; a group without a figure of its own is replaced by its
    members.
    """
    members: list[str] = []
    for child in found.get("group_subtasks", {}).get(group, []):
        scored = child in found.get("groups", {}) or _metrics(found["results"].get(child, {}))
        members += [child] if scored else _members(found, child)
    return members


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


def _fixed_shots(found: Found, shots: int | None) -> list[str]:
    """Notes on tasks that have no solved problems, whatever is asked for."""
    counts: Mapping[str, int] = {} if shots is None else found.get("n-shot", {})
    return [
        f"{task} fixes {count} solved problems; shots {shots} has no effect"
        for task, count in counts.items()
        if count != shots
    ]


@contextmanager
def _errors(tasks: str) -> Iterator[None]:
    """Whatever lm-eval raises, as an error that names the tasks. It loads files and packages of
    others and runs their templates, patterns and functions, so there is no list of what it raises.
    """
    try:
        yield
    except (PenstockError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = error.args[0] if isinstance(error, KeyError) and error.args else error
        if said is None:
            said = "a metric has no known aggregation, so it is none of lm-eval's"
        reason = reason_of(ValueError(said))
        raise ConfigError(
            f"lm-eval: {tasks}: {type(error).__name__}: {reason}{_cure(error)}"
        ) from error


def _cure(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and "pip install" not in str(error):
        package = error.name.partition(".")[0]
        return f"; the task needs it: pip install {package}, or correct !function in its file"
    if isinstance(error, ImportError):
        return "; install what it names, or correct !function in the task's file"
    if isinstance(error, OSError):
        return (
            ". If its data come from the hub, fetch them while online; else correct their place in "
            "the task's file, or set data to a folder of task files (--task-data)"
        )
    if "marked as unsafe" in str(error):
        return (
            ". It would run the model's code unprotected: use penstock's own task, in the sandbox"
        )
    return "; check the name, the task's file, its data, and shots"


@contextmanager
def _randomness_restored(device: torch.device | None = None) -> Iterator[None]:
    """Restore the state of the global random generators afterwards."""
    python, arrays = random.getstate(), np.random.get_state()
    cuda = device is not None and device.type == "cuda"
    try:
        with torch.random.fork_rng([device] if cuda else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
