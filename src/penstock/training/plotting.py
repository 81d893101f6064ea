"""Curves of runs as a page of its own (inline SVG: no network, no scripts) or as a PNG by matplotlib. No torch."""

import math
from collections.abc import Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, MissingExtraError, OutputError
from penstock.training.curve_drawing import colour, svg
from penstock.training.curves import Over, Panel, read_panels

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --faint: #8884; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #d8dee4; --page: #16191d; } }
body { font: 14px/1.4 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 24px; }
h1 { font-size: 18px; } h2 { font-size: 14px; margin: 0 0 4px; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 28px; }
svg { width: 100%; height: auto; } text { fill: var(--ink); font-size: 11px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--faint); } .mean { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.range { opacity: .18; stroke: none; } .legend { margin: 0 0 20px; padding: 0; list-style: none; }
.legend li { display: inline-block; margin-right: 18px; } .legend b { display: inline-block; width: 16px; height: 4px;
vertical-align: middle; margin-right: 6px; border-radius: 2px; }
"""


def plot_runs(runs: Sequence[str | Path], output: str | Path, *, over: Over = "step") -> Path:
    """Draw the curves of runs.

    Args:
        runs: Their folders.
        output: `.html`, or `.png`, which needs matplotlib.
        over: The horizontal axis, steps or tokens.

    Raises:
        ConfigError: Another kind of file, or nothing to draw.
        MissingExtraError: A PNG without matplotlib.
        OutputError: The file cannot be written.
    """
    output = Path(output)
    if output.suffix not in (".html", ".png"):
        raise ConfigError(f"{output}: the name must end in .html or .png")
    panels = read_panels(runs, over=over)
    try:
        if output.suffix == ".html":
            output.write_text(page(panels), encoding="utf-8")
        else:
            _write_png(panels, output)
    except OSError as error:
        raise OutputError(
            f"{output}: cannot be written: {error.strerror}; name a file in a folder that exists"
        ) from error
    return output


def page(panels: Sequence[Panel]) -> str:
    """The whole page."""
    names = {curve.number: curve.run for panel in panels for curve in panel.curves}
    legend = "".join(
        f'<li><b style="background:{colour(number)}"></b>{escape(name)}</li>' for number, name in sorted(names.items())
    )
    figures = "".join(
        f"<figure style='margin:0'><h2>{escape(panel.title)}</h2>{svg(panel)}</figure>" for panel in panels
    )
    title = escape(", ".join(names[number] for number in sorted(names)))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"
        f'<ul class="legend">{legend}</ul><main>{figures}</main></html>\n'
    )


def _write_png(panels: Sequence[Panel], output: Path) -> None:
    try:
        figure_of: Any = import_module("matplotlib.figure").Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "plot") from None
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = figure_of(figsize=(6.4 * columns, 3.4 * rows), layout="constrained")
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=False):
        for curve in panel.curves:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour(curve.number), alpha=0.18, linewidth=0)
            axes.plot(curve.x, curve.mean, color=colour(curve.number), linewidth=1.4, label=curve.run)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel(panel.over)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    for axes in figure.axes[len(panels) :]:
        axes.remove()
    figure.savefig(output, dpi=130)
