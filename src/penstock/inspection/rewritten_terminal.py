"""A rewritten document in a terminal: its parts one after another, and then the document as it was.

A sentinel is told by the number of its span, in the span's colour, where it stands in the inputs and where it stands
before the span: so a hole and what belongs in it are found at a glance.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.padding import Padding
from rich.text import Text

from penstock.inspection.rewritten import Stretch
from penstock.inspection.rows import RowDocument, RowView
from penstock.inspection.style import COLOURS, Style

CHARACTERS = 5
"""Of the document as it was, for each token that may be shown."""
FEW = 4
"""Parts of a document, spans among them, that are each shown from both ends where they are long."""


def parts_of_document(row: RowView, document: RowDocument, weights: Any, style: Style, max_tokens: int) -> list[Any]:
    """What is printed of one document below its heading.

    Args:
        row: Its row.
        document: One that has stretches.
        weights: [T] how much each slot counts as a target.
        style: How the terminal shows what is trained.
        max_tokens: Tokens of each part that are shown, at most.
    """
    lines: list[Any] = []
    for name, group in groupby(document.stretches, key=lambda each: each.part):
        stretches = list(group)
        begin, end = stretches[0].begin, stretches[-1].end
        seen = ", see each other" if end - document.begin <= document.prefix else ""
        lines.append(_label(name, f"{end - begin:,} {'slot' if end - begin == 1 else 'slots'}{seen}"))
        lines.append(_indented(_flow(row, stretches, weights, style, max_tokens)))
    if document.restored:
        lines += [_label("as it was", ""), _indented(_as_it_was(document, style, CHARACTERS * max_tokens))]
    return lines


def _label(name: str, about: str) -> Text:
    return Text.assemble((f"  ▌{name}", "bold"), f"  {about}")


def _indented(flow: Text) -> Padding:
    return Padding(flow, (0, 0, 0, 3), expand=False)


def _flow(row: RowView, stretches: list[Stretch], weights: Any, style: Style, max_tokens: int) -> Text:
    """The tokens of a part; the middle of what is long is left out, and counted."""
    begin, end = stretches[0].begin, stretches[-1].end
    half = max(1, max_tokens // 2)
    left_out = range(begin + half, end - half) if end - begin > max_tokens else range(end, end)
    flow = Text(overflow="fold")
    waiting: list[tuple[str, float | None, str]] = []
    for stretch in stretches:
        for slot in range(stretch.begin, stretch.end):
            if slot in left_out:
                if slot == left_out.start:
                    waiting.append((f" …{len(left_out):,} tokens… ", None, "bold"))
                continue
            waiting.append((_said(row.texts[slot], stretch, style), float(weights[slot]), _look(stretch, style)))
    # Without colours neighbours of one weight stand in one pair of marks.
    for (weight, look), group in groupby(waiting, key=lambda unit: (unit[1], "" if style.marks else unit[2])):
        text = "".join(unit[0] for unit in group)
        if weight is None or (weight == 0 and not style.marks):
            flow.append(text, f"{look} dim" if weight == 0 else "bold")
        else:
            flow.append_text(style.run(text, weight, look))
    return flow


def _said(text: str, stretch: Stretch, style: Style) -> str:
    """A token, or the number of the span that it stands for."""
    if stretch.role == "sentinel":
        return f"⟪{stretch.span}⟫" if style.marks else f" {stretch.span} "
    return f"⟪{text}⟫" if stretch.is_added and style.marks else text


def _look(stretch: Stretch, style: Style) -> str:
    """Colour and more of a stretch whose tokens are trained."""
    colour = COLOURS[stretch.span % len(COLOURS)] if stretch.span >= 0 else "default"
    if stretch.role == "sentinel":
        return f"{colour} reverse"
    return f"{colour} italic bold" if stretch.is_added else colour


def _as_it_was(document: RowDocument, style: Style, characters: int) -> Text:
    """The text before it was rewritten, spans underlined in their colours, or in marks with their numbers."""
    flow = Text(overflow="fold")
    for text, span in _shortened(list(document.restored), characters):
        if span is None:
            flow.append(text, "bold")
        elif span < 0:
            flow.append(text)
        elif style.marks:
            flow.append(f"⟪{span}: {text}⟫")
        else:
            flow.append(text, f"underline {COLOURS[span % len(COLOURS)]}")
    return flow


def _shortened(parts: list[tuple[str, int]], characters: int) -> Iterator[tuple[str, int | None]]:
    """Few long parts lose their middles; of many the ones in the middle are left out. What tells so has no span."""
    if len(parts) > FEW:
        total, at = sum(len(text) for text, _ in parts), 0
        told = total <= characters
        for text, span in parts:
            if total <= characters or not characters / 2 <= at < total - characters / 2:
                yield text, span
            elif not told:
                yield f" …{total - characters:,} characters… ", None
                told = True
            at += len(text)
        return
    half = characters // len(parts) // 2
    for text, span in parts:
        if len(text) <= 2 * half:
            yield text, span
            continue
        yield text[:half], span
        yield f" …{len(text) - 2 * half:,} characters… ", None
        yield text[-half:], span
