"""Proof of a trajectory: prompts say what the template writes, sampled ids are unchanged, and each
sampled token is trained once.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from penstock.chat.render.turns import difference
from penstock.chat.trajectories.paths import TokenPath
from penstock.chat.trajectories.replies import Said, TokenTexts
from penstock.core.errors import ConversationError
from penstock.tokenizers import Tokenizer


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryCertificate:
    """What was proven."""

    prompts: int
    """Prompts whose ids spell the text that the template writes there."""
    normalised: int
    """Of these: by ids that spell it in another form, as the tokenizer normalises text or gives
    white space to a control token.
    """
    sampled: int
    """Tokens that were sampled."""
    weight: float
    """Sum of their loss weights."""
    problems: tuple[str, ...]
    """What is wrong; empty: nothing."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __str__(self) -> str:
        if self.problems:
            return "\n".join(["refused", *(f"error: {one}" for one in self.problems)])
        also = f" ({self.normalised} normalised)" if self.normalised else ""
        return (
            f"proven: {self.prompts} prompts say what the template writes{also}; "
            f"{self.sampled} sampled tokens, each unchanged and trained once"
        )


@final
class Proof:
    """Checks each prompt when it is made.

    Args:
        tokenizer: Of the trajectory.
        texts: Its bytes.
        template: Name of the template.
    """

    def __init__(self, tokenizer: Tokenizer, texts: TokenTexts, template: str) -> None:
        self._tokenizer, self._texts, self._template = tokenizer, texts, template
        self._prompts = self._normalised = 0
        self._ids: list[list[int]] = []
        self._weights: list[list[float]] = []

    def sent(self, ids: Sequence[int], text: str, before: int | None, kept: Sequence[Said]) -> None:
        """Check what is sent: all of a prompt, or what follows a reply.

        Args:
            ids: The tokens.
            text: What the template writes.
            before: The token in front of them; None: they begin the prompt.
            kept: Replies that keep their ids in it.

        Raises:
            ConversationError: The ids spell another text, or have lost a reply.
        """
        spelled, _ = self._texts.text(ids, before)
        if before is None and self._tokenizer.adds_space and not text.startswith(" "):
            spelled = spelled.removeprefix(" ")
        if spelled != text:
            if _core(spelled) != _core(text):
                raise ConversationError(
                    f"prompt {self._prompts}: its ids spell {difference(spelled, text)}, which "
                    f"chat template {self._template} writes; the tokenizer cannot spell this text"
                )
            self._normalised += 1
        at = 0
        for one in kept:
            found = _find(ids, one.ids, at)
            if found < 0:
                raise ConversationError(
                    f"prompt {self._prompts}: lost the ids of the reply in message {one.message}"
                )
            at = found + len(one.ids)
        self._prompts += 1

    def sampled(self, ids: Sequence[int], weights: Sequence[float]) -> None:
        """Note a reply."""
        self._ids.append([*ids])
        self._weights.append([*weights])

    def certificate(self, paths: Sequence[TokenPath]) -> TrajectoryCertificate:
        """Compare the paths with what was sampled."""
        problems = []
        trained = {number: path for path in paths for number in path.replies}
        for number, (ids, weights) in enumerate(zip(self._ids, self._weights, strict=True)):
            path = trained.get(number)
            places = [] if path is None else _places(path, number, self._ids)
            if path is None or path.ids[places].tolist() != ids:
                problems.append(f"reply {number}: its ids are not those that were sampled")
            elif not np.allclose(path.weights[places], weights):
                problems.append(f"reply {number}: its weights are not those that were given")
        total = float(sum(map(sum, self._weights)))
        found = float(sum(path.weights.sum(dtype=np.float64) for path in paths))
        if abs(found - total) > 1e-6 * max(total, 1.0):
            problems.append(f"weights of {found:g} in all, expected {total:g}")
        return TrajectoryCertificate(
            prompts=self._prompts,
            normalised=self._normalised,
            sampled=sum(map(len, self._ids)),
            weight=total,
            problems=tuple(problems),
        )


def _places(path: TokenPath, number: int, replies: Sequence[Sequence[int]]) -> list[int]:
    """Slots of a reply in its path: replies follow each other, each right behind its prompt."""
    begin = path.begins[path.replies.index(number)]
    return [*range(begin, begin + len(replies[number]))]


def _core(text: str) -> str:
    """A text without what tokenizers change: forms of characters, and white space."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def _find(ids: Sequence[int], part: Sequence[int], at: int) -> int:
    """First place of `part` in `ids` from `at` on; −1: none."""
    wanted = [*part]
    if not wanted:
        return at
    for begin in range(at, len(ids) - len(wanted) + 1):
        if ids[begin] == wanted[0] and [*ids[begin : begin + len(wanted)]] == wanted:
            return begin
    return -1
