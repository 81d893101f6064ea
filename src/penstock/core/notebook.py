"""How objects show themselves in notebooks: tables of facts, rows as strips, marked text.

Plain HTML and inline SVG: nothing is fetched, nothing runs, all text is escaped. Colours are half
transparent, so that they suit light and dark themes.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from penstock.core.arrays import Bool
from penstock.core.live_line import MONOSPACE

_COLUMNS = 600
"""Columns of a strip: each shows the slots that fall into it."""
_COLOURS = ("#3b7dd8", "#e08a2c")
"""Of documents next to each other in a row."""
_SHOWN_CHARACTERS = 4000
_TOKEN_COLOURS = ("#3b7dd8", "#e08a2c", "#3fa34d", "#a35bd0", "#d0455b")
"""Of tokens next to each other."""
_PICTURE = "width:320px;max-width:100%"


def card(title: str, facts: Iterable[tuple[str, object]], *parts: str) -> str:
    """A titled table of (name, value), and below it `parts`, which are HTML already."""
    rows = "".join(
        f'<tr><td style="text-align:left;opacity:.7">{escape(name)}</td>'
        f'<td style="text-align:left;white-space:pre-line">{escape(str(value))}</td></tr>'
        for name, value in facts
    )
    return f"<div><strong>{escape(title)}</strong><table>{rows}</table>{''.join(parts)}</div>"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a heading for each column."""
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{titles}</tr>{lines}</table>"


def row_strip(documents: "np.ndarray[Any, Any]", trained: "Bool", used: int) -> str:
    """A packed row as a strip: documents in alternating colours, full where tokens are trained,
    pale where not.

    Args:
        documents: int [T], the number of each slot's document.
        trained: bool [T], whether the slot has a target.
        used: Number of slots before the padding, which stays empty.
    """
    slots = len(documents)
    edges = np.linspace(0, slots, min(slots, _COLUMNS) + 1).astype(np.int64)
    shares = np.add.reduceat(trained.astype(np.float64), edges[:-1]) / np.diff(edges)
    looks = [
        None
        if begin >= used
        else (_COLOURS[int(documents[begin]) % 2], 0.25 + 0.75 * round(float(share) * 4) / 4)
        for begin, share in zip(edges[:-1].tolist(), shares, strict=True)
    ]
    boxes = []
    first = 0
    for column in range(1, len(looks) + 1):
        if column == len(looks) or looks[column] != looks[first]:
            if (look := looks[first]) is not None:
                boxes.append(_box(int(edges[first]), int(edges[column]), *look))
            first = column
    return (
        f'<svg viewBox="0 0 {slots} 1" preserveAspectRatio="none" role="img" '
        'style="width:100%;height:14px;margin:2px 0;border:1px solid #8886">'
        + "".join(boxes)
        + "</svg>"
    )


def _box(begin: int, end: int, colour: str, opacity: float) -> str:
    return (
        f'<rect x="{begin}" y="0" width="{end - begin}" height="1" fill="{colour}" '
        f'fill-opacity="{opacity:g}"/>'
    )


def bars(counts: Sequence[int], labels: Sequence[str]) -> str:
    """A histogram: one bar a count, its label and count as a tooltip; below it the labels of the
    first and the last bar that is not empty.
    """
    most = max(max(counts, default=0), 1)
    filled = [place for place, count in enumerate(counts) if count]
    first, last = (filled[0], filled[-1]) if filled else (0, -1)
    shown = list(zip(counts, labels, strict=True))[first : last + 1]
    boxes = "".join(
        f'<rect x="{i}" y="{1 - count / most:.4f}" width=".9" height="{count / most:.4f}" '
        f'fill="{_COLOURS[0]}" fill-opacity=".75"><title>{escape(label)}: '
        f"{count}</title></rect>"
        for i, (count, label) in enumerate(shown)
    )
    picture = (
        f'<svg viewBox="0 0 {max(len(shown), 1)} 1" preserveAspectRatio="none" role="img" '
        f'style="{_PICTURE};height:60px">{boxes}</svg>'
    )
    names = [label for _, label in shown]
    return picture + _below(*([names[0], names[-1]] if len(names) > 1 else names))


def curve(values: Sequence[float], label: str) -> str:
    """A line through values at equal distances, at most one a column; below it what it shows, its
    first and its last value. What is not finite is left out.
    """
    finite = [value for value in values if math.isfinite(value)]
    columns = np.linspace(0, len(finite) - 1, min(len(finite), _COLUMNS)).astype(np.int64)
    shown = [finite[column] for column in columns.tolist()]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    height = high - low or 1.0
    points = " ".join(f"{i},{(high - value) / height:.4f}" for i, value in enumerate(shown))
    picture = (
        f'<svg viewBox="0 0 {max(len(shown) - 1, 1)} 1" preserveAspectRatio="none" role="img" '
        f'style="{_PICTURE};height:80px;overflow:visible"><title>{escape(label)}: {low:g} to '
        f'{high:g}</title><polyline points="{points}" fill="none" stroke="{_COLOURS[0]}" '
        'stroke-width="2" vector-effect="non-scaling-stroke"/></svg>'
    )
    ends = [f"{shown[0]:.4g}", label, f"{shown[-1]:.4g}"] if shown else [label]
    return picture + _below(*ends)


def _below(*texts: str) -> str:
    """Texts below a picture, from its left edge to its right one."""
    parts = "".join(f"<span>{escape(text)}</span>" for text in texts)
    return (
        f'<div style="{_PICTURE};display:flex;justify-content:space-between;font-size:85%;'
        f'opacity:.7">{parts}</div>'
    )


def plain_text(text: str) -> str:
    """Text as a terminal shows it, in columns."""
    return f'<pre style="{MONOSPACE}">{escape(text)}</pre>'


def marked_text(pieces: Iterable[tuple[str, float]]) -> str:
    """Text whose trained pieces have a background: (text, loss weight) one after another; long text
    is cut.
    """
    shown, left = [], _SHOWN_CHARACTERS
    for text, weight in pieces:
        part = escape(text[:left])
        shown.append(
            f'<span style="background:#3fa34d55" title="{weight:g}">{part}</span>'
            if weight
            else part
        )
        left -= len(text)
        if left < 0:
            shown.append(" …")
            break
    return f'<pre style="white-space:pre-wrap;{MONOSPACE}">{"".join(shown)}</pre>'


def text_tokens(pieces: Iterable[tuple[str, str]]) -> str:
    """Pieces of text in alternating colours: (piece, tooltip) one after another; many are cut."""
    shown, left = [], _SHOWN_CHARACTERS
    for place, (text, tip) in enumerate(pieces):
        if left < 0:
            shown.append(" …")
            break
        left -= len(text) + 1
        colour = _TOKEN_COLOURS[place % len(_TOKEN_COLOURS)]
        shown.append(
            f'<span style="background:{colour}66" title="{escape(tip)}">{escape(text)}</span>'
        )
    return f'<pre style="white-space:pre-wrap;line-height:1.7;{MONOSPACE}">{"".join(shown)}</pre>'
