"""The HTML page of curves: a picture for each panel without any script, and a script that makes it answer.

The script draws the same lines from the same numbers again, for the window's width, the chosen smoothing and axes, and
the chosen runs; a test compares both drawings. It adds a crosshair with the values of all curves at one step.

Security: names of runs and figures go through JSON into an inert element, and from there only into text nodes. The
page's content security policy allows only its own style and script, by their hashes, and no fetches.
"""

import base64
import hashlib
import json
import math
import re
import sys
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any, final

from penstock.learn.training.curves import (
    COLOURS,
    Curve,
    Panel,
    View,
    half_life,
    is_log_x,
    is_log_y,
    range_ends,
    shown_parts,
    smoothed,
)

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 10, 28
DOTS = 40
"""Maximum number of points of a curve that get a dot each."""
DECADES = 3
"""A logarithmic axis over fewer decades has ticks at 1, 2 and 5."""


@final
class Scale:
    """Maps numbers to coordinates of the drawing, rounded to a tenth; a logarithmic one takes numbers above 0."""

    def __init__(self, low: float, high: float, begin: float, end: float, *, is_log: bool = False) -> None:
        self._of = math.log10 if is_log else float
        self._low, self._begin, self._size = self._of(low), begin, end - begin
        self._span = (self._of(high) - self._low) or 1.0

    def __call__(self, value: float) -> float:
        """The coordinate of a number."""
        return round(self._begin + (self._of(value) - self._low) / self._span * self._size, 1)


def svg(panel: Panel, view: View) -> str:
    """Draw one panel: for each run the range of each bin and its mean, faint, and the smoothed line over them."""
    across, xs = x_axis(panel, view)
    down, ys = y_axis(panel, view)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(panel.title)}">']
    for value in ys:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(value)}" y2="{down(value)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down(value) + 4:.1f}" text-anchor="end">{short(value)}</text>')
    parts += [f'<text x="{across(x)}" y="{HEIGHT - 9}" text-anchor="middle">{short(x)}</text>' for x in xs]
    parts.append(f'<text x="2" y="{HEIGHT - 9}">{panel.over}</text>')
    parts += [_drawn(curve, panel, view, across, down) for curve in panel.curves]
    return "".join(parts) + "</svg>"


def x_axis(panel: Panel, view: View) -> tuple[Scale, list[float]]:
    """The horizontal scale and its ticks."""
    is_log = is_log_x(panel, view)
    values = [x for x in panel.places if x > 0 or not is_log]
    low, high = min(values), max(values)
    ticks = log_ticks(low, high, 6) if is_log else nice_ticks(low, high, 6)
    return Scale(low, high, LEFT, WIDTH - RIGHT, is_log=is_log), ticks


def y_axis(panel: Panel, view: View) -> tuple[Scale, list[float]]:
    """The vertical scale and its ticks."""
    is_log = is_log_y(panel, view)
    low = min(y for curve in panel.curves for y in (*curve.low, *curve.mean) if y > 0 or not is_log)
    high = max(y for curve in panel.curves for y in curve.high)
    ticks = log_ticks(low, high, 5) if is_log else nice_ticks(low, high, 5)
    return Scale(min(low, ticks[0]), max(high, ticks[-1]), HEIGHT - BOTTOM, TOP, is_log=is_log), ticks


def _drawn(curve: Curve, panel: Panel, view: View, across: Scale, down: Scale) -> str:
    log_x, log_y, half = is_log_x(panel, view), is_log_y(panel, view), half_life(panel, view)
    line, parts = smoothed(curve, half, is_log=log_x), []
    for part in shown_parts(curve, log_x, log_y):
        xs, means = [across(curve.x[i]) for i in part], [curve.mean[i] for i in part]
        upper = _points(xs, [curve.high[i] for i in part], down)
        lower = _points(xs, range_ends(curve, part, log_y), down)
        parts.append(f'<polygon class="range" points="{" ".join(upper + lower[::-1])}"/>')
        if half > 0:
            parts.append(f'<polyline class="raw" points="{" ".join(_points(xs, means, down))}"/>')
        parts.append(f'<polyline class="line" points="{" ".join(_points(xs, [line[i] for i in part], down))}"/>')
        if len(curve.x) <= DOTS or len(part) == 1:
            parts += [_dot(x, down(curve.mean[i]), curve.x[i], curve.mean[i]) for x, i in zip(xs, part, strict=True)]
    parts += [_cross(across(x)) for x in curve.lost if x > 0 or not log_x]
    name = f"<title>{escape(curve.run)}: {short(line[-1])} at {short(curve.x[-1])}</title>"
    return f'<g class="{style_of(curve.number)}">{name}{"".join(parts)}</g>'


def _points(xs: Sequence[float], ys: Sequence[float], down: Scale) -> list[str]:
    return [f"{x},{down(y)}" for x, y in zip(xs, ys, strict=True)]


def _dot(x: float, y: float, at: float, value: float) -> str:
    return f'<circle cx="{x}" cy="{y}" r="2.2"><title>{short(at)}: {short(value)}</title></circle>'


