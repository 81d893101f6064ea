"""Curves of runs from `metrics.jsonl`, as an HTML page (inline SVG) or as a PNG. No torch.

The page stands alone: no network, no scripts. The PNG needs matplotlib.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, final

from penstock.core.errors import ConfigError, MissingExtraError, OutputError
from penstock.training.metrics import DISTANCE, PARTS, SOURCE, TASK, is_evaluation, read_metrics

POINTS = 400
"""Maximum points per curve: more than a screen can show separately."""

PANELS = (
    ("Loss, nats per target", "loss"),
    ("Useful tokens per second", "tokens_per_second"),
    ("Learning rate", "learning_rate"),
    ("Gradient norm, before clipping", "gradient_norm"),
)
"""(title, figure) of the first panels; each part of the loss and each figure of an evaluation follows in its own."""
LARGEST = 1e30
"""Largest value that is drawn; larger steps, tokens and figures are left out, like values that are not numbers."""

Over = Literal["step", "tokens"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One figure of one run, in bins, one per drawn point."""

    run: str
    """Name of the run."""
    number: int
    """Number of the run, from 0; decides its colour."""
    x: tuple[float, ...]
    """Steps or tokens at the end of each bin, rising."""
    mean: tuple[float, ...]
    """Mean of the figure in each bin."""
    low: tuple[float, ...]
    """Minimum in each bin."""
    high: tuple[float, ...]
    """Maximum in each bin."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Curves that share their axes."""

    title: str
    """Title above the panel."""
    over: Over
    """Horizontal axis."""
    curves: tuple[Curve, ...]
    """One for each run that has the figure."""


def read_panels(runs: Sequence[str | Path], *, over: Over = "step") -> list[Panel]:
    """The panels of one or several runs.

    Args:
        runs: Folders of runs, or their metrics.jsonl.
        over: The horizontal axis.

    Raises:
        ConfigError: No run has any figure yet.
        FormatError: A path is not a run.
    """
    records = {name: read_metrics(Path(run)) for name, run in zip(_names(runs), runs, strict=True)}
    found = [
        Panel(title=title, over=over, curves=curves)
        for title, figure in (*PANELS, *((_title(name), name) for name in _others(records)))
        if (curves := _curves(records, figure, over))
    ]
    if not found:
        raise ConfigError(f"{', '.join(map(str, runs))}: no figures yet; plot again after the first steps")
    return found


def _curves(records: dict[str, list[dict[str, Any]]], figure: str, over: Over) -> tuple[Curve, ...]:
    made = (_curve(run, number, had, figure, over) for number, (run, had) in enumerate(records.items()))
    return tuple(curve for curve in made if curve is not None)


def _curve(run: str, number: int, records: list[dict[str, Any]], figure: str, over: Over) -> Curve | None:
    """The figure's points in bins of equal size; None if it has none."""
    points = [
        (float(record[over]), float(record[figure]))
        for record in records
        if _is_drawn(record.get(figure)) and _is_drawn(record.get(over))
    ]
    if not points:
        return None
    size = math.ceil(len(points) / POINTS)
    bins = [points[begin : begin + size] for begin in range(0, len(points), size)]
    values = [[y for _, y in part] for part in bins]
    return Curve(
        run=run,
        number=number,
        x=tuple(part[-1][0] for part in bins),
        mean=tuple(sum(ys) / len(ys) for ys in values),
        low=tuple(map(min, values)),
        high=tuple(map(max, values)),
    )


def _is_drawn(value: Any) -> bool:
    """Whether the value is a number that can be drawn: small enough that differences and sums stay finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def _others(records: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Names of the loss parts, then of the evaluations' figures, that hold numbers; in order of first appearance."""
    names = {
        name: None
        for had in records.values()
        for record in had
        for name, value in record.items()
        if (name.startswith(PARTS) or is_evaluation(name)) and _is_drawn(value)
    }
    return sorted(names, key=is_evaluation)


