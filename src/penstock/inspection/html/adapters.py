"""From what other rooms make to what the page shows."""

from typing import Any

import numpy as np

from penstock.inspection.datasets import DocumentView
from penstock.inspection.html.views import Note, PageDocument


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


def from_chat(encoded: Any, *, title: str, origin: str = "") -> PageDocument:
    """A conversation as `penstock.chat.encode` returns it, with what its certificate says.

    Args:
        encoded: An `EncodedChat`: text, tokens, weights, roles and certificate.
        title: What to call it.
        origin: File and line of its record.
    """
    certificate = encoded.certificate
    notes = [Note(problem.kind.replace("_", " "), str(problem)) for problem in certificate.problems]
    if len(certificate.straddling):
        tokens = ", ".join(map(str, certificate.straddling))
        notes.append(Note("straddling", f"tokens at the border of what is trained, by their last character: {tokens}"))
    return PageDocument(
        title=title,
        origin=origin,
        pieces=pieces_of(encoded.text, encoded.begins, encoded.ends),
        ids=np.asarray(encoded.tokens),
        loss_weights=np.asarray(encoded.loss_weights),
        roles=np.asarray(encoded.roles),
        role_names=tuple(encoded.role_names),
        is_control=np.asarray(encoded.is_control),
        notes=notes,
        ok=certificate.ok,
        checks=certificate.checks,
    )


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
