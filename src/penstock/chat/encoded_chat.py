"""A conversation as it is trained: tokens, loss weights, the text of each token, and the
certificate.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

import numpy as np

from penstock.chat.masks.certificate import Certificate
from penstock.chat.masks.evidence import Evidence
from penstock.chat.masks.reasons import BEHIND, IMAGE, WRITTEN, reasons_of
from penstock.core.arrays import Bool, Float32, Int64, UInt32
from penstock.core.errors import ConfigError
from penstock.core.notebook import card, marked_text
from penstock.media.expansion import ImagePlace
from penstock.media.loading import LoadedImage

IntArray = Int64


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedChat:
    """A conversation as it is trained."""

    tokens: UInt32
    """uint32 [tokens]."""
    loss_weights: Float32
    """Loss weight of each token as a target, float32 [tokens]."""
    text: str
    """The rendered conversation."""
    begins: IntArray
    """First character of each token in `text`, int64 [tokens]."""
    ends: IntArray
    """One after its last character, int64 [tokens]."""
    is_control: Bool
    """Which tokens are control tokens, bool [tokens]."""
    messages: IntArray
    """Message of each token, int64 [tokens]: of its first character, or of the turn around it; −1:
    the template's.
    """
    roles: tuple[str, ...]
    """Role of each message."""
    certificate: Certificate
    images: tuple[tuple[LoadedImage, ImagePlace], ...] = ()
    """Each image with the tokens that stand for it, in order."""
    evidence: tuple[Evidence, str | None] | None = field(default=None, repr=False, compare=False)
    """Input of `reasons`: the conversation, all that was computed from it, and the text of EOS."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why each token is not trained, in words; "" for a token that is."""
        if self.evidence is None and not self.roles:
            return tuple("" if weight else WRITTEN for weight in self.loss_weights)
        if self.evidence is None:
            raise ConfigError(
                "this chat was not made by a ChatEncoder, which knows why its tokens are not "
                "trained"
            )
        found = reasons_of(*self.evidence)
        for _, place in self.images:
            found[place.begin : place.end] = [IMAGE] * (place.end - place.begin)
        # One that was appended comes last.
        found += [BEHIND] * (len(self.tokens) - len(found))
        return tuple(
            "" if weight else why for why, weight in zip(found, self.loss_weights, strict=True)
        )

    @property
    def trained_text(self) -> tuple[tuple[int, str], ...]:
        """(message, text) of each stretch of trained tokens, in order."""
        edges = np.flatnonzero(np.diff(np.concatenate([[0], self.loss_weights != 0, [0]]))).tolist()
        return tuple(
            (
                int(self.messages[(first + last - 1) // 2]),
                self.text[int(self.begins[first]) : int(self.ends[last - 1])],
            )
            for first, last in zip(edges[::2], edges[1::2], strict=True)
        )

    def __repr__(self) -> str:
        """One line, however long the chat: counts, no numbers of arrays."""
        trained = int(np.count_nonzero(self.loss_weights))
        verdict = ", ".join(problem.kind for problem in self.certificate.problems) or "proven"
        return (
            f"EncodedChat({len(self.roles)} messages, {len(self.tokens)} tokens, {trained} "
            f"trained; {verdict})"
        )

    def _repr_html_(self) -> str:
        """Notebook view: the text with its trained tokens marked, and what the certificate says."""
        trained = int(np.count_nonzero(self.loss_weights))
        problems = "; ".join(str(problem) for problem in self.certificate.problems) or "none"
        facts = [("tokens", f"{len(self.tokens):,}, {trained:,} trained"), ("problems", problems)]
        return card("Chat", facts, marked_text(self._pieces()))

    def _pieces(self) -> Iterator[tuple[str, float]]:
        """The text in stretches of equal loss weight; characters of no token have weight 0."""
        at = 0
        for begin, end, weight in zip(
            self.begins.tolist(), self.ends.tolist(), self.loss_weights.tolist(), strict=True
        ):
            if begin > at:
                yield self.text[at:begin], 0.0
            if end > at:
                yield self.text[max(begin, at) : end], weight
            at = max(at, end)
        yield self.text[at:], 0.0
