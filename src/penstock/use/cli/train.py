"""`penstock train`: train a model from a run file."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import ASSIGNMENTS, AsJson, Given

if TYPE_CHECKING:
    from penstock.use.runs.dry_runs import TrainingPlan


def beginning(run: str) -> list[str]:
    """`--continue-from` as an assignment."""
    return [f"training.continue_from={json.dumps(run)}"]


@takes(
    settings=(
        options(
            "use.runs.dry_runs.plan_training",
            run_file=Option(argument=True, metavar="RUN.YAML"),
        ),
        options("use.runs.training.train", "resume", output=Option(metavar="RUN", required=False)),
        options(
            "learn.training.settings.TrainSettings",
            continue_from=Option(hint=str, metavar="RUN", read=beginning),
        ),
        ASSIGNMENTS,
    )
)
def run(
    *,
    settings: Given,
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
    if "output" not in settings and ("resume" in settings or not dry_run):
        raise ConfigError("--output is missing: give the folder of the run")
    begun = settings.pop("continue_from", [])
    settings["assignments"] = [*settings.pop("assignments", ()), *begun]
    if dry_run:
        planned = ps.plan_training(**settings)
        if planned is not None:
            _print_plan(planned, as_json)
        return
    done = ps.train(settings.pop("run_file"), **settings)
    if as_json and ps.DataParallel.from_env().rank == 0:
        print(json.dumps(done.metrics[-1]))


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
