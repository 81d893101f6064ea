"""`penstock plan`: a dry run of a data mixture."""

import dataclasses
import json
from typing import Annotated

import typer

import penstock as ps
from penstock.use.cli import used
from penstock.use.cli.options import AsJson, Assignments

STEPS = 100
"""Steps that are planned of a run file that says nothing of them."""


def run(
    run_file: Annotated[
        str, typer.Argument(metavar="RUN.YAML", help="A run file, or a run's folder.")
    ],
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Steps to plan; default: those of the run, else 100.", min=1
        ),
    ] = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Plan the first steps of a run without training: rows, tokens, shares, epochs, padding, drops,
    memory.

    Of a run that continues from another one, those from there on.

    Warns of rows in which nothing is trained, and of documents with loss weights that are longer
    than a row.

    Only computes the plan, at millions of documents a second; one row is filled to measure its
    memory.

    Example:
        penstock plan run.yaml --steps 20
    """
    run_file = used.config.run_file_of(run_file)
    data = used.config.load_data(run_file, assignments or [])
    start = used.run_file.written_start(run_file, assignments or [])
    if steps is None:
        written = used.run_file.written_steps(run_file, assignments or [])
        steps = STEPS if written is None else max(1, written - start.step)
    loader = used.config.make_loader(
        data, run_file=run_file, data_parallel=(0, data.loader.ramp.divisor), **start.arguments
    )
    report = ps.inspection.dry_run(loader, steps)
    if as_json:
        more = {"padding_share": report.padding_share, "warnings": report.warnings}
        print(json.dumps({**dataclasses.asdict(report), **more}))
    else:
        ps.inspection.make_console().print(ps.inspection.plan_view(report))
