"""How objects show themselves in notebooks: tables of facts, rows as strips, marked text.

Plain HTML and inline SVG: nothing is fetched, nothing runs, all text is escaped. Colours are half
transparent, so that they suit light and dark themes.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from penstock.core.arrays import Bool

_COLUMNS = 600
"""Columns of a strip: each shows the slots that fall into it."""
_COLOURS = ("#3b7dd8", "#e08a2c")
"""Of documents next to each other in a row."""
_SHOWN_CHARACTERS = 4000


def card(title: str, facts: Iterable[tuple[str, object]], *parts: str) -> str:
    """A titled table of (name, value), and below it `parts`, which are HTML already."""
    rows = "".join(
        f'<tr><td style="text-align:left;opacity:.7">{escape(name)}</td>'
        f'<td style="text-align:left">{escape(str(value))}</td></tr>'
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
    """A histogram: one bar a count, its label and count as a tooltip."""
    most = max(max(counts, default=0), 1)
    boxes = "".join(
        f'<rect x="{i}" y="{1 - count / most:.4f}" width=".9" height="{count / most:.4f}" '
        f'fill="{_COLOURS[0]}" fill-opacity=".75"><title>{escape(label)}: '
        f"{count}</title></rect>"
        for i, (count, label) in enumerate(zip(counts, labels, strict=True))
    )
    return (
        f'<svg viewBox="0 0 {max(len(counts), 1)} 1" preserveAspectRatio="none" role="img" '
        f'style="width:320px;max-width:100%;height:60px">{boxes}</svg>'
    )


def curve(values: Sequence[float], label: str) -> str:
    """A line through values at equal distances, at most one a column; its range as a tooltip."""
    shown = [value for value in values[:: max(len(values) // _COLUMNS, 1)] if value == value]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    height = high - low or 1.0
    points = " ".join(f"{i},{(high - value) / height:.4f}" for i, value in enumerate(shown))
    return (
        f'<svg viewBox="0 0 {max(len(shown) - 1, 1)} 1" preserveAspectRatio="none" role="img" '
        f'style="width:320px;max-width:100%;height:80px"><title>{escape(label)}: {low:g} to '
        f'{high:g}</title><polyline points="{points}" fill="none" stroke="{_COLOURS[0]}" '
        'stroke-width="2" vector-effect="non-scaling-stroke"/></svg>'
    )


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
    return f'<pre style="white-space:pre-wrap">{"".join(shown)}</pre>'
