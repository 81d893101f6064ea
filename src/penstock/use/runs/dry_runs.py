"""Dry runs: every check of a start of a run file, and its plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from penstock.core.errors import ConfigError
from penstock.core.suggestions import suggests
from penstock.use.config.run_file import make_loader
from penstock.use.config.summary import describe
from penstock.use.inspection.plan_report import PlanReport, dry_run
from penstock.use.runs.starting import SetUp, set_up

PLANNED_ROWS = 200_000
"""Maximum rows that the plan of a training has, which takes some seconds."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """What a run file would train."""

    facts: dict[str, str]
    """Model, parameters, memory, rows and steps, in words."""
    plan: PlanReport
    """Of the first steps, or of all."""


@suggests
def plan_training(
    run_file: str | Path,
    *,
    output: str | Path | None = None,
    resume: bool = False,
    assignments: Sequence[str] = (),
) -> TrainingPlan | None:
    """Run every check of a real start of `ps.train(run_file)`, plan its steps, and write nothing.

    Args:
        run_file: The run file.
        output: The run's folder, to check it, too.
        resume: Check the folder's checkpoint, too.
        assignments: Changes of the file's settings, such as `training.steps=100`.

    Returns:
        What would be trained; None on all ranks but the first.

    Raises:
        ConfigError: A setting is unknown or out of range, or the data end before the run.
        StateError: The run in the folder has another plan or model.
    """
    if resume and output is None:
        raise ConfigError("output is missing: give the folder of the run")
    place = str(run_file)
    with set_up(place, list(assignments), output, resume, dry_run=True) as found:
        return _plan(found, place) if found.trainer.ranks.is_first else None


def _plan(found: SetUp, run_file: str) -> TrainingPlan:
    settings, trainer = found.settings, found.trainer
    ramp, start = settings.data.loader.ramp, trainer.loader.start
    left = trainer.steps - start.step
    steps = min(left, max(1, ramp.steps(ramp.before(start.step) + PLANNED_ROWS) - start.step))
    # The limits and target distances that the model asks for belong to its plan.
    needs = trainer.loader.requirements
    data = replace(
        settings.data, loader=trainer.loader.settings, target_distances=needs.target_distances
    )
    whole = make_loader(data, run_file=run_file, data_parallel=(0, ramp.divisor), **start.arguments)
    report = dry_run(whole, steps)
    if report.ended and report.steps < steps:
        raise ConfigError(
            f"{run_file}: the sources end after {start.step + report.steps} steps, before "
            f"{trainer.steps}; lower training.steps, or raise max_epochs"
        )
    planned = f"all {steps:,} steps" if steps == left else f"the first {steps:,} of {left:,} steps"
    facts = [*describe(trainer, settings.model), ("planned below", planned)]
    return TrainingPlan(facts=dict(facts), plan=report)
