"""Draws `docs/benchmarks.md` as bars: how many times as fast as each peer, from
`benchmarks/results/*.json`.

    python benchmarks/bars.py [--results FOLDER] [--output FOLDER]

A file of results is what a benchmark writes with `--json`, or holds figures of
`docs/benchmarks.md`, each with the words it was taken from (`quote`). A bar has a ratio [least,
most], or the seconds of [ours, the peer's]. One SVG a group, readable in light and dark; the bar is
full up to the least ratio and pale up to the most.
"""

import argparse
import json
import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, final

HERE = Path(__file__).parent
WIDTH, LEFT, RIGHT = 720, 18, 96
HEAD, LINE, FOOT = 66, 46, 12
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; fill: #13202a; }
.page { fill: #fff; stroke: #d5dddf; } .quiet { fill: #51616b; } .title { font-size: 16px; font-weight: 650; }
.tick { font-size: 11.5px; fill: #51616b; } .grid { stroke: #e4eaeb; } .one { stroke: #13202a; stroke-width: 1.5; }
.more { fill: #0a6b75; } .less { fill: #b3541e; } .range { opacity: 0.42; } .value { font-weight: 650; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8eff1; } .page { fill: #131b1e; stroke: #2a383d; } .quiet, .tick { fill: #9db0b8; }
  .grid { stroke: #233035; } .one { stroke: #e8eff1; } .more { fill: #52cdd6; } .less { fill: #f5a27a; }
}
"""  # noqa: E501


@final
@dataclass(frozen=True, kw_only=True)
class Bar:
    """One comparison with one peer.

    Raises:
        ValueError: The ratio is not above 0, or its least is above its most.
    """

    group: str
    what: str
    peer: str
    low: float
    high: float
    """Least and most of (work a second of ours) / (work a second of the peer)."""

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < math.inf:
            raise ValueError(
                f"{self.what}: ratio from {self.low} to {self.high}; expected 0 < least ≤ most"
            )


def read_bars(folder: Path) -> list[Bar]:
    """The bars of all files of results."""
    files = sorted(folder.glob("*.json"))
    return [
        bar_of(each, path)
        for path in files
        for each in json.loads(path.read_text(encoding="utf-8"))["bars"]
    ]


def bar_of(each: dict[str, Any], path: Path) -> Bar:
    """A bar from its entry in a file."""
    if ("ratio" in each) == ("seconds" in each):
        raise ValueError(f"{path}: {each.get('what')!r} needs ratio or seconds, and not both")
    low, high = each["ratio"] if "ratio" in each else [each["seconds"][1] / each["seconds"][0]] * 2
    return Bar(group=each["group"], what=each["what"], peer=each["peer"], low=low, high=high)


def draw(group: str, bars: list[Bar]) -> str:
    """The SVG of a group, the largest ratio first."""
    bars = sorted(bars, key=lambda bar: (-math.sqrt(bar.low * bar.high), bar.what, bar.peer))
    least, most = min(0.9, *(bar.low * 0.94 for bar in bars)), max(2.0, *(bar.high for bar in bars))
    ticks = [tick for tick in TICKS if least <= tick <= most * 1.05]
    height = HEAD + LINE * len(bars) + FOOT

    def x(ratio: float) -> float:
        return round(
            LEFT + math.log(ratio / least) / math.log(most / least) * (WIDTH - LEFT - RIGHT), 2
        )

    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
            f'aria-label="{escape(group)}, against peers">'
        ),
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>',
        f'<text class="title" x="{LEFT}" y="27">{escape(group)}</text>',
        (
            f'<text class="quiet" x="{WIDTH - LEFT}" y="27" text-anchor="end">times as fast as '
            "the peer (1 = equal)</text>"
        ),
    ]
    for tick in ticks:
        lines = (
            f'data-tick="{tick:g}" x1="{x(tick)}" x2="{x(tick)}" y1="{HEAD - 8}" '
            f'y2="{height - FOOT}"'
        )
        parts.append(f'<line class="grid" {lines}/>')
        parts.append(
            f'<text class="tick" x="{x(tick)}" y="{HEAD - 14}" text-anchor="middle">{tick:g}</text>'
        )
    for place, bar in enumerate(bars):
        parts += _drawn(bar, HEAD + LINE * place, x)
    return "\n".join([*parts, "</svg>\n"])


def _drawn(bar: Bar, top: int, x: Any) -> list[str]:
    inner, outer = sorted((bar.low, bar.high), key=lambda ratio: abs(math.log(ratio)))
    spans = bar.low < 1 < bar.high
    pieces = (
        [("range", bar.low, 1.0), ("range", 1.0, bar.high)]
        if spans
        else [("", 1.0, inner), ("range", inner, outer)]
    )
    drawn = [
        f'<rect class="{"more" if max(a, b) > 1 else "less"} {kind}" x="{min(x(a), x(b))}" '
        f'y="{top + 22}" width="{abs(x(b) - x(a)):.2f}" height="12"/>'
        for kind, a, b in pieces
        if a != b
    ]
    peer = f'<tspan class="quiet">against {escape(bar.peer)}</tspan>'
    return [
        f'<g data-low="{bar.low!r}" data-high="{bar.high!r}">',
        f'<text x="{LEFT}" y="{top + 15}">{escape(bar.what)} {peer}</text>',
        *drawn,
        f'<line class="one" x1="{x(1.0)}" x2="{x(1.0)}" y1="{top + 19}" y2="{top + 37}"/>',
        (
            f'<text class="value" x="{max(x(bar.high), x(1.0)) + 8}" '
            f'y="{top + 33}">{value_text(bar)}</text>'
        ),
        "</g>",
    ]


def value_text(bar: Bar) -> str:
    """9.4 to 10 ×."""
    low, high = (f"{ratio:.3g}" for ratio in (bar.low, bar.high))
    return f"{low} ×" if low == high else f"{low} to {high} ×"


def name_of(group: str) -> str:
    """File name of a group's picture."""
    return f"benchmarks-{group.split()[0].lower()}.svg"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs" / "pictures")
    options = parser.parse_args()
    bars = read_bars(options.results)
    for group in dict.fromkeys(bar.group for bar in bars):
        path = options.output / name_of(group)
        path.write_text(draw(group, [bar for bar in bars if bar.group == group]), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
