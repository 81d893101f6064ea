"""`penstock plot`: training curves of one or several runs."""

from typing import Annotated

import typer

import penstock as ps
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import Given


@takes(
    settings=(options("use.runs.run.Run.plot", output=Option(metavar="FILE"), over=Option()),),
    view=(
        options("learn.training.curves.View", "log_x", "log_y", smoothing=Option(metavar="SHARE")),
    ),
)
def run(
    *,
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Folders of runs; all curves share the same axes."),
    ],
    settings: Given,
    view: Given,
) -> None:
    """Draw loss, throughput, learning rate and evaluations of one or several runs.

    Smoothed curves over faint values; in the page a crosshair with the values of all runs at one
    step, and runs to switch on and off.

    Example:
        penstock plot runs/first runs/second -o curves.html
    """
    print(ps.training.plot_runs(runs, **settings, view=ps.training.View(**view)))
