"""Tokens in a terminal: roles and trained tokens in colour, or with brackets instead of colours."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from penstock.core.terminal import safe_console
from penstock.data.shards.format.trees import BranchView
from penstock.use.inspection.page import readable
from penstock.use.inspection.page_model import PageDocument, first_words, with_blanks

COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
"""Colours for the documents of a row, in turn; neighbours differ."""


ROLE_COLOURS = {
    "assistant": "cyan",
    "user": "yellow",
    "system": "magenta",
    "tool": "green",
    "developer": "red",
}
"""Other roles are blue; text of the template around the turns is white."""


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def letter_of(number: int) -> str:
    """A letter for a document of a row, or a branch of a tree."""
    return LETTERS[number % len(LETTERS)]


def colour_of(number: int) -> str:
    """Its colour."""
    return COLOURS[number % len(COLOURS)]


@final
class Style:
    """How to show tokens that are only read, trained, or trained with a weight other than 1.

    In colour, tokens that are only read are dim, and tokens with another weight are underlined.
    Without colour, the former are in ⟦ ⟧ and the latter in ⟨weight: ⟩.
    """

    def __init__(self, console: Console) -> None:
        self.marks = not console.is_terminal or console.no_color
        self.width = console.width

    def run(self, text: str, weight: float, colour: str) -> Text:
        """Successive tokens of equal weight."""
        if weight == 0:
            return Text(
                f"⟦{text}⟧" if self.marks else text, style="" if self.marks else "dim strike"
            )
        if weight == 1:
            return Text(text, style=colour)
        return Text(f"⟨{weight:g}: {text}⟩" if self.marks else text, style=f"{colour} underline")

    def legend(self, *, rewritten: bool = False) -> Text:
        """Explains colours or brackets, including those of rewritten documents if there are any."""
        if self.marks:
            added = (
                "\n⟪0⟫ sentinel of span 0  ⟪0: words of span 0⟫  ⟪another token that is added⟫"
                if rewritten
                else ""
            )
            return Text(
                "⟦read, not trained⟧  trained  ⟨weight: trained with that weight⟩  ⏎ line "
                f"end  → tab{added}"
            )
        entries: list[str | tuple[str, str]] = [
            ("read, not trained", "dim strike"),
            "  ",
            ("trained, a colour for each document", COLOURS[0]),
            "  ",
            ("trained with a weight other than 1", "underline"),
            "  ⏎ line end  → tab",
        ]
        if rewritten:
            entries += [
                "\n",
                (" 0 ", f"{COLOURS[0]} reverse"),
                " sentinel of ",
                ("span 0", COLOURS[0]),
                "  ",
            ]
            entries += [
                ("another token that is added", "italic bold"),
                "  ",
                ("inputs that are read", "dim"),
            ]
        return Text.assemble(*entries)


def make_console() -> Console:
    """The console for views: standard output; if it is no terminal, with the width of COLUMNS, or
    of 120.
    """
    console = safe_console(soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120
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


def conversation_view(document: PageDocument, style: Style, max_tokens: int) -> Group:
    """A heading, the notes, and the text of each stretch of one role."""
    proven = {None: "", True: "  ✓ proven", False: "  ✗ not proven"}[document.ok]
    heading = (
        f"{document.title}  {document.origin}  {len(document.ids):,} tokens, "
        f"{document.trained_share:.1%} trained"
    )
    parts: list[Any] = [Text(heading + proven, style="bold")]
    parts += [Text(f"! {note[0]}: {readable(note[1])}", style="yellow") for note in document.notes]
    if document.branches:
        return Group(
            *parts,
            tree_view(document.branches, style.width),
            *_branches(document, style, max_tokens),
            Text(),
        )
    shown = min(len(document.ids), max_tokens)
    roles = np.full(shown, -1) if document.roles is None else np.asarray(document.roles)[:shown]
    for begin, end in _stretches(with_blanks(document.pieces, roles)):
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
        for first, last in _stretches(weights):
            text = _marked("".join(pieces[first:last]))
            body = text.rstrip("\n")
            flow.append_text(style.run(body, float(weights[first]), colour)).append(
                text[len(body) :]
            )
    else:
        for first, last in _stretches(weights, control):
            weight = float(weights[first])
            if weight not in (0.0, 1.0):
                flow.append(f"×{weight:g}", f"reverse {colour}")
            look = f"bold underline {colour}" if weight else "dim"
            flow.append(
                _marked("".join(pieces[first:last])), f"{look} italic" if control[first] else look
            )
    flow.rstrip()
    return flow


def _marked(text: str) -> str:
    """`text` with marks for line ends, which stay, and for tabs."""
    return readable(text).replace("\n", "⏎\n").replace("\t", "→")


def _stretches(*arrays: Any) -> list[tuple[int, int]]:
    """[begin, end) of each stretch in which none of the arrays [n] changes."""
    count = len(arrays[0])
    if count == 0:
        return []
    changes = np.any([array[1:] != array[:-1] for array in arrays], axis=0)
    starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
    return list(zip(starts, [*starts[1:], count], strict=True))


def tree_view(branches: Sequence[BranchView], width: int) -> Text:
    """One line per branch, offset and sized by its tokens."""
    longest = max(branch.position + branch.end - branch.begin for branch in branches)
    cells = min(width - 2, longest)
    drawn = Text()
    for number, branch in enumerate(branches):
        first = branch.position * cells // longest
        count = max(1, (branch.position + branch.end - branch.begin) * cells // longest - first)
        drawn.append(" " * first)
        drawn.append(letter_of(number) * count + "\n", style=f"reverse {colour_of(number)}")
    drawn.rstrip()
    return drawn
