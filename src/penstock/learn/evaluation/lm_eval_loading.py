"""lm-eval's tasks, loaded and checked before a model is there.

What is wrong with a task's file is found here as far as possible, not after the model has answered.
lm-eval seeds the global random generators before it loads tasks, and some tasks go on to draw from
them; so their state after loading is kept for the evaluation, which gives what lm-eval gives.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.tasks import TaskManager

from penstock.core.errors import ConfigError

Given = str | Mapping[str, object]
"""The name of a task or the path of its file, or what such a file holds."""


@final
class LoadedTasks(TaskManager):  # type: ignore[misc]  # lm-eval has no types
    """Tasks, and where lm-eval found them. The evaluation takes them once, by `load`.

    Args:
        tasks: See `run_lm_eval`.
        folder: Folder of further task files.
        temperature: Of written texts; None: as in each task.
        max_tokens: Maximum tokens of a written text; None: as in each task.

    Raises:
        ConfigError: A metric has an unknown aggregation, or no task writes texts, but a setting is
            of written texts.
    """

    def __init__(
        self,
        tasks: Sequence[Given],
        *,
        folder: Path | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(
            include_path=None if folder is None else str(folder),
            include_defaults=not all(isinstance(task, Mapping) for task in tasks),
        )
        self.given = [dict(task) if isinstance(task, Mapping) else task for task in tasks]
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        torch.default_generator.manual_seed(DEFAULT_OTHER_SEED)  # Leaves those of GPUs alone.
        self._loaded = super().load(self.given)
        self._state = random.getstate(), np.random.get_state(), torch.get_rng_state()
        written = _written(temperature, max_tokens)
        writing = [_set(task, written) for task in self._loaded["tasks"].values()]
        if written and not any(writing):
            raise ConfigError(
                f"{', '.join(self._loaded['tasks'])}: scores given texts and writes none, so "
                "temperature and max_tokens have no meaning; leave them out"
            )

    def load(self, task_list: object) -> Any:
        """The tasks."""
        random.setstate(self._state[0])
        np.random.set_state(self._state[1])
        torch.set_rng_state(self._state[2])
        return self._loaded


def _written(temperature: float | None, max_tokens: int | None) -> dict[str, object]:
    """Settings by lm-eval's names."""
    found: dict[str, object] = {}
    if temperature is not None:
        found |= {"temperature": temperature, "do_sample": temperature > 0}
    return found if max_tokens is None else found | {"max_gen_toks": max_tokens}


def _set(task: Any, written: Mapping[str, object]) -> bool:
    """Check a task, and give it settings; returns whether it writes texts."""
    unknown = [name for name, found in task.aggregation().items() if not callable(found)]
    if unknown:
        raise ConfigError(
            f"{task.config.task}: the aggregation of metric {unknown[0]} is not one of lm-eval's; "
            "correct it in the task's file, for example to mean"
        )
    if task.get_config("output_type") != "generate_until":
        return False
    settings = {**(task.get_config("generation_kwargs") or {}), **written}
    # lm-eval stores texts as greedy, one for all repeats, unless do_sample says otherwise.
    if settings.get("do_sample") is None and (settings.get("temperature") or 0) > 0:
        settings["do_sample"] = True
    task.set_config("generation_kwargs", settings)
    return True
