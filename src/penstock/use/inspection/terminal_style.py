"""Marks of a terminal: colours, or brackets instead of colours; letters of documents and branches;
line ends.
"""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from rich.console import Console
from rich.text import Text

from penstock.data.shards.format.trees import BranchView
from penstock.use.inspection.page import readable
from penstock.use.inspection.rows import RowView
from penstock.use.inspection.trajectories import ShownBranch

COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
"""Colours for the documents of a row, in turn; neighbours differ."""


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


def marked(text: str) -> str:
    """`text` with marks for line ends, which stay, and for tabs."""
    return readable(text).replace("\n", "⏎\n").replace("\t", "→")


def stretches(*arrays: Any) -> list[tuple[int, int]]:
    """[begin, end) of each stretch in which none of the arrays [n] changes."""
    count = len(arrays[0])
    if count == 0:
        return []
    changes = np.any([array[1:] != array[:-1] for array in arrays], axis=0)
    starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
    return list(zip(starts, [*starts[1:], count], strict=True))


def tree_view(branches: Sequence[BranchView | ShownBranch], width: int) -> Text:
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


def row_strip(row: RowView, width: int) -> Text:
    """The whole row in one line: letters for documents, dots for padding."""
    cells = min(width - 2, row.sequence_length)
    owners = [-1] * row.sequence_length
    for number, document in enumerate(row.documents):
        owners[document.begin : document.end] = [number] * (document.end - document.begin)
    strip = Text()
    for cell in range(cells):
        owner = owners[(2 * cell + 1) * row.sequence_length // (2 * cells)]
        strip.append(
            *("·", "dim") if owner < 0 else (letter_of(owner), f"reverse {colour_of(owner)}")
        )
    return strip