def _cross(x: float) -> str:
    y = HEIGHT - BOTTOM - 5
    return f'<path class="lost" d="M{x - 3:.1f} {y - 3}l6 6m0 -6l-6 6"><title>no number</title></path>'


def notes_of(panel: Panel, view: View) -> list[str]:
    """What a panel does not show as a line."""
    lost = sum(curve.lost_count for curve in panel.curves)
    found = [f"{lost:,} {'value was no number' if lost == 1 else 'values were no numbers'} (×)"] if lost else []
    for wanted, is_log, values, axis in (
        (view.log_x, is_log_x(panel, view), [x for curve in panel.curves for x in curve.x], "horizontal"),
        (view.log_y, is_log_y(panel, view), [y for curve in panel.curves for y in curve.mean], "vertical"),
    ):
        hidden = sum(value <= 0 for value in values)
        if wanted and not is_log:
            found.append(f"no number is above 0, so the {axis} axis stays linear")
        elif wanted and hidden:
            found.append(f"{hidden:,} of {len(values):,} points are not above 0, and not on the {axis} axis")
    return found


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


def log_ticks(low: float, high: float, about: int) -> list[float]:
    """Powers of ten between two numbers above 0, or 1, 2 and 5 times these, about `about` of them."""
    factors = (1, 2, 5) if high / low < 10.0**DECADES else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * float(f"1e{power}") for power in powers for factor in factors]
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) < 2:
        return [tick for tick in nice_ticks(low, high, about) if tick > 0] or [low]
    return inside[:: math.ceil(len(inside) / (about + 2))]


def short(value: float) -> str:
    """12500 → '12.5k', 0.0003 → '0.0003', 2e-7 → '2e-07'."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def style_of(number: int) -> str:
    """Classes of a run: its colour, and dashes where colours are used again."""
    return f"c{number % len(COLOURS)} d{number // len(COLOURS) % 3}"


def page(panels: Sequence[Panel], view: View) -> str:
    """The HTML page."""
    names = {curve.number: curve.run for panel in panels for curve in panel.curves}
    style, script = _asset("curves.css"), _asset("curves.js")
    title = escape(", ".join(names[number] for number in sorted(names)))
    content = {
        "policy": f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'",
        "title": title,
        "style": style,
        "script": script,
        "legend": "".join(
            f'<li class="{style_of(number)}" data-run="{number}"><b></b>{escape(name)}</li>'
            for number, name in sorted(names.items())
        ),
        "figures": "".join(_figure(panel, view) for panel in panels),
        # In a script element, only "<" can end or open anything.
        "data": json.dumps(payload(panels, view), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    # One pass, so that a placeholder inside a name stays unchanged.
    found = re.sub(r"\{\{(\w+)\}\}", lambda name: content[name[1]], _asset("curves.html"))
    return found.encode("utf-8", "backslashreplace").decode()


def _figure(panel: Panel, view: View) -> str:
    half, is_log = half_life(panel, view), is_log_x(panel, view)
    values = "".join(
        f'<span class="{style_of(curve.number)}" title="{escape(curve.run)}"><b></b>'
        f"{short(smoothed(curve, half, is_log=is_log)[-1])}</span>"
        for curve in panel.curves
    )
    return (
        f'<figure><figcaption><h2>{escape(panel.title)}</h2><p class="now">{values}</p></figcaption>'
        f'{svg(panel, view)}<p class="told">{escape("; ".join(notes_of(panel, view)))}</p></figure>'
    )


def payload(panels: Sequence[Panel], view: View) -> dict[str, Any]:
    """What the script draws, as JSON values."""
    return {
        "over": panels[0].over,
        "smoothing": view.smoothing,
        "logX": view.log_x,
        "logY": view.log_y,
        "runs": [
            [number, name]
            for number, name in sorted({curve.number: curve.run for p in panels for curve in p.curves}.items())
        ],
        "panels": [
            {
                "title": panel.title,
                "isSmoothed": panel.is_smoothed,
                "curves": [_values(curve) for curve in panel.curves],
            }
            for panel in panels
        ],
    }


def _values(curve: Curve) -> dict[str, Any]:
    """A curve; the range and the counts only where bins hold several values."""
    found: dict[str, Any] = {"run": curve.number, "x": [_plain(x) for x in curve.x], "mean": _rounded(curve.mean)}
    if max(curve.count) > 1:
        found |= {"low": _rounded(curve.low), "high": _rounded(curve.high), "count": curve.count}
    if curve.breaks:
        found["breaks"] = curve.breaks
    if curve.lost:
        found |= {"lost": [_plain(x) for x in curve.lost], "lostCount": curve.lost_count}
    return found


def _plain(value: float) -> float:
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def _rounded(values: Sequence[float]) -> list[float]:
    """Seven digits: more than a screen shows."""
    return [_plain(float(f"{value:.7g}")) for value in values]


def _asset(name: str) -> str:
    return files("penstock.learn.training").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Hash of inline text in the form of a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