def _title(name: str) -> str:
    for begin, what in ((SOURCE, "source"), (TASK, "task"), (DISTANCE, "target distance")):
        if name.startswith(begin):
            return f"Loss of {what} {name.removeprefix(begin)}"
    return name


def _names(runs: Sequence[str | Path]) -> list[str]:
    """The last part of each path, or the whole path if two runs would share a name."""
    paths = [Path(run).resolve() for run in runs]
    paths = [path.parent if path.is_file() else path for path in paths]
    short = [path.name for path in paths]
    return [name if short.count(name) == 1 else str(run) for name, run in zip(short, runs, strict=True)]


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b88a00", "#56b4e9", "#7f7f7f", "#7a4fb5")
"""Eight colours that colour-blind readers can distinguish (after Okabe and Ito 2008)."""
WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 34


@final
class Scale:
    """Maps numbers to coordinates of the drawing, rounded to a tenth."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self._low, self._begin, self._size, self._span = low, begin, end - begin, (high - low) or 1.0

    def __call__(self, value: float) -> float:
        """The coordinate of a number."""
        return round(self._begin + (value - self._low) / self._span * self._size, 1)


def svg(panel: Panel) -> str:
    """Draw one panel: for each run a line of means, and the range from minimum to maximum of each bin."""
    xs = [x for curve in panel.curves for x in curve.x]
    across = Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    low = min(y for curve in panel.curves for y in curve.low)
    high = max(y for curve in panel.curves for y in curve.high)
    ticks = nice_ticks(low, high, 5)
    down = Scale(min(low, ticks[0]), max(high, ticks[-1]), HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(panel.title)}">']
    for value in ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(value)}" y2="{down(value)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down(value) + 4:.1f}" text-anchor="end">{short(value)}</text>')
    parts += [
        f'<text x="{across(value)}" y="{HEIGHT - 16}" text-anchor="middle">{short(value)}</text>'
        for value in nice_ticks(min(xs), max(xs), 6)
    ]
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{panel.over}</text>')
    parts += [_drawn(curve, across, down) for curve in panel.curves]
    return "".join(parts) + "</svg>"


def _drawn(curve: Curve, across: Scale, down: Scale) -> str:
    hue = colour(curve.number)
    xs = [across(x) for x in curve.x]
    line = " ".join(f"{x},{down(y)}" for x, y in zip(xs, curve.mean, strict=True))
    upper = [f"{x},{down(y)}" for x, y in zip(xs, curve.high, strict=True)]
    lower = [f"{x},{down(y)}" for x, y in zip(xs, curve.low, strict=True)]
    last = f"<title>{escape(curve.run)}: {short(curve.mean[-1])} at {short(curve.x[-1])}</title>"
    dots = ""
    if len(xs) <= 40:
        dots = "".join(
            f'<circle cx="{x}" cy="{down(y)}" r="2.2" fill="{hue}"><title>{short(at)}: {short(y)}</title></circle>'
            for x, y, at in zip(xs, curve.mean, curve.x, strict=True)
        )
    return (
        f'<polygon class="range" fill="{hue}" points="{" ".join(upper + lower[::-1])}"/>'
        f'<polyline class="mean" stroke="{hue}" points="{line}">{last}</polyline>{dots}'
    )


def nice_ticks(low: float, high: float, about: int) -> list[float]:
    """About `about` round numbers between `low` and `high`, both included; one number if they are equal."""
    raw = (high - low) / about
    if not raw > sys.float_info.min:
        # Both are equal, or too close for floating point to fit a step between them.
        return [low]
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)] or [low]


def short(value: float) -> str:
    """12500 → '12.5k', 0.0003 → '0.0003', 2e-7 → '2e-07'."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def colour(number: int) -> str:
    """Colour of a run by its number."""
    return COLOURS[number % len(COLOURS)]


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
        ConfigError: The suffix is another one, or there is nothing to draw.
        MissingExtraError: `.png` was given and matplotlib is not installed.
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
    """The HTML page."""
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
