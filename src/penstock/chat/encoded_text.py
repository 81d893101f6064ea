"""Tokens of a text with the characters they touch, and what is asked of positions that an encoder gives."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from penstock.errors import TokenizerError

IdArray = np.ndarray[Any, np.dtype[np.uint32]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """Tokens of one text.

    Token i touches `text[begins[i]:ends[i]]`. Characters whose bytes are split over several tokens belong to each of
    them, so positions of neighbours may overlap by one character. A token of nothing but a space that the tokenizer
    put before the text is empty. Characters that the vocabulary drops (WordPiece: whitespace) belong to no token. A
    control token covers its text, with the whitespace that the tokenizer lets it take along.
    """

    ids: IdArray
    """uint32 [tokens]."""
    begins: IntArray
    """First character of each token, int64 [tokens]."""
    ends: IntArray
    """One after its last character, int64 [tokens]."""
    is_control: BoolArray
    """Which tokens are control tokens, bool [tokens]."""
    forged: tuple[tuple[int, str], ...]
    """Control text that stayed text: (character, control text)."""


def check_positions(text: str, positions: IntArray, is_control: BoolArray) -> None:
    """Check an encoder's (begin, end) of each token, in characters of `text`, int64 [tokens, 2].

    The tokenizers package encodes whitespace twice where a control entry takes it along (`rstrip`) and an entry for
    runs of spaces takes it too; such ids stand for another text.

    Raises:
        TokenizerError: They run backwards or out of the text, or a control token shares characters with a neighbour.
    """
    shared = (positions[1:, 0] < positions[:-1, 1]) & (is_control[1:] | is_control[:-1])
    flat = positions.ravel()
    if shared.any() or (np.diff(positions, axis=0) < 0).any() or (flat < 0).any() or (flat > len(text)).any():
        raise TokenizerError(
            f"the tokens of {text[:60]!r} have no positions: the vocabulary's own encoder gives "
            f"{positions[:6].tolist()}, and they must follow each other inside its {len(text)} characters; drop it"
        )
