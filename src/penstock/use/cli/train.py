"""`penstock train`: train a model from a run file."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import AsJson, Assignments, Given

if TYPE_CHECKING:
    from penstock.use.runs.planning import TrainingPlan


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
    output, resume = settings.get("output"), settings.get("resume", False)
    if output is None and (resume or not dry_run):
        raise ConfigError("--output is missing: give the folder of the run")
    given = [*(assignments or []), *beginning(continue_from)]
    if dry_run:
        planned = ps.plan_training(run_file, output=output, resume=resume, assignments=given)
        if planned is not None:
            _print_plan(planned, as_json)
        return
    done = ps.train(run_file, output=output or "", resume=resume, assignments=given)
    if as_json and ps.DataParallel.from_env().rank == 0:
        print(json.dumps(done.metrics[-1]))


def beginning(run: str | None) -> list[str]:
    """`--continue-from` as an assignment."""
    return [] if run is None else [f"training.continue_from={json.dumps(run)}"]


def _print_plan(planned: "TrainingPlan", as_json: bool) -> None:
    facts, report = planned.facts, planned.plan
    if as_json:
        plan = {"plan": dataclasses.asdict(report), "warnings": report.warnings}
        print(json.dumps({**facts, **plan}))
        return
    console = ps.inspection.make_console()
    for name, value in facts.items():
        console.print(f"{name}: {value}", highlight=False)
    console.print(ps.inspection.plan_view(report))
