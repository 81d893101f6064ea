"""`penstock plot`: training curves of one or several runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

import penstock as ps


def run(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Folders of runs; all curves share the same axes."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="An offline page (.html) or a picture (.png, needs matplotlib). "
            "[default: curves.html in the first run's folder]",
        ),
    ] = None,
    over: Annotated[
        Literal["step", "tokens"],
        typer.Option(metavar="step|tokens", help="Horizontal axis: steps, or trained tokens."),
    ] = "step",
    smoothing: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help=(
                "Share of the horizontal axis after which a value weighs half in the smoothed "
                "curve; 0: the values alone. The page has a slider for it."
            ),
            min=0,
            max=1,
        ),
    ] = 0.01,
    log_x: Annotated[
        bool,
        typer.Option(
            "--log-x", metavar="", help="Logarithmic horizontal axis; the page has a switch."
        ),
    ] = False,
    log_y: Annotated[
        bool,
        typer.Option(
            "--log-y", metavar="", help="Logarithmic vertical axes; the page has a switch."
        ),
    ] = False,
) -> None:
    """Draw loss, throughput, learning rate and evaluations of one or several runs.

    Smoothed curves over faint values; in the page a crosshair with the values of all runs at one
    step, and runs to switch on and off.

    Example:
        penstock plot runs/first runs/second -o curves.html
    """
    view = ps.training.View(smoothing=smoothing, log_x=log_x, log_y=log_y)
    print(ps.training.plot_runs(runs, output, over=over, view=view))
