"""Trees of trajectories in a terminal: branches under those that they fork from, tokens by kind,
and log-probabilities of replies or of single tokens.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from penstock.core.arrays import Array
from penstock.use.inspection.terminal_style import (
    Style,
    colour_of,
    letter_of,
    marked,
    stretches,
    tree_view,
)
from penstock.use.inspection.trajectories import (
    Segment,
    ShownBranch,
    TrajectoryTree,
    in_a_line,
    nats,
    plural,
)

LOOKS: Mapping[str, str] = {
    "rendered": "dim",
    "sampled": "bold underline cyan",
    "masked": "yellow",
    "repeated": "blue",
    "rewritten": "magenta",
    "moved": "dim",
}
"""Style of each kind of token."""
ABOUT: Mapping[str, str] = {
    "rendered": "rendered, only read",
    "sampled": "sampled and trained",
    "masked": "sampled and masked",
    "repeated": "a reply that is trained elsewhere, again",
    "rewritten": "a reply, rewritten",
}
DEEPEST = 8
"""Branches that are indented."""
FEWEST = 8
"""Tokens of each stretch that are shown at least."""


def trajectory_view(
    tree: TrajectoryTree,
    texts: Sequence[str],
    weights: Sequence[float] | Array,
    ids: Sequence[int] | Array,
    style: Style,
    max_tokens: int,
    *,
    log_probabilities: bool = False,
) -> Group:
    """A document of trajectories.

    Args:
        tree: Its branches and replies. n tokens.
        texts: [n] text of each token, with line ends.
        weights: [n] their loss weights.
        ids: [n]
        style: How the terminal shows trained tokens.
        max_tokens: Tokens to show; of more, the ends of each stretch are.
        log_probabilities: Also a line for each sampled token.
    """
    drawn = _Drawn(tree, texts, weights, ids, style, max_tokens, log_probabilities)
    parts: list[Any] = [Text(f"  {tree}"), tree_view(tree.branches, style.width)]
    for number, branch in enumerate(tree.branches):
        indent = 2 * min(branch.depth, DEEPEST)
        parts += [
            Padding(one, (0, 0, 0, indent), expand=False) for one in drawn.branch(number, branch)
        ]
    return Group(*parts)


def trajectory_legend(style: Style) -> Text:
    """Explains the kinds."""
    shown = Text()
    for kind, about in ABOUT.items():
        shown.append_text(_run(about, kind, 1.0 if kind == "sampled" else 0.0, style))
        shown.append("  ")
    return shown.append("↳B branch B leaves here  ⏎ line end  → tab")


@final
class _Drawn:
    """What all branches are drawn with."""

    def __init__(
        self,
        tree: TrajectoryTree,
        texts: Sequence[str],
        weights: Any,
        ids: Any,
        style: Style,
        max_tokens: int,
        log_probabilities: bool,
    ) -> None:
        self._tree, self._texts, self._weights, self._ids = tree, texts, weights, ids
        self._style, self._by_token = style, log_probabilities
        segments = sum(len(branch.segments) for branch in tree.branches)
        whole = len(texts) <= max_tokens
        self._each = len(texts) if whole else max(FEWEST, max_tokens // max(1, segments))

    def branch(self, number: int, branch: ShownBranch) -> Iterator[Any]:
        """The lines of one branch."""
        where = (
            f"from position {branch.position} of {letter_of(branch.parent)}"
            if branch.parent >= 0
            else "from the beginning"
        )
        yield Text.assemble(
            (f"{letter_of(number)} ", f"bold {colour_of(number)}"),
            (branch.label or "no path ends here", "bold"),
            f"  {plural(branch.end - branch.begin, 'token')} {where}",
        )
        for why in branch.why:
            yield Padding(Text(f"why: {why}", style="yellow"), (0, 0, 0, 2), expand=False)
        forks: dict[int, str] = {}
        for place, child in branch.forks:
            forks[place] = f"{forks.get(place, '')}↳{letter_of(child)}"
        for segment in branch.segments:
            if segment.title:
                kinds = self._tree.kinds[segment.begin : segment.end]
                # The first token may be that at the fork.
                kind = "sampled" if "sampled" in kinds else kinds[-1]
                look = LOOKS[kind].replace(" underline", "")
                about = f"  {segment.about}" if segment.about else ""
                title = Text.assemble((f"▌{segment.title}", look), about)
                yield Padding(title, (0, 0, 0, 2), expand=False)
            yield Padding(self._flow(segment, forks), (0, 0, 0, 2), expand=False)
            if self._by_token and segment.reply >= 0:
                yield Padding(self._table(segment), (0, 0, 0, 4), expand=False)

    def _flow(self, segment: Segment, forks: Mapping[int, str]) -> Text:
        """The text of a stretch; the middle of a long one is left out and counted."""
        begin, end = segment.begin, segment.end
        half = max(1, self._each // 2)
        left_out = end - begin - 2 * half if end - begin > self._each else 0
        pieces = [(begin, begin + half), (end - half, end)] if left_out else [(begin, end)]
        flow = Text(overflow="fold")
        for place, (first, last) in enumerate(pieces):
            if place:
                flow.append(f" …{left_out:,} tokens… ", "bold")
            for run in self._runs(first, last, forks):
                if run[0] in forks:
                    flow.append(forks[run[0]], "bold")
                text = marked("".join(self._texts[run[0] : run[1]])).replace("⏎⏎\n", "⏎\n")
                body = text.rstrip("\n")
                kind, weight = self._tree.kinds[run[0]], float(self._weights[run[0]])
                flow.append_text(_run(body, kind, weight, self._style)).append(text[len(body) :])
        flow.rstrip()
        return flow

    def _runs(self, begin: int, end: int, forks: Mapping[int, str]) -> Iterator[tuple[int, int]]:
        """[begin, end) of stretches of one kind and weight, which begin again at forks."""
        kinds = [LOOKS[kind] for kind in self._tree.kinds[begin:end]]
        new = np.cumsum([place in forks for place in range(begin, end)])
        weights = np.asarray(self._weights[begin:end])
        for first, last in stretches(np.array(kinds), weights, new):
            yield begin + first, begin + last

    def _table(self, segment: Segment) -> Table:
        """The tokens of a reply, one per line."""
        tree, table = self._tree, Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("token", no_wrap=True)
        for title in ("id", "log-probability", "probability", "weight", "advantage"):
            if title != "advantage" or tree.advantages:
                table.add_column(title, justify="right", no_wrap=True)
        places = tree.replies[segment.reply].places
        for place in places[: self._each]:
            table.add_row(*self._cells(place), style=LOOKS[tree.kinds[place]].split()[-1])
        if len(places) > self._each:
            table.add_row(Text(f"…{len(places) - self._each:,} more tokens"))
        return table

    def _cells(self, place: int) -> Iterator[Text]:
        tree = self._tree
        yield Text(in_a_line(self._texts[place]))
        yield Text(str(self._ids[place]))
        log = tree.log_probabilities[place] if tree.log_probabilities else None
        yield Text("–" if log is None else nats(log, 3))
        yield Text("–" if log is None else f"{math.exp(log):.1%}")
        yield Text(f"{self._weights[place]:g}")
        if tree.advantages:
            advantage = tree.advantages[place]
            yield Text("–" if advantage is None else f"{advantage:g}")


def _run(text: str, kind: str, weight: float, style: Style) -> Text:
    """Successive tokens of one kind."""
    if kind == "sampled" and weight != 1:
        return Text(f"⟨{weight:g}: {text}⟩" if style.marks else text, style=LOOKS[kind])
    if not style.marks:
        return Text(text, style=LOOKS[kind])
    name = "" if kind in ("rendered", "moved") else f"{kind}: "
    return Text(text if kind == "sampled" else f"⟦{name}{text}⟧")
