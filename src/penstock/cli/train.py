"""`penstock train`: a run file becomes a trained model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.options import AsJson, Assignments


def run(
    run_file: Annotated[str, typer.Argument(metavar="RUN.YAML", help="A run file with data, model and training.")],
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="RUN", help="The run's folder, new or to go on with.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Go on with the newest complete checkpoint of the folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Print sizes, memory and the plan; train nothing.")
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

    if output is None and not dry_run:
        raise ConfigError("--output is missing: the folder of the run")
    settings = load_run(run_file, assignments or [])
    text = resolved_text(run_file, assignments or [])
    device = local_device(settings.training.device if settings.training else "auto")
    with Ranks(device) as ranks:
        say = _say if ranks.is_first else _silent
        folder = None if dry_run else Path(str(output))
        trainer = make_trainer(
            settings, run_file=run_file, text=text, output=folder, resume=resume, ranks=ranks, say=say
        )
        assert settings.model is not None
        facts = describe(trainer, settings.model)
        if dry_run:
            _print_plan(settings, run_file, facts, as_json)
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
            shown=ranks.is_first,
        ) as metrics:
            for record in trainer.train():
                metrics.see(record)
        if ranks.is_first and as_json:
            import json

            print(json.dumps(metrics.last))


def _print_plan(settings: Any, run_file: str, facts: list[tuple[str, str]], as_json: bool) -> None:
    import dataclasses
    import json

    from penstock.config import make_loader
    from penstock.inspection import dry_run, make_console, plan_view

    report = dry_run(
        make_loader(settings.data, run_file=run_file, data_parallel=(0, settings.data.loader.rows_per_step)), 100
    )
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
