"""Tokens in a terminal: roles and trained tokens in colour, or with brackets instead of colours."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from penstock.core.terminal import safe_console
from penstock.use.inspection.page import readable
from penstock.use.inspection.page_model import PageDocument, first_words, with_blanks
from penstock.use.inspection.terminal_style import Style, colour_of, marked, stretches, tree_view
from penstock.use.inspection.terminal_trajectories import trajectory_view

ROLE_COLOURS = {
    "assistant": "cyan",
    "user": "yellow",
    "system": "magenta",
    "tool": "green",
    "developer": "red",
}
"""Other roles are blue; text of the template around the turns is white."""


def make_console() -> Console:
    """The console for views: standard output; if it is no terminal, with the width of COLUMNS,
    else of 96 in a notebook and of 120 elsewhere.
    """
    console = safe_console(soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 96 if console.is_jupyter else 120
    return console


def print_document(
    document: PageDocument, console: Console | None = None, *, max_tokens: int = 2000
) -> None:
    """Print a document as it is trained.

    Args:
        document: The document.
        console: Where to print; None = standard output.
        max_tokens: Maximum number of tokens to print; a note gives the number of the others.
    """
    console = console or make_console()
    style = Style(console)
    console.print(conversation_view(document, style, max_tokens))
    console.print(legend(style))


def documents_list(documents: Sequence[PageDocument]) -> Table:
    """A line for each document: its title, whether its mask is proven, tokens, trained share, and
    first words.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("trained", justify="right", no_wrap=True)
    table.add_column("first words", no_wrap=True, overflow="ellipsis")
    for document in documents:
        mark = {None: "", True: "✓ ", False: "✗ "}[document.ok]
        title = Text.assemble((mark, "green" if document.ok else "red"), document.title)
        words = Text(readable(first_words(document)))
        table.add_row(title, f"{len(document.ids):,}", f"{document.trained_share:.0%}", words)
    return table


def conversation_view(
    document: PageDocument, style: Style, max_tokens: int, *, log_probabilities: bool = False
) -> Group:
    """A heading, the notes, and the text of each stretch of one role, or of each branch.

    Args:
        document: The document.
        style: How the terminal shows trained tokens.
        max_tokens: Maximum number of tokens to show.
        log_probabilities: Of trajectories, also a line for each sampled token.
    """
    proven = {None: "", True: "  ✓ proven", False: "  ✗ not proven"}[document.ok]
    heading = (
        f"{document.title}  {document.origin}  {len(document.ids):,} tokens, "
        f"{document.trained_share:.1%} trained"
    )
    parts: list[Any] = [Text(heading + proven, style="bold")]
    parts += [Text(f"! {note[0]}: {readable(note[1])}", style="yellow") for note in document.notes]
    if document.trajectory is not None:
        tree = trajectory_view(
            document.trajectory, document.pieces, document.loss_weights, document.ids, style,
            max_tokens, log_probabilities=log_probabilities,
        )  # fmt: skip
        return Group(*parts, tree, Text())
    if document.branches:
        return Group(
            *parts,
            tree_view(document.branches, style.width),
            *_branches(document, style, max_tokens),
            Text(),
        )
    shown = min(len(document.ids), max_tokens)
    roles = np.full(shown, -1) if document.roles is None else np.asarray(document.roles)[:shown]
    for begin, end in stretches(with_blanks(document.pieces, roles)):
        role = int(roles[begin])
        name = document.role_names[role] if role >= 0 else "template"
        colour = ROLE_COLOURS.get(name, "blue") if role >= 0 else "white"
        if document.roles is not None:
            parts.append(Text(f"▌ {name}", style=f"bold {colour}"))
        parts.append(
            Padding(_flow(document, begin, end, colour, style), (0, 0, 0, 2), expand=False)
        )
    if shown < len(document.ids):
        parts.append(Text(f"…{len(document.ids) - shown:,} more tokens", style="bold"))
    return Group(*parts, *_reasons(document), Text())


def _reasons(document: PageDocument) -> Iterator[Text]:
    """A line for each reason why tokens are not trained, the most frequent first."""
    counts = Counter(reason for reason in document.reasons or () if reason)
    width = len(f"{max(counts.values(), default=0):,}")
    for reason, count in counts.most_common():
        yield Text(f"not trained: {count:>{width},}  {reason}", style="dim")


def _branches(document: PageDocument, style: Style, max_tokens: int) -> Iterator[Any]:
    """A heading and the text of each branch of a prefix tree; a long one is cut."""
    each = max(2, max_tokens // len(document.branches))
    for number, branch in enumerate(document.branches):
        colour = colour_of(number)
        yield Text(f"▌ {branch}", style=f"bold {colour}")
        end = min(branch.end, branch.begin + each)
        yield Padding(_flow(document, branch.begin, end, colour, style), (0, 0, 0, 2), expand=False)
        if end < branch.end:
            yield Text(f"…{branch.end - end:,} more tokens", style="bold")


def legend(style: Style) -> Text:
    """Explains colours or brackets."""
    if style.marks:
        return Text.assemble("⟪control token⟫  ", style.legend())
    return Text.assemble(
        ("read, not trained", "dim"),
        "  ",
        ("trained, in the colour of its role", "bold underline cyan"),
        "  ",
        ("×0.5", "reverse"),
        " weight of what follows  ",
        ("control token", "dim italic"),
        "  ⏎ line end  → tab",
    )


def _flow(document: PageDocument, begin: int, end: int, colour: str, style: Style) -> Text:
    weights = np.asarray(document.loss_weights)[begin:end]
    control = (
        np.zeros(end - begin, bool)
        if document.is_control is None
        else np.asarray(document.is_control)[begin:end]
    )
    pieces = list(document.pieces[begin:end])
    flow = Text(overflow="fold")
    if style.marks:
        pieces = [
            f"⟪{piece}⟫" if special and piece else piece
            for piece, special in zip(pieces, control, strict=True)
        ]
        for first, last in stretches(weights):
            text = marked("".join(pieces[first:last]))
            body = text.rstrip("\n")
            flow.append_text(style.run(body, float(weights[first]), colour)).append(
                text[len(body) :]
            )
    else:
        for first, last in stretches(weights, control):
            weight = float(weights[first])
            if weight not in (0.0, 1.0):
                flow.append(f"×{weight:g}", f"reverse {colour}")
            look = f"bold underline {colour}" if weight else "dim"
            flow.append(
                marked("".join(pieces[first:last])), f"{look} italic" if control[first] else look
            )
    flow.rstrip()
    return flow
