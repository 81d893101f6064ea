"""Contents of a page, as plain values: documents token by token, packed rows, and figures.

A file of conversations, a dataset and a mixture share one page: `from_chat` and `from_dataset`
convert their documents. `histograms_of` and `shares_of` compute the default figures: lengths,
trained shares, and tokens by role.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

import numpy as np

from penstock.chat.encoded_chat import EncodedChat
from penstock.core.arrays import Array
from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping
from penstock.data.shards.format.trees import BranchView
from penstock.use.inspection.datasets import DocumentView
from penstock.use.inspection.images import ShownImage, images_of_chat, with_labels
from penstock.use.inspection.rows import RowView
from penstock.use.inspection.trajectories import TrajectoryTree

BINS = 24
WORDS = 90
"""Maximum characters of a document's first words."""
SAID_BEFORE = ("system", "developer")
"""Roles whose messages often begin all conversations alike."""
HEADERS = "user|human|assistant|model|gpt"
"""Names that templates write around turns, besides the role itself."""
STRADDLING = 6
"""Maximum number of straddling tokens of a conversation to list."""


class Note(NamedTuple):
    """A note about a document; each kind becomes a filter of the page."""

    kind: str
    """A word or two: "disagreement", "truncated", "forged", …"""
    message: str


class Histogram(NamedTuple):
    """Counts between edges; there is one more edge than counts."""

    edges: Sequence[float]
    counts: Sequence[int]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageDocument:
    """One conversation or document of n tokens.

    Raises:
        ConfigError: The arrays do not all have n entries, or a role has no name.
    """

    title: str
    origin: str = ""
    """File and line, or row, of the record."""
    pieces: Sequence[str]
    """[n] text of each token, including line ends; the caller decides how to show parts of a
    character.
    """
    ids: Array
    """[n]"""
    loss_weights: Array
    """[n] loss weight of each token as a target; 0 = only read."""
    roles: Array | None = None
    """[n] index into `role_names`; −1 = the template's text around the turns. None = no roles."""
    role_names: Sequence[str] = ()
    turns: Array | None = None
    """[n] number of the message, to separate neighbours of one role; None = a turn ends where the
    role changes.
    """
    is_control: Array | None = None
    """[n] bool; None = no control tokens."""
    reasons: Sequence[str] | None = None
    """[n] why each token is not trained; "" for one that is. None = not known."""
    notes: Sequence[Note] = ()
    ok: bool | None = None
    """Whether the mask is proven; None = not checked."""
    checks: Sequence[str] = ()
    """Results of additional checks: "generation tags agree"."""
    branches: Sequence[BranchView] = ()
    """Of a prefix tree; empty for an ordinary document."""
    images: Sequence[ShownImage] = ()
    trajectory: TrajectoryTree | None = None
    """Of sampled answers; None: it holds none."""

    def __post_init__(self) -> None:
        arrays = {
            "pieces": self.pieces,
            "loss_weights": self.loss_weights,
            "roles": self.roles,
            "turns": self.turns,
        }
        for name, array in {
            **arrays,
            "is_control": self.is_control,
            "reasons": self.reasons,
        }.items():
            if array is not None and len(array) != len(self.ids):
                raise ConfigError(
                    f"{self.title}: {name} has {len(array)} entries, ids has {len(self.ids)}"
                )
        if (
            self.roles is not None
            and len(self.roles)
            and not -1 <= self.roles.min() <= self.roles.max() < self._names
        ):
            raise ConfigError(
                f"{self.title}: roles go from {self.roles.min()} to {self.roles.max()}, "
                f"expected −1 to {self._names - 1}, one for each of role_names"
            )

    @property
    def _names(self) -> int:
        return len(self.role_names)

    @property
    def trained(self) -> int:
        """Number of tokens with a weight other than 0."""
        return int(np.count_nonzero(self.loss_weights))

    @property
    def trained_share(self) -> float:
        """Share of trained tokens, 0 to 1."""
        return self.trained / max(1, len(self.ids))


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageData:
    """Everything that one page shows; empty parts are left out.

    Raises:
        ConfigError: `other` has another number of documents.
    """

    title: str
    label: str = ""
    """Name of these settings in a comparison; "" = the title."""
    settings: JsonMapping = field(default_factory=dict)
    """Resolved settings of the documents."""
    summary: JsonMapping = field(default_factory=dict)
    """Counts over the whole input; the documents may be a sample of it."""
    documents: Sequence[PageDocument] = ()
    rows: Sequence[RowView] = ()
    histograms: Mapping[str, Histogram] | None = None
    """None = length and trained share of `documents`."""
    shares: Mapping[str, Mapping[str, float]] | None = None
    """Title → part → number, all in one unit. None = tokens and trained tokens of `documents` by
    role.
    """
    control_ids: frozenset[int] = frozenset()
    """Ids that rows show as control tokens."""
    other: "PageData | None" = None
    """The same documents under other settings, to compare; only its documents, settings and label
    are shown.
    """

    def __post_init__(self) -> None:
        if self.other is not None and len(self.other.documents) != len(self.documents):
            raise ConfigError(
                f"{self.title}: {len(self.documents)} documents, but "
                f"{len(self.other.documents)} under {self.other.label or self.other.title}; a "
                "comparison needs the same documents in the same order"
            )


