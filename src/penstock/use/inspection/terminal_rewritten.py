"""Documents that an objective rewrote, in a terminal: part by part, then in their original form.

A sentinel appears as the number of its span, in the span's colour, both in the inputs and before
the span, so a gap and its text are easy to match. A mask appears as the words that it stands for.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.padding import Padding
from rich.text import Text

from penstock.use.inspection.rows import RowDocument, RowView
from penstock.use.inspection.stretches import PREDICTING, STANDING, Stretch
from penstock.use.inspection.terminal_style import COLOURS, Style

CHARACTERS = 5
"""Characters of an original document to show, per token of the limit."""
FEW = 4
"""Up to this number of parts (including spans), long ones are each shown from both ends."""
MOST_PARTS = 12
"""Maximum number of parts to show of a document, from both ends."""


def parts_of_document(
    row: RowView, document: RowDocument, weights: Any, style: Style, max_tokens: int
) -> list[Any]:
    """The lines of a rewritten document below its heading.

    Args:
        row: Its row.
        document: A document with stretches.
        weights: [T] loss weight of each slot as a target.
        style: How the terminal shows trained tokens.
        max_tokens: Maximum number of tokens to show of each part.
    """
    lines: list[Any] = []
    parts = [
        (name, list(group)) for name, group in groupby(document.stretches, lambda each: each.part)
    ]
    half = MOST_PARTS // 2
    left_out = range(half, len(parts) - half) if len(parts) > MOST_PARTS else range(0)
    for number, (name, stretches) in enumerate(parts):
        if number in left_out:
            if number == left_out.start:
                lines.append(Text(f"  …{len(left_out):,} more parts…", style="bold"))
            continue
        begin, end = stretches[0].begin, stretches[-1].end
        slots = f"{end - begin:,} {'slot' if end - begin == 1 else 'slots'}"
        noise = noise_text(stretches) if document.own_targets else ""
        lines.append(_label(name, f"{slots}{_seen(document, begin, end)}{noise}"))
        lines.append(_indented(_rewritten_flow(row, stretches, weights, style, max_tokens)))
    if document.restored:
        lines += [
            _label("as it was", ""),
            _indented(_as_it_was(document, style, CHARACTERS * max_tokens)),
        ]
    return lines


def noise_text(stretches: Sequence[Stretch]) -> str:
    """How much of a part with own targets predicts something, and the level of its noise."""
    predicted = sum(each.end - each.begin for each in stretches if each.role in PREDICTING)
    level = next((each.level for each in stretches if each.level is not None), None)
    if level is not None:
        return f"; noise {level:.2f}, {predicted:,} masked, each ×{1 / level:.3g}"
    if not predicted:
        return ", only read"
    return f"; {predicted:,} predicted"


def _seen(document: RowDocument, begin: int, end: int) -> str:
    """How many of the slots of a part see each other, in words."""
    seen = min(end, document.begin + document.prefix) - begin
    if seen == end - begin and seen > int(document.own_targets):
        return ", see each other"
    return f", {seen:,} see each other" if document.own_targets and seen > 1 else ""


def _label(name: str, about: str) -> Text:
    return Text.assemble((f"  ▌{name}", "bold"), f"  {about}")


def _indented(flow: Text) -> Padding:
    return Padding(flow, (0, 0, 0, 3), expand=False)


def _rewritten_flow(
    row: RowView, stretches: list[Stretch], weights: Any, style: Style, max_tokens: int
) -> Text:
    """The tokens of a part; the middle of a long one is left out and counted."""
    begin, end = stretches[0].begin, stretches[-1].end
    half = max(1, max_tokens // 2)
    left_out = range(begin + half, end - half) if end - begin > max_tokens else range(end, end)
    flow = Text(overflow="fold")
    waiting: list[tuple[str, float | None, str]] = []
    for stretch in stretches:
        for slots in _shown_slots(stretch, left_out):
            if slots is left_out:
                waiting.append((f" …{len(left_out):,} tokens… ", None, "bold"))
            elif stretch.role in PREDICTING:
                waiting.append(_predicted(row, stretch, slots, weights, style))
            else:
                look = _look(stretch, style)
                waiting += [
                    (_said(row.texts[slot], stretch, style), float(weights[slot]), look)
                    for slot in slots
                ]
    # Without colours, neighbours of equal weight share one pair of brackets.
    for (weight, look), group in groupby(
        waiting, key=lambda unit: (unit[1], "" if style.marks else unit[2])
    ):
        text = "".join(unit[0] for unit in group)
        if weight is None or (weight == 0 and not style.marks):
            flow.append(text, f"{look} dim" if weight == 0 else "bold")
        else:
            flow.append_text(style.run(text, weight, look))
    return flow


def _shown_slots(stretch: Stretch, left_out: range) -> Iterator[range]:
    """The slots of a stretch before and after those that are left out, and these where they
    begin.
    """
    before = range(stretch.begin, min(stretch.end, left_out.start))
    after = range(max(stretch.begin, left_out.stop), stretch.end)
    if before:
        yield before
    if stretch.begin <= left_out.start < stretch.end and left_out:
        yield left_out
    if after and left_out:
        yield after


def _predicted(
    row: RowView, stretch: Stretch, slots: range, weights: Any, style: Style
) -> tuple[str, float, str]:
    """Slots with targets of their own: what they show, and what they must predict. The weight is
    given without what the level of noise makes of it.
    """
    wanted = "".join(row.target_texts[slot] for slot in slots)
    shown = "".join(row.texts[slot] for slot in slots)
    weight = float(weights[slots.start]) * (stretch.level or 1.0)
    weight = 1.0 if abs(weight - 1) < 1e-4 else weight
    if stretch.role == "kept":
        text = f"⟪=: {wanted}⟫" if style.marks else wanted
    elif stretch.role == "masked":
        text = f"⟪_: {wanted}⟫" if style.marks else wanted
    else:
        text = f"⟪{shown}: {wanted}⟫" if style.marks else f"{shown}→{wanted}"
    look = "underline" if stretch.role == "kept" else "reverse"
    return text, weight, f"{COLOURS[0]} {look}"


def _said(text: str, stretch: Stretch, style: Style) -> str:
    """The text of a token, or the number of the span that a sentinel represents."""
    if stretch.role == "sentinel":
        return f"⟪{stretch.span}⟫" if style.marks else f" {stretch.span} "
    return f"⟪{text}⟫" if stretch.is_added and style.marks else text


def _look(stretch: Stretch, style: Style) -> str:
    """Style of a stretch if its tokens are trained."""
    colour = COLOURS[stretch.span % len(COLOURS)] if stretch.span >= 0 else "default"
    if stretch.role == "sentinel":
        return f"{colour} reverse"
    return f"{colour} italic bold" if stretch.is_added else colour


def legend_of_rows(rows: Sequence[RowView], style: Style) -> Text:
    """Explains the colours or brackets of rows."""
    rewritten = [part for row in rows for part in row.documents if part.stretches]
    legend = style.legend(rewritten=any(not part.own_targets for part in rewritten))
    own = [part for part in rewritten if part.own_targets]
    roles = {each.role for part in own for each in part.stretches}
    added = any(each.is_added and each.role not in STANDING for p in own for each in p.stretches)
    entries = [
        ("masked" in roles, "⟪_: words that masks stand for⟫", "words that masks stand for"),
        ("kept" in roles, "⟪=: words shown and predicted⟫", "words shown and predicted"),
        (bool(roles & {"replaced", "predicts"}), "⟪shown: predicted⟫", "shown→predicted"),
        (added, "⟪another token that is added⟫", "another token that is added"),
    ]
    looks = (f"{COLOURS[0]} reverse", f"{COLOURS[0]} underline", COLOURS[0], "italic bold")
    found = [
        Text(marked) if style.marks else Text(plain, look)
        for (there, marked, plain), look in zip(entries, looks, strict=True)
        if there
    ]
    return Text.assemble(legend, "\n", Text("  ").join(found)) if found else legend


def _as_it_was(document: RowDocument, style: Style, characters: int) -> Text:
    """The original text, with spans underlined in their colours, or in brackets with their
    numbers.
    """
    flow = Text(overflow="fold")
    for text, span in _shortened(list(document.restored), characters):
        if span is None:
            flow.append(text, "bold")
        elif span < 0:
            flow.append(text)
        elif style.marks:
            flow.append(f"⟪_: {text}⟫" if document.own_targets else f"⟪{span}: {text}⟫")
        else:
            colour = COLOURS[0 if document.own_targets else span % len(COLOURS)]
            flow.append(text, f"underline {colour}")
    return flow


def _shortened(parts: list[tuple[str, int]], characters: int) -> Iterator[tuple[str, int | None]]:
    """Shorten a text: few parts each lose their middle; of many parts, the middle ones go. Notes
    have span None.
    """
    if len(parts) > FEW:
        total, at = sum(len(text) for text, _ in parts), 0
        noted = total <= characters
        for text, span in parts:
            if total <= characters or not characters / 2 <= at < total - characters / 2:
                yield text, span
            elif not noted:
                yield f" …{total - characters:,} characters… ", None
                noted = True
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
