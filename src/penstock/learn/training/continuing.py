"""Finds the checkpoint of another run that a new run begins with: `training.continue_from`; without
torch.
"""

import re
from collections.abc import Callable
from pathlib import Path

from penstock.core.errors import ConfigError, CorruptionError, StateError
from penstock.core.yaml_files import read_yaml
from penstock.learn.training.checkpoints import (
    MANIFEST,
    STATE,
    Checkpoint,
    digest,
    load_checkpoint,
    newest_complete,
)
from penstock.learn.training.continued import Continued, ContinueSettings
from penstock.learn.training.run_folder import CHECKPOINTS, RUN_FILE


def begin_from(settings: ContinueSettings, say: Callable[[str], None]) -> Continued:
    """Find the checkpoint, and what of it the new run needs to know.

    Raises:
        ConfigError: There is no such run or checkpoint.
        StateError: The checkpoint does not say where its data stood.
        CorruptionError: It is damaged.
    """
    checkpoint = _find(Path(settings.run), settings.step, say)
    state, place = checkpoint.value(STATE), None
    if "data" in settings.take:
        place = state.get("place")
        if place is None:
            raise StateError(
                f"{checkpoint.folder}: does not say which documents were seen, as it was "
                "saved by an earlier version: resume that run for a step, or leave data out "
                "of continue_from.take"
            )
    schedule = "schedule" in settings.take
    return Continued(
        run=settings.run,
        step=checkpoint.step,
        digest=digest(checkpoint.folder / MANIFEST),
        take=settings.take,
        place=place,
        totals=state["totals"] if schedule else {},
        learning_rate=_learning_rate(checkpoint.folder) if schedule else None,
    )


def checkpoint_of(continued: Continued) -> Checkpoint:
    """The checkpoint, as it was when the run began.

    Raises:
        StateError: It is gone, or another one is in its place.
    """
    try:
        found = _find(Path(continued.run), continued.step, lambda _: None)
    except (ConfigError, CorruptionError) as error:
        raise StateError(
            f"{error}. The new run has no checkpoint of its own yet; begin it again"
        ) from error
    if digest(found.folder / MANIFEST) != continued.digest:
        raise StateError(
            f"{found.folder}: is not the checkpoint that the run began with, which had the "
            "same step; begin the new run again"
        )
    return found


def _find(run: Path, step: int | None, say: Callable[[str], None]) -> Checkpoint:
    folder = run / CHECKPOINTS
    if re.fullmatch(r"step-\d{8,}", run.name):
        raise ConfigError(
            f"continue_from: {run} is a checkpoint; give its run, and its step: {{run: …, step: …}}"
        )
    there = sorted(
        int(found[1])
        for path in folder.glob("step-*")
        if (found := re.fullmatch(r"step-(\d+)", path.name))
    )
    if not there:
        raise ConfigError(
            f"continue_from: {run} is no run with a checkpoint; give the folder of one"
        )
    if step is None:
        newest = newest_complete(folder, say=say)
        if newest is None:
            raise ConfigError(
                f"continue_from: {folder}: no checkpoint is complete; train that run on, or "
                "restore one"
            )
        return newest
    if step not in there:
        raise ConfigError(
            f"continue_from: {run} has no checkpoint of step {step}; there are "
            f"{', '.join(map(str, there))}"
        )
    return load_checkpoint(folder / f"step-{step:08d}")


def _learning_rate(folder: Path) -> float | None:
    """The peak learning rate in the run file of a checkpoint."""
    values = read_yaml(folder / RUN_FILE)[1] if (folder / RUN_FILE).is_file() else {}
    for name in ("training", "optimizer", "learning_rate"):
        values = values.get(name) if isinstance(values, dict) else None
    return values if isinstance(values, float) else None
