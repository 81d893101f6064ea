"""A panel of curves as inline SVG."""

import math
import sys
from html import escape
from typing import final

from penstock.training.curves import Curve, Panel

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b88a00", "#56b4e9", "#7f7f7f", "#7a4fb5")
"""Eight that people with colour blindness tell apart (after Okabe and Ito 2008)."""
WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 34


@final
class Scale:
    """Numbers to places on the drawing, rounded to a tenth."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self._low, self._begin, self._size, self._span = low, begin, end - begin, (high - low) or 1.0

    def __call__(self, value: float) -> float:
        """The place of a number."""
        return round(self._begin + (value - self._low) / self._span * self._size, 1)


def svg(panel: Panel) -> str:
    """One panel: a mean line a run, and the range of what each of its points stands for."""
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
    """Round numbers from at or above `low` to at or below `high`, some `about` of them; one where both are equal."""
    raw = (high - low) / about
    if not raw > sys.float_info.min:
        # One place, or two that are closer than steps between numbers can be.
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
    """Of a run, by its number."""
    return COLOURS[number % len(COLOURS)]
