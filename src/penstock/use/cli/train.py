"""`penstock train`: train a model from a run file."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.use.cli import used
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import AsJson, Assignments, Given

PLANNED_ROWS = 200_000
"""Maximum rows that a dry run plans, which takes some seconds."""


@takes(
    settings=(
        options("use.runs.training.train", "resume", output=Option(metavar="RUN", required=False)),
    )
)
def run(
    *,
    run_file: Annotated[
        str, typer.Argument(metavar="RUN.YAML", help="A run file with data, model and training.")
    ],
    settings: Given,
    continue_from: Annotated[
        str | None,
        typer.Option(
            "--continue-from",
            metavar="RUN",
            help=(
                "Begin a new run with weights, optimizer, schedule and place in the data of "
                "another run's newest checkpoint; training.continue_from says which of them, and "
                "which checkpoint."
            ),
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            metavar="",
            help=(
                "Run every check of a real start, print sizes, memory and the plan, and write "
                "nothing. With --output and --resume, also check the folder and its checkpoint."
            ),
        ),
    ] = False,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Train a model as a run file describes; use `torchrun … -m penstock train` for several
    processes.

    If training is killed, `--resume` continues from the newest complete checkpoint with the same
    losses as without the interruption.

    Example:
        penstock train run.yaml --dry-run
        penstock train run.yaml -o runs/first
        penstock train run.yaml -o runs/second --set training.optimizer.kind=muon
        penstock train more.yaml -o runs/more --continue-from runs/first
    """
    make_trainer = (
        used.config_training.make_trainer
    )  # Refused before anything is read where torch is missing.
    output, resume = settings.get("output"), settings.get("resume", False)
    if output is None and (resume or not dry_run):
        raise ConfigError("--output is missing: give the folder of the run")
    assignments = [*(assignments or []), *beginning(continue_from)]
    whole = used.config.load_run(run_file, assignments)
    text = used.run_file.resolved_text(run_file, assignments)
    training = whole.training or ps.training.TrainSettings()
    with used.distributed.Ranks(
        used.distributed.local_device(training.device), training.context_parallel
    ) as ranks:
        say = used.starting.speak if ranks.is_first else used.starting.silent
        folder = None if output is None else Path(output)
        trainer = make_trainer(
            whole,
            run_file=run_file,
            text=text,
            output=folder,
            resume=resume,
            ranks=ranks,
            say=say,
            dry_run=dry_run,
        )
        facts = used.config_training.describe(trainer, whole.model)
        if dry_run:
            if ranks.is_first:
                _print_plan(whole, run_file, trainer, facts, as_json)
            return
        if ranks.is_first and not as_json:
            for name, value in facts:
                say(f"{name}: {value}")
        last = used.starting.train_to_end(trainer, used.yaml_files.parse_yaml(text, run_file)[1])
        if ranks.is_first and as_json:
            print(json.dumps(last))


def beginning(run: str | None) -> list[str]:
    """`--continue-from` as an assignment."""
    return [] if run is None else [f"training.continue_from={json.dumps(run)}"]


def _print_plan(
    settings: Any, run_file: str, trainer: Any, facts: list[tuple[str, str]], as_json: bool
) -> None:

    ramp, start = settings.data.loader.ramp, trainer.loader.start
    left = trainer.steps - start.step
    steps = min(left, max(1, ramp.steps(ramp.before(start.step) + PLANNED_ROWS) - start.step))
    # The limits and target distances that the model asks for belong to its plan.
    needs = trainer.loader.requirements
    data = dataclasses.replace(
        settings.data, loader=trainer.loader.settings, target_distances=needs.target_distances
    )
    whole = used.config.make_loader(
        data, run_file=run_file, data_parallel=(0, ramp.divisor), **start.arguments
    )
    report = ps.inspection.dry_run(whole, steps)
    if report.ended and report.steps < steps:
        raise ConfigError(
            f"{run_file}: the sources end after {start.step + report.steps} steps, before "
            f"{trainer.steps}; lower training.steps, or raise max_epochs"
        )
    planned = f"all {steps:,} steps" if steps == left else f"the first {steps:,} of {left:,} steps"
    facts = [*facts, ("planned below", planned)]
    if as_json:
        print(
            json.dumps(
                {**dict(facts), "plan": dataclasses.asdict(report), "warnings": report.warnings}
            )
        )
        return
    console = ps.inspection.make_console()
    for name, value in facts:
        console.print(f"{name}: {value}", highlight=False)
    console.print(ps.inspection.plan_view(report))
