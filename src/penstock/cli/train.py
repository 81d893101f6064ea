"""`penstock train`: a run file becomes a trained model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.options import AsJson, Assignments

PLANNED_ROWS = 200_000
"""Rows that a dry run plans at most, in some seconds."""


def run(
    run_file: Annotated[str, typer.Argument(metavar="RUN.YAML", help="A run file with data, model and training.")],
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="RUN", help="The run's folder, new or to go on with.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Go on with the newest complete checkpoint of the folder.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            metavar="",
            help="Refuse all that starting would refuse, print sizes, memory and the plan; write nothing. With "
            "--output and --resume the folder and its checkpoint are looked at, too.",
        ),
    ] = False,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Train a model on the rows that a run file describes; `torchrun … -m penstock train` on several processes.

    Killed at any moment, `--resume` goes on with the newest complete checkpoint: the same losses as without the kill.
    """
    from penstock.config import load_run
    from penstock.config.run import resolved_text
    from penstock.config.training import describe, make_trainer
    from penstock.errors import ConfigError
    from penstock.training.distributed import Ranks, local_device
    from penstock.training.metrics import Metrics
    from penstock.yaml_files import parse_yaml

    if output is None and (resume or not dry_run):
        raise ConfigError("--output is missing: the folder of the run")
    settings = load_run(run_file, assignments or [])
    text = resolved_text(run_file, assignments or [])
    device = local_device(settings.training.device if settings.training else "auto")
    with Ranks(device) as ranks:
        say = _say if ranks.is_first else _silent
        folder = None if output is None else Path(output)
        trainer = make_trainer(
            settings,
            run_file=run_file,
            text=text,
            output=folder,
            resume=resume,
            ranks=ranks,
            say=say,
            dry_run=dry_run,
        )
        assert settings.model is not None
        facts = describe(trainer, settings.model)
        if dry_run:
            if ranks.is_first:
                _print_plan(settings, run_file, trainer, facts, as_json)
            return
        if ranks.is_first and not as_json:
            for name, value in facts:
                say(f"{name}: {value}")
        watched = trainer.settings
        with Metrics(
            trainer.run,
            total_steps=trainer.steps,
            done=trainer.loader.step,
            every=watched.log_every,
            tensorboard=watched.tensorboard,
            wandb=watched.wandb,
            config=parse_yaml(text, run_file)[1],
            shown=ranks.is_first,
        ) as metrics:
            for record in trainer.train():
                metrics.see(record)
        if ranks.is_first and as_json:
            import json

            print(json.dumps(metrics.last))


def _print_plan(settings: Any, run_file: str, trainer: Any, facts: list[tuple[str, str]], as_json: bool) -> None:
    import dataclasses
    import json

    from penstock.config import make_loader
    from penstock.inspection import dry_run, make_console, plan_view

    per_step = settings.data.loader.rows_per_step
    steps = min(trainer.steps, max(1, PLANNED_ROWS // per_step))
    report = dry_run(make_loader(settings.data, run_file=run_file, data_parallel=(0, per_step)), steps)
    if report.ended and report.steps < steps:
        from penstock.errors import ConfigError

        raise ConfigError(
            f"{run_file}: the sources end after {report.steps} steps, before {trainer.steps}; lower training.steps, or "
            "raise max_epochs"
        )
    planned = f"all {steps:,} steps" if steps == trainer.steps else f"the first {steps:,} of {trainer.steps:,} steps"
    facts = [*facts, ("planned below", planned)]
    if as_json:
        print(json.dumps({**dict(facts), "plan": dataclasses.asdict(report)}))
        return
    console = make_console()
    for name, value in facts:
        console.print(f"{name}: {value}", highlight=False)
    console.print(plan_view(report))


def _say(sentence: str) -> None:
    import sys

    from penstock.terminal import visible

    print(f"penstock: {visible(sentence, lines=True)}", file=sys.stderr, flush=True)


def _silent(sentence: str) -> None:
    """Other ranks say nothing."""
