"""Proof of a trajectory: prompts say what the template writes, sampled ids are unchanged, and each
sampled token is trained once.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from penstock.chat.render.turns import difference
from penstock.chat.trajectories.paths import PathImage, TokenPath
from penstock.chat.trajectories.replies import Said, TokenTexts
from penstock.chat.trajectories.seams import Stretch
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
    images: int = 0
    """Images, sounds and frames of the longest prompt: all stand in the order of their messages,
    each with the tokens that the processor gives for it.
    """
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
        pictured = f"; {self.images} images at their places" if self.images else ""
        return (
            f"proven: {self.prompts} prompts say what the template writes{also}{pictured}; "
            f"{self.sampled} sampled tokens, each unchanged and trained once"
        )


@final
class Proof:
    """Checks each prompt when it is made.

    Args:
        tokenizer: Of the trajectory.
        texts: Its bytes.
        template: Name of the template.
        slot_id: The token of images; None: there are none.
    """

    def __init__(
        self, tokenizer: Tokenizer, texts: TokenTexts, template: str, slot_id: int | None = None
    ) -> None:
        self._tokenizer, self._texts, self._template = tokenizer, texts, template
        self._slot_id = slot_id
        self._prompts = self._normalised = 0
        self._images: list[list[tuple[int, int, bytes]]] = []
        self._ids: list[list[int]] = []
        self._weights: list[list[float]] = []

    def sent(self, made: Stretch, before: int | None, kept: Sequence[Said]) -> None:
        """Check what is sent: all of a prompt, or what follows a reply.

        Args:
            made: Its tokens, and what the template writes, with the tokens of images.
            before: The token in front of them; None: they begin the prompt.
            kept: Replies that keep their ids in it.

        Raises:
            ConversationError: The ids spell another text, have lost a reply, or have other tokens
                of images.
        """
        ids, text = made.ids, made.text
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
        if self._slot_id is not None:
            self._check_slots(made, self._slot_id)
        at = 0
        for one in kept:
            found = _find(ids, one.ids, at)
            if found < 0:
                raise ConversationError(
                    f"prompt {self._prompts}: lost the ids of the reply in message {one.message}"
                )
            at = found + len(one.ids)
        self._prompts += 1

    def _check_slots(self, made: Stretch, slot_id: int) -> None:
        """Refuse tokens of images outside their places."""
        inside = [
            token
            for _, place in made.images
            for token in range(place.begin, place.end)
            if made.ids[token] == slot_id
        ]
        expected = sum(place.layout.slots for _, place in made.images)
        if len(inside) != expected or made.ids.count(slot_id) != expected:
            raise ConversationError(
                f"prompt {self._prompts}: has {made.ids.count(slot_id)} tokens of images, "
                f"{len(inside)} at their places; expected {expected}"
            )

    def sampled(
        self, ids: Sequence[int], weights: Sequence[float], images: Sequence[PathImage] = ()
    ) -> None:
        """Note a reply, and the images of its prompt."""
        self._ids.append([*ids])
        self._weights.append([*weights])
        self._images.append(_kept(images))

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
            if path is not None:
                before = path.begins[path.replies.index(number)]
                if (
                    _kept(one for one in path.images if one[1].end <= before)
                    != self._images[number]
                ):
                    problems.append(f"reply {number}: the images before it are not those sent")
        total = float(sum(map(sum, self._weights)))
        found = float(sum(path.weights.sum(dtype=np.float64) for path in paths))
        if abs(found - total) > 1e-6 * max(total, 1.0):
            problems.append(f"weights of {found:g} in all, expected {total:g}")
        return TrajectoryCertificate(
            prompts=self._prompts,
            normalised=self._normalised,
            sampled=sum(map(len, self._ids)),
            weight=total,
            images=max(map(len, self._images), default=0),
            problems=tuple(problems),
        )


def _kept(images: Iterable[PathImage]) -> list[tuple[int, int, bytes]]:
    """Places and digests of images."""
    return [(place.begin, place.end, image.digest) for image, place in images]


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
