"""Ids of text that follows other tokens, as the whole text would have them.

An encoder sees more than the text at a seam: a control token may take the white space behind it
(Phi-3's `<|end|>`), and SentencePiece puts a space before a text that begins one. So the text is
encoded behind the name of the control token that it follows, whose ids are then dropped.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock.chat.tokens.encoding import EncodedText, encode_rendered
from penstock.chat.trajectories.paths import PathImage, moved
from penstock.core.arrays import Bool
from penstock.tokenizers import Tokenizer


class Stretch(NamedTuple):
    """A part of a prompt."""

    ids: list[int]
    images: list[PathImage]
    """Those in it; places count from its first token."""
    text: str
    """What its ids spell, with all tokens that stand for images."""

    def joined(self, other: "Stretch") -> "Stretch":
        """This one and another behind it."""
        return Stretch(
            self.ids + other.ids,
            [*self.images, *moved(other.images, len(self.ids))],
            self.text + other.text,
        )


_LEADS = ("\n", ".")
"""Texts that a SentencePiece encoder may begin with instead, where no control token is."""


def encode_behind(
    tokenizer: Tokenizer, names: Mapping[int, str], before: int | None, text: str, literal: Bool
) -> list[int]:
    """Ids of a text behind a token; arguments as for `encoded_behind`."""
    found: list[int] = encoded_behind(tokenizer, names, before, text, literal).ids.tolist()
    return found


def encoded_behind(
    tokenizer: Tokenizer, names: Mapping[int, str], before: int | None, text: str, literal: Bool
) -> EncodedText:
    """Tokens of a text behind a token.

    Args:
        tokenizer: The tokenizer.
        names: Names of its control tokens.
        before: The token; None: the text begins here.
        text: What is encoded.
        literal: Which of its characters the template wrote, bool [characters].
    """
    name = None if before is None else names.get(before)
    leads: Sequence[tuple[str, bool]] = ()
    if name:
        leads = ((name, True),)
    elif before is not None and tokenizer.adds_space:
        leads = tuple((lead, False) for lead in _LEADS)
    for lead, is_control in leads if text else ():
        flags = np.full(len(lead), is_control)
        head = encode_rendered(tokenizer, lead, flags).ids
        both = encode_rendered(tokenizer, lead + text, np.concatenate([flags, literal]))
        if np.array_equal(both.ids[: len(head)], head):
            return _behind(both, len(head), len(lead))
    return encode_rendered(tokenizer, text, literal)


def _behind(encoded: EncodedText, tokens: int, characters: int) -> EncodedText:
    """What is left without some tokens at the beginning, counted from a character on."""
    return EncodedText(
        ids=encoded.ids[tokens:],
        begins=np.maximum(encoded.begins[tokens:] - characters, 0),
        ends=np.maximum(encoded.ends[tokens:] - characters, 0),
        is_control=encoded.is_control[tokens:],
        forged=tuple((at - characters, text) for at, text in encoded.forged),
    )
