"""Views of raw conversations: a page, with or without a comparison of settings, and a view in a
terminal.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock.core.json_values import JsonObject
from penstock.use.inspection.conversations import REFUSED, ShownConversations, reason_of
from penstock.use.inspection.page_model import (
    Note,
    PageData,
    PageDocument,
    histograms_of,
    shares_of,
)
from penstock.use.inspection.rows import RowView
from penstock.use.inspection.terminal_style import Style
from penstock.use.inspection.terminal_tokens import conversation_view, documents_list, legend

NAMED = 5
"""Maximum number of reasons for refusal that a terminal lists."""


def page_of_conversations(
    title: str,
    shown: ShownConversations,
    other: ShownConversations | None = None,
    *,
    rows: Sequence[RowView] = (),
) -> PageData:
    """The page of conversations.

    Args:
        title: Title of the page.
        shown: The conversations.
        other: The same records under other settings, for a comparison.
        rows: Packed rows to show as well.
    """
    documents = shown.flat
    right, label = None, ""
    if other is not None:
        pairs = [
            pair
            for mine, theirs in zip(shown.documents, other.documents, strict=True)
            for pair in zip_longest(mine, theirs)
        ]
        documents = [mine or _absent(theirs) for mine, theirs in pairs]
        label, changed = changed_settings(shown.settings, other.settings)
        if ", " in label:
            # The page lists the settings next to the label anyway.
            label, changed = "as set", "changed"
        right = PageData(
            title=title,
            label=changed,
            settings=other.settings,
            documents=[theirs or _absent(mine) for mine, theirs in pairs],
        )
    taken = [document for document in shown.flat if document.ok]
    return PageData(
        title=title,
        label=label,
        settings=shown.settings,
        summary=summary_of(shown),
        documents=documents,
        rows=rows,
        histograms=histograms_of(taken),
        shares=shares_of(taken),
        control_ids=frozenset(shown.encoder.tokenizer.special_tokens.values()),
        other=right,
    )


def conversations_view(
    shown: ShownConversations,
    style: Style,
    count: int,
    max_tokens: int,
    other: ShownConversations | None = None,
) -> Group:
    """Some of the conversations for a terminal, then the figures and the reasons for refusals.

    Args:
        shown: The conversations.
        style: How the terminal shows trained tokens.
        count: Number of conversations to show in full, evenly spread.
        max_tokens: Maximum number of tokens to show of each.
        other: The same records under other settings, shown after each conversation.
    """
    parts: list[Any] = []
    ours, theirs = ("", "") if other is None else changed_settings(shown.settings, other.settings)
    for number in spread(count, len(shown.documents)):
        sides = [(ours, shown.documents[number])]
        if other is not None:
            same = _same(shown.documents[number], other.documents[number])
            sides = (
                [("the same under both", sides[0][1])]
                if same
                else [*sides, (theirs, other.documents[number])]
            )
        for label, documents in sides:
            parts += [Text(f"── {label}", style="bold reverse")] if label else []
            parts += [conversation_view(document, style, max_tokens) for document in documents]
    if parts:
        parts += [legend(style), Text()]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    named = {name: shown.settings[name] for name in ("tokenizer", "template", "family")}
    rest = (f"{name} {value}" for name, value in shown.settings.items() if name not in named)
    for name, value in {**named, "settings": ", ".join(rest), **summary_of(shown)}.items():
        table.add_row(name, str(value))
    parts.append(table)
    parts += [Text(line, style="red") for line in _reasons(shown.refused)]
    return Group(*parts)


def conversations_list(shown: ShownConversations, count: int) -> Table:
    """A line for each document of at most `count` conversations, evenly spread."""
    return documents_list(
        [each for place in spread(count, len(shown.documents)) for each in shown.documents[place]]
    )


def conversations_as_json(shown: ShownConversations) -> JsonObject:
    """Settings, figures and reasons for refusals as plain values."""
    return {
        "settings": shown.settings,
        "summary": summary_of(shown),
        "refused": [
            {"origin": document.origin, "reason": reason_of(document)} for document in shown.refused
        ],
    }


def summary_of(shown: ShownConversations) -> JsonObject:
    """Counts over the shown conversations, as text."""
    documents = shown.flat
    proven = [document for document in documents if document.ok]
    tokens = sum(len(document.ids) for document in proven)
    trained = sum(document.trained for document in proven)
    kinds = Counter(kind for document in documents for kind in {note[0] for note in document.notes})
    records = f"{len(shown.documents):,}"
    if len(shown.documents) < shown.total:
        records += f" of {shown.total:,}"
    if len(documents) != len(shown.documents):
        records += f"; they became {len(documents):,} documents"
    return {
        "conversations": records,
        "layout": shown.layout,
        "proven": f"{len(proven):,}",
        "their tokens": f"{tokens:,}",
        "trained": f"{trained:,} ({trained / max(1, tokens):.1%})",
        REFUSED: f"{len(shown.refused):,}",
        **{f"note: {kind}": f"{count:,}" for kind, count in kinds.most_common() if kind != REFUSED},
    }


def changed_settings(mine: dict[str, str], theirs: dict[str, str]) -> tuple[str, str]:
    """Labels for two groups of settings, from the settings that differ."""
    # Unless it is set, train_on_eot has the value of train_on_eos.
    plain = [
        {**side, "train_on_eot": ""}
        if side.get("train_on_eot") == side.get("train_on_eos")
        else side
        for side in (mine, theirs)
    ]
    names = [name for name in {**mine, **theirs} if plain[0].get(name) != plain[1].get(name)]
    if not names:
        return "these settings", "the same settings"
    ours, others = (
        ", ".join(f"{name}={side.get(name, 'none')}" for name in names) for side in (mine, theirs)
    )
    return ours, others


def _same(mine: Sequence[PageDocument], theirs: Sequence[PageDocument]) -> bool:
    """Whether two settings give the same tokens, weights and notes."""
    return len(mine) == len(theirs) and all(
        np.array_equal(left.ids, right.ids)
        and np.array_equal(left.loss_weights, right.loss_weights)
        and left.notes == right.notes
        for left, right in zip(mine, theirs, strict=True)
    )


def _reasons(refused: Sequence[PageDocument]) -> Iterator[str]:
    """The reasons for refusals, the most frequent first, each with the origin of its first
    record.
    """
    first = {reason_of(document): document.origin for document in reversed(refused)}
    found = Counter(reason_of(document) for document in refused).most_common()
    for reason, count in found[:NAMED]:
        yield f"✗ {first[reason]}{f' and {count - 1:,} more' if count > 1 else ''}: {reason}"
    if len(found) > NAMED:
        yield f"… and {len(found) - NAMED:,} other reasons; set html to a file to see all"


def _absent(other: PageDocument) -> PageDocument:
    """Placeholder for a document that only the other settings make."""
    nothing = np.zeros(0, np.int64)
    return PageDocument(
        title=other.title,
        origin=other.origin,
        pieces=(),
        ids=nothing,
        loss_weights=nothing.astype(np.float32),
        notes=(Note("absent", "these settings make no such document"),),
    )


def spread(count: int, total: int) -> list[int]:
    """At most `count` numbers from 0 to `total` − 1, evenly spread."""
    return (
        [total * place // count for place in range(count)] if count < total else list(range(total))
    )