def histograms_of(documents: Sequence[PageDocument]) -> dict[str, Histogram]:
    """Lengths and trained shares of documents, in bins of equal width."""
    if not documents:
        return {}
    lengths = np.array([len(document.ids) for document in documents])
    shares = np.array([100 * document.trained_share for document in documents])
    width = max(1, _round_up(lengths.max() / BINS))
    edges = np.arange(0, lengths.max() + width + 1, width)
    return {
        "tokens of a document": Histogram(edges.tolist(), np.histogram(lengths, edges)[0].tolist()),
        "trained share of a document, %": Histogram(
            list(range(0, 101, 5)), np.histogram(shares, np.arange(0, 101, 5))[0].tolist()
        ),
    }


def shares_of(documents: Sequence[PageDocument]) -> dict[str, dict[str, float]]:
    """Tokens and trained tokens by role; tokens without a role count as "template"."""
    read: dict[str, float] = {}
    trained: dict[str, float] = {}
    for document in documents:
        if document.roles is None:
            continue
        names = [*document.role_names, "template"]
        roles = np.where(np.asarray(document.roles) < 0, len(names) - 1, document.roles)
        for found, weights in ((read, None), (trained, np.asarray(document.loss_weights) != 0)):
            for name, count in zip(
                names, np.bincount(roles, weights, minlength=len(names)).tolist(), strict=True
            ):
                if count:
                    found[name] = found.get(name, 0) + count
    return {
        name: parts
        for name, parts in (("tokens by role", read), ("trained tokens by role", trained))
        if parts
    }


def first_words(document: PageDocument, most: int = WORDS) -> str:
    """How a document begins: of a conversation, the first message that no system wrote, without its
    header.

    Args:
        document: The document.
        most: Maximum number of characters; white space counts once.
    """
    begin, end, role = _opening(document)
    control = (
        np.zeros(len(document.ids), bool)
        if document.is_control is None
        else np.asarray(document.is_control)
    )
    header = re.compile(
        rf"\s*(?:{re.escape(role) or HEADERS}|{HEADERS})\s*(?:[:\n]\s*|$)", re.IGNORECASE
    )
    text, in_header = "", bool(role)
    for place in range(begin, end):
        if not control[place]:
            text += document.pieces[place]
        elif text.strip() and not (in_header and header.fullmatch(text)):
            break
        else:
            text = ""
        if len(text) > 4 * most:
            break
    words = " ".join(
        (header.sub("", text, count=1) if in_header and header.match(text) else text).split()
    )
    return words if len(words) <= most else words[: most - 1].rstrip() + "…"


