"""The same documents in a terminal: roles and trained tokens in colour, or by marks where there is no colour."""

from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from penstock.inspection.html.payload import readable
from penstock.inspection.html.views import PageDocument
from penstock.inspection.style import Style, make_console

ROLE_COLOURS = {"assistant": "cyan", "user": "yellow", "system": "magenta", "tool": "green", "developer": "red"}
"""Others are blue; what a template writes around the turns is white."""


def print_document(document: PageDocument, console: Console | None = None, *, max_tokens: int = 2000) -> None:
    """Print a document as it is trained.

    Args:
        document: What to print.
        console: Where to; None = standard output.
        max_tokens: Tokens that are printed at most; how many were left out is said.
    """
    console = console or make_console()
    style = Style(console)
    console.print(conversation_view(document, style, max_tokens))
    console.print(legend(style))


def conversation_view(document: PageDocument, style: Style, max_tokens: int) -> Group:
    """A heading, the notes, and the text of each stretch of one role."""
    proven = {None: "", True: "  ✓ proven", False: "  ✗ not proven"}[document.ok]
    heading = f"{document.title}  {document.origin}  {len(document.ids):,} tokens, {document.trained_share:.1%} trained"
    parts: list[Any] = [Text(heading + proven, style="bold")]
    parts += [Text(f"! {note[0]}: {readable(note[1])}", style="yellow") for note in document.notes]
    shown = min(len(document.ids), max_tokens)
    roles = np.full(shown, -1) if document.roles is None else np.asarray(document.roles)[:shown]
    for begin, end in _stretches(_with_blanks(document, roles)):
        role = int(roles[begin])
        name = document.role_names[role] if role >= 0 else "template"
        colour = ROLE_COLOURS.get(name, "blue") if role >= 0 else "white"
        if document.roles is not None:
            parts.append(Text(f"▌ {name}", style=f"bold {colour}"))
        parts.append(Padding(_flow(document, begin, end, colour, style), (0, 0, 0, 2), expand=False))
    if shown < len(document.ids):
        parts.append(Text(f"…{len(document.ids) - shown:,} more tokens", style="bold"))
    return Group(*parts, Text())


def _with_blanks(document: PageDocument, roles: Any) -> Any:
    """Roles [n] in which blank text that nobody says belongs to the turn before it, as it is read."""
    roles = roles.copy()
    for place in (np.flatnonzero(roles[1:] < 0) + 1).tolist():
        if not document.pieces[place].strip():
            roles[place] = roles[place - 1]
    return roles


def legend(style: Style) -> Text:
    """What the marks mean."""
    if style.marks:
        return Text.assemble("⟪control token⟫  ", style.legend())
    return Text.assemble(
        ("read, not trained", "dim"), "  ", ("trained, in the colour of its role", "bold underline cyan"), "  ",
        ("×0.5", "reverse"), " weight of what follows  ", ("control token", "dim italic"), "  ⏎ line end  → tab",
    )  # fmt: skip


def _flow(document: PageDocument, begin: int, end: int, colour: str, style: Style) -> Text:
    weights = np.asarray(document.loss_weights)[begin:end]
    control = np.zeros(end - begin, bool) if document.is_control is None else np.asarray(document.is_control)[begin:end]
    pieces = list(document.pieces[begin:end])
    flow = Text(overflow="fold")
    if style.marks:
        pieces = [f"⟪{piece}⟫" if special else piece for piece, special in zip(pieces, control, strict=True)]
        for first, last in _stretches(weights):
            text = _marked("".join(pieces[first:last]))
            body = text.rstrip("\n")
            flow.append_text(style.run(body, float(weights[first]), colour)).append(text[len(body) :])
    else:
        for first, last in _stretches(weights, control):
            weight = float(weights[first])
            if weight not in (0.0, 1.0):
                flow.append(f"×{weight:g}", f"reverse {colour}")
            look = f"bold underline {colour}" if weight else "dim"
            flow.append(_marked("".join(pieces[first:last])), f"{look} italic" if control[first] else look)
    flow.rstrip()
    return flow


def _marked(text: str) -> str:
    """Line ends are marked and kept, so that the text reads as text; tabs are marked."""
    return readable(text).replace("\n", "⏎\n").replace("\t", "→")


def _stretches(*arrays: Any) -> list[tuple[int, int]]:
    """[begin, end) of each stretch in which none of the arrays [n] changes."""
    count = len(arrays[0])
    if count == 0:
        return []
    changes = np.any([array[1:] != array[:-1] for array in arrays], axis=0)
    starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
    return list(zip(starts, [*starts[1:], count], strict=True))
