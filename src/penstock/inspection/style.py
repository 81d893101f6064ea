"""How a terminal shows what is trained: in colour, or by marks where there is no colour."""

from typing import final

from rich.console import Console
from rich.text import Text

from penstock.terminal import safe_console

COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
"""One after another for the documents of a row; neighbours differ."""


@final
class Style:
    """How to show what is only read, what is trained, and what is trained with another weight.

    In colour, tokens that are only read are dim and tokens with another weight underlined. Without, the first stand in
    ⟦ ⟧ and the second in ⟨weight: ⟩.
    """

    def __init__(self, console: Console) -> None:
        self.marks = not console.is_terminal or console.no_color
        self.width = console.width

    def run(self, text: str, weight: float, colour: str) -> Text:
        """Tokens in a row that have the same weight."""
        if weight == 0:
            return Text(f"⟦{text}⟧" if self.marks else text, style="" if self.marks else "dim strike")
        if weight == 1:
            return Text(text, style=colour)
        return Text(f"⟨{weight:g}: {text}⟩" if self.marks else text, style=f"{colour} underline")

    def legend(self, *, rewritten: bool = False) -> Text:
        """What the marks mean; those of rewritten documents too, where there are some."""
        if self.marks:
            added = "\n⟪0⟫ sentinel of span 0  ⟪0: words of span 0⟫  ⟪another token that is added⟫" if rewritten else ""
            return Text(f"⟦read, not trained⟧  trained  ⟨weight: trained with that weight⟩  ⏎ line end  → tab{added}")
        told: list[str | tuple[str, str]] = [
            ("read, not trained", "dim strike"), "  ", ("trained, a colour for each document", COLOURS[0]), "  ",
            ("trained with a weight other than 1", "underline"), "  ⏎ line end  → tab",
        ]  # fmt: skip
        if rewritten:
            told += ["\n", (" 0 ", f"{COLOURS[0]} reverse"), " sentinel of ", ("span 0", COLOURS[0]), "  "]
            told += [("another token that is added", "italic bold"), "  ", ("inputs that are read", "dim")]
        return Text.assemble(*told)


def make_console() -> Console:
    """The console that views go to: standard output, never wrapped when it is no terminal."""
    console = safe_console(soft_wrap=False)
    if not console.is_terminal:
        console.width = 120
    return console
