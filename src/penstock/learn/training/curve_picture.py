"""Curves of runs as a file: the HTML page, or a PNG by matplotlib with the same lines, axes and
marks.
"""

import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, MissingExtraError, OutputError
from penstock.core.system import writing_cure
from penstock.learn.training.curve_page import page
from penstock.learn.training.curves import (
    Curve,
    Over,
    Panel,
    View,
    colour,
    half_life,
    is_log_x,
    is_log_y,
    notes_of,
    range_ends,
    read_panels,
    shown_parts,
    smoothed,
)


def plot_runs(
    runs: Sequence[str | Path],
    output: str | Path | None = None,
    *,
    over: Over = "step",
    view: View | None = None,
) -> Path:
    """Draw the curves of runs: loss, throughput, learning rate and evaluations.

    Args:
        runs: Their folders, or their files of metrics.
        output: `.html`, or `.png`, which needs matplotlib; None: curves.html in the first folder.
        over: The horizontal axis, steps or tokens.
        view: Smoothing and logarithmic axes; in the page, what it begins with.

    Returns:
        The file.

    Raises:
        ConfigError: No run is given, the suffix is another one, or there is nothing to draw.
        MissingExtraError: `.png` was given and matplotlib is not installed.
        OutputError: The file cannot be written.
    """
    if over not in ("step", "tokens"):
        raise ConfigError(f"over is {over!r}; expected step or tokens")
    if not runs:
        raise ConfigError("plot_runs: found no runs; give the folder of at least one")
    if output is None:
        first = Path(runs[0])
        output = (first.parent if first.is_file() else first) / "curves.html"
    output, view = Path(output), view or View()
    if output.suffix not in (".html", ".png"):
        raise ConfigError(f"{output}: the name must end in .html or .png")
    panels = read_panels(runs, over=over)
    try:
        if output.suffix == ".html":
            output.write_text(page(panels, view), encoding="utf-8")
        else:
            write_png(panels, output, view)
    except OSError as error:
        raise OutputError(
            f"{output}: cannot be written: {error.strerror}; "
            f"{writing_cure(error, otherwise='name a file in a folder that exists')}"
        ) from error
    return output


def write_png(panels: Sequence[Panel], output: Path, view: View) -> None:
    """Draw all panels, two side by side.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    try:
        figure_of = import_module("matplotlib.figure").Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "plot") from None
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = figure_of(figsize=(6.4 * columns, 3.4 * rows), layout="constrained")
    for axes, panel in zip(
        figure.subplots(rows, columns, squeeze=False).flat, panels, strict=False
    ):
        _draw(axes, panel, view)
    names = {curve.number: curve.run for panel in panels for curve in panel.curves}
    line = import_module("matplotlib.lines").Line2D
    handles = [
        line([], [], color=colour(number), label=_plain(name))
        for number, name in sorted(names.items())
    ]
    figure.axes[0].legend(handles=handles, fontsize=8)
    for axes in figure.axes[len(panels) :]:
        axes.remove()
    figure.savefig(output, dpi=130)


def _draw(axes: Any, panel: Panel, view: View) -> None:
    log_x, log_y = is_log_x(panel, view), is_log_y(panel, view)
    for curve in panel.curves:
        _plot(axes, curve, half_life(panel, view), log_x, log_y)
    axes.set_title(_plain(panel.title), fontsize=10)
    axes.set_xlabel("; ".join([panel.over, *notes_of(panel, view)]), fontsize=9)
    engineering: Any = import_module("matplotlib.ticker").EngFormatter
    axes.set_xscale("log" if log_x else "linear")
    axes.set_yscale("log" if log_y else "linear")
    if not log_x:
        axes.xaxis.set_major_formatter(engineering(sep=""))
    axes.grid(alpha=0.3)


def _plain(text: str) -> str:
    """For matplotlib, which takes what stands between two $ for a formula."""
    return text.replace("$", r"\$")


def _plot(axes: Any, curve: Curve, half: float, log_x: bool, log_y: bool) -> None:
    """One curve: the range of each bin, the values, and the smoothed line over them."""
    hue, line = colour(curve.number), smoothed(curve, half, is_log=log_x)
    for part in shown_parts(curve, log_x, log_y):
        xs, means = [curve.x[i] for i in part], [curve.mean[i] for i in part]
        lower, upper = range_ends(curve, part, log_y), [curve.high[i] for i in part]
        axes.fill_between(xs, lower, upper, color=hue, alpha=0.16, linewidth=0)
        if half > 0:
            axes.plot(xs, means, color=hue, alpha=0.35, linewidth=0.8)
        axes.plot(
            xs,
            [line[i] for i in part],
            color=hue,
            linewidth=1.5,
            marker="." if len(part) == 1 else None,
        )
    if lost := [x for x in curve.lost if x > 0 or not log_x]:
        bottom = axes.get_xaxis_transform()
        axes.plot(
            lost, [0.02] * len(lost), "x", color=hue, markersize=5, transform=bottom, clip_on=False
        )
