"""`penstock plot`: training curves of one or several runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def run(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Folders of runs; all curves share the same axes.")
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
) -> None:
    """Draw loss, throughput, learning rate and evaluations of one or several runs.

    Example:
        penstock plot runs/first runs/second -o curves.html
    """
    from penstock.training.curves import plot_runs

    first = Path(runs[0])
    default = (first.parent if first.is_file() else first) / "curves.html"
    print(plot_runs(runs, output or default, over=over))