def _opening(document: PageDocument) -> tuple[int, int, str]:
    """[begin, end) and the role of the message that a document is known by; all of it if there are
    no roles.
    """
    if document.roles is None or not len(document.ids):
        return 0, len(document.ids), ""
    roles = np.asarray(document.roles)
    before = [number for number, name in enumerate(document.role_names) if name in SAID_BEFORE]
    said = (roles >= 0) & ~np.isin(roles, before)
    if not said.any():
        said = roles >= 0
    if not said.any():
        return 0, len(roles), ""
    begin = int(np.argmax(said))
    turns = roles if document.turns is None else np.asarray(document.turns)
    ended = (roles[begin:] != roles[begin]) | (turns[begin:] != turns[begin])
    return (
        begin,
        begin + int(np.argmax(ended)) if ended.any() else len(roles),
        document.role_names[int(roles[begin])],
    )


def _round_up(value: float) -> int:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10 ** int(np.floor(np.log10(max(value, 1))))
    return int(next(step * power for step in (1, 2, 5, 10) if step * power >= value))


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
        branches=view.branches,
        images=view.images,
        trajectory=view.trajectory,
    )


def from_chat(
    encoded: EncodedChat,
    *,
    title: str,
    origin: str = "",
    special_tokens: Mapping[str, int] | None = None,
) -> PageDocument:
    """A conversation as `penstock.chat.encode` returns it, with the results of its certificate.

    Args:
        encoded: The conversation.
        title: Its title.
        origin: File and line of its record.
        special_tokens: The tokenizer's control tokens, to name those that were appended to the
            text.
    """
    certificate = encoded.certificate
    notes = [Note(problem.kind.replace("_", " "), str(problem)) for problem in certificate.problems]
    role_names = tuple(dict.fromkeys(encoded.roles))
    numbers = np.array([*(role_names.index(role) for role in encoded.roles), -1], np.int64)
    names = {token: text for text, token in (special_tokens or {}).items()}
    pieces = pieces_of(encoded.text, encoded.begins, encoded.ends)
    for place in np.flatnonzero(encoded.is_control & (encoded.begins == encoded.ends)).tolist():
        pieces[place] = names.get(int(encoded.tokens[place]), "")
    images = images_of_chat(encoded)
    return PageDocument(
        title=title,
        origin=origin,
        pieces=with_labels(pieces, images),
        ids=encoded.tokens,
        loss_weights=encoded.loss_weights,
        # Message −1 takes the last entry, −1.
        roles=numbers[encoded.messages],
        role_names=role_names,
        turns=encoded.messages,
        is_control=encoded.is_control,
        reasons=None if encoded.evidence is None else encoded.reasons,
        notes=notes,
        ok=certificate.ok,
        checks=(*certificate.checks, *_straddling(certificate.straddling)),
        images=images,
    )


def _straddling(tokens: Sequence[int]) -> list[str]:
    """A line about tokens with characters of different weights; no note, because most conversations
    have some.
    """
    if not tokens:
        return []
    named = ", ".join(f"{token:,}" for token in tokens[:STRADDLING])
    return [
        (
            "tokens at borders, by their last character: "
            f"{named}{', …' if len(tokens) > STRADDLING else ''}"
        )
    ]


def with_blanks(pieces: Sequence[str], roles: Array) -> Array:
    """Roles [n] of tokens with the text `pieces`; blank text between turns gets the role of the
    turn before it.
    """
    roles = roles.copy()
    for place in (np.flatnonzero(roles[1:] < 0) + 1).tolist():
        if not pieces[place].strip():
            roles[place] = roles[place - 1]
    return roles


def pieces_of(text: str, begins: Array, ends: Array) -> list[str]:
    """The text of each token, such that each character appears once.

    A character that several tokens share belongs to the last of them.

    Args:
        text: The encoded text.
        begins: First character of each token [n], ascending.
        ends: One after its last character [n].
    """
    begins, ends = np.asarray(begins).tolist(), np.asarray(ends).tolist()
    following = [*begins[1:], len(text)]
    return [
        text[begin : min(end, after)]
        for begin, end, after in zip(begins, ends, following, strict=True)
    ]
