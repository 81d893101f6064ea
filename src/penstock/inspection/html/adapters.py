"""From what other rooms make to what the page shows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.chat.encoder import EncodedChat
from penstock.inspection.datasets import DocumentView
from penstock.inspection.html.views import Note, PageDocument

STRADDLING = 6
"""Straddling tokens of a conversation that are named."""


def from_dataset(view: DocumentView, control_ids: frozenset[int] = frozenset()) -> PageDocument:
    """A document of a dataset, which has no roles; its first token is never a target."""
    weights = np.array(view.loss_weights, np.float32)
    weights[:1] = 0
    ids = np.array(view.tokens, np.int64)
    return PageDocument(
        title=f"document {view.number}",
        origin=view.origin,
        pieces=view.texts,
        ids=ids,
        loss_weights=weights,
        is_control=np.isin(ids, list(control_ids)),
    )


def from_chat(
    encoded: EncodedChat, *, title: str, origin: str = "", special_tokens: Mapping[str, int] | None = None
) -> PageDocument:
    """A conversation as `penstock.chat.encode` returns it, with what its certificate says.

    Args:
        encoded: The conversation.
        title: What to call it.
        origin: File and line of its record.
        special_tokens: The tokenizer's control tokens, to name those that were appended and are not in the text.
    """
    certificate = encoded.certificate
    notes = [Note(problem.kind.replace("_", " "), str(problem)) for problem in certificate.problems]
    role_names = tuple(dict.fromkeys(encoded.roles))
    numbers = np.array([*(role_names.index(role) for role in encoded.roles), -1], np.int64)
    names = {token: text for text, token in (special_tokens or {}).items()}
    pieces = pieces_of(encoded.text, encoded.begins, encoded.ends)
    for place in np.flatnonzero(encoded.is_control & (encoded.begins == encoded.ends)).tolist():
        pieces[place] = names.get(int(encoded.tokens[place]), "")
    return PageDocument(
        title=title,
        origin=origin,
        pieces=pieces,
        ids=encoded.tokens,
        loss_weights=encoded.loss_weights,
        # The message −1 takes the last entry, −1.
        roles=numbers[encoded.messages],
        role_names=role_names,
        turns=encoded.messages,
        is_control=encoded.is_control,
        notes=notes,
        ok=certificate.ok,
        checks=(*certificate.checks, *_straddling(certificate.straddling)),
    )


def _straddling(tokens: Sequence[int]) -> list[str]:
    """The tokens at borders of what is trained; most conversations have some, so they are told and not noted."""
    if not tokens:
        return []
    named = ", ".join(f"{token:,}" for token in tokens[:STRADDLING])
    return [f"at borders, by their last character: {named}{', …' if len(tokens) > STRADDLING else ''}"]


def pieces_of(text: str, begins: Any, ends: Any) -> list[str]:
    """The text of each token, so that together they say each character once.

    A character that several tokens share is said by the last of them; the others say less, or nothing.

    Args:
        text: What was encoded.
        begins: First character of each token [n], never falling.
        ends: One after its last character [n].
    """
    begins, ends = np.asarray(begins).tolist(), np.asarray(ends).tolist()
    following = [*begins[1:], len(text)]
    return [text[begin : min(end, after)] for begin, end, after in zip(begins, ends, following, strict=True)]
