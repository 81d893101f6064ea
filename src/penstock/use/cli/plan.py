"""`penstock plan`: a dry run of a data mixture."""

import dataclasses
import json

import penstock as ps
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import ASSIGNMENTS, AsJson, Given


@takes(
    settings=(
        options(
            "use.runs.planning.plan_run",
            run_file=Option(argument=True, metavar="RUN.YAML"),
            steps=Option(),
        ),
        ASSIGNMENTS,
    )
)
def run(*, settings: Given, as_json: AsJson = False) -> None:
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
    report = ps.plan_run(**settings)
    if as_json:
        more = {"padding_share": report.padding_share, "warnings": report.warnings}
        print(json.dumps({**dataclasses.asdict(report), **more}))
    else:
        ps.inspection.make_console().print(ps.inspection.plan_view(report))
