"""The HTML page of curves: the numbers of `curves.py`, drawn by uPlot (MIT, in `assets`). Nothing
is fetched.

Security: names of runs and figures go through JSON into an inert element, and from there only into
text nodes. The page's content security policy allows only its own style and scripts, by their
hashes, and no fetches.
"""

import json
import re
from collections.abc import Sequence
from html import escape

from penstock.core.page_assets import asset, inline_hash
from penstock.learn.training.curves import COLOURS, Curve, Panel, View, lost_note

LIBRARY = "uPlot.iife.min.js"


def page(panels: Sequence[Panel], view: View) -> str:
    """The HTML page."""
    names = sorted({curve.number: curve.run for panel in panels for curve in panel.curves}.items())
    style, library, script = (
        asset(__package__, "uPlot.min.css") + asset(__package__, "curves.css"),
        asset(__package__, LIBRARY),
        asset(__package__, "curves.js"),
    )
    scripts = f"script-src '{inline_hash(library)}' '{inline_hash(script)}'"
    legend = (
        f'<li class="{style_of(number)}" data-run="{number}"><b></b>{escape(name)}</li>'
        for number, name in names
    )
    content = {
        "policy": (
            f"default-src 'none'; style-src '{inline_hash(style)}'; {scripts}; base-uri 'none'"
        ),
        "title": escape(", ".join(name for _, name in names)),
        "style": style,
        "library": library,
        "script": script,
        "legend": "".join(legend),
        "figures": "".join(
            f'<figure><h2>{escape(panel.title)}</h2><div class="plot"></div><p '
            'class="note"></p></figure>'
            for panel in panels
        ),
        # In a script element, only "<" can end or open anything.
        "data": json.dumps(payload(panels, view), separators=(",", ":"), allow_nan=False).replace(
            "<", "\\u003c"
        ),
    }
    # One pass, so that a placeholder inside a name stays unchanged.
    found = re.sub(
        r"\{\{(\w+)\}\}", lambda name: content[name[1]], asset(__package__, "curves.html")
    )
    return found.encode("utf-8", "backslashreplace").decode()


def style_of(number: int) -> str:
    """Classes of a run: its colour, and dashes where colours are used again."""
    return f"c{number % len(COLOURS)} d{number // len(COLOURS) % 3}"


def payload(panels: Sequence[Panel], view: View) -> dict[str, object]:
    """What the script draws, as JSON values."""
    return {
        "over": panels[0].over,
        "smoothing": view.smoothing,
        "logX": view.log_x,
        "logY": view.log_y,
        "runs": sorted(
            {curve.number: curve.run for panel in panels for curve in panel.curves}.items()
        ),
        "panels": [
            {
                "title": panel.title,
                "isSmoothed": panel.is_smoothed,
                "note": lost_note(panel),
                "curves": [_values(curve) for curve in panel.curves],
            }
            for panel in panels
        ],
    }


def _values(curve: Curve) -> dict[str, object]:
    """A curve; the range and the counts only where bins hold several values."""
    found: dict[str, object] = {
        "run": curve.number,
        "x": [_plain(x) for x in curve.x],
        "mean": _rounded(curve.mean),
    }
    if max(curve.count) > 1:
        found |= {"low": _rounded(curve.low), "high": _rounded(curve.high), "count": curve.count}
    if curve.breaks:
        found["breaks"] = curve.breaks
    if curve.lost:
        found["lost"] = [_plain(x) for x in curve.lost]
    return found


def _plain(value: float) -> float:
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def _rounded(values: Sequence[float]) -> list[float]:
    """Seven digits: more than a screen shows."""
    return [_plain(float(f"{value:.7g}")) for value in values]
