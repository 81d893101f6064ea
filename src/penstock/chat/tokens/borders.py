"""Borders of prompts in the tokens of a document: whether the ids of a prompt are those that the
document begins with.

A tokenizer may merge the end of a prompt with the beginning of the reply (Qwen 2.5: a reply that
begins with a line break). Then the document has ids that no prompt ends with, so the model is never
trained to go on after that prompt.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from penstock.chat.tokens.encoding import BoolArray, EncodedText, encode_rendered_batch
from penstock.tokenizers import Tokenizer

LONGEST = 2000
"""Characters of a stretch that is encoded again; in a longer one only a token across the border is
found.
"""

Encode = Callable[[str], Sequence[int]]
"""Text without control text → its ids."""


def merged_borders(
    encoded: EncodedText, text: str, borders: Sequence[int], encode: Encode
) -> list[int]:
    """Those of some borders before which the document has other ids than the text up to there
    alone.

    Text is encoded in stretches between control tokens, so only the stretch before a border is
    looked at.

    Args:
        encoded: The document.
        text: Its text.
        borders: Characters at which prompts end, ascending.
        encode: Encodes a stretch.
    """
    if not borders:
        return []
    control = np.flatnonzero(encoded.is_control)
    control_ends = encoded.ends[control]
    found = []
    for border in borders:
        before = int(np.searchsorted(control_ends, border, "right"))
        first = int(control[before - 1]) + 1 if before else 0
        begin = int(control_ends[before - 1]) if before else 0
        last = first + int(np.searchsorted(encoded.begins[first:], border, "left"))
        merges = last > first and encoded.ends[last - 1] > border
        short = border - begin <= LONGEST
        if merges or (
            short and encoded.ids[first:last].tolist() != list(encode(text[begin:border]))
        ):
            found.append(border)
    return found


def encode_cut(
    tokenizer: Tokenizer,
    text: str,
    literal: BoolArray,
    borders: Sequence[int],
    *,
    allow_forged: bool,
) -> EncodedText:
    """A rendered text whose tokens end at some borders: what a prompt and the reply to it are, put
    together.

    Args:
        tokenizer: A tokenizer that adds no space before texts.
        text, literal: The text, and which characters the template wrote.
        borders: Characters, ascending.
        allow_forged: As in `encode_rendered`.
    """
    spans = [span for span in pairwise([0, *borders, len(text)]) if span[0] < span[1]]
    pieces = encode_rendered_batch(
        tokenizer,
        [text[begin:end] for begin, end in spans],
        [literal[begin:end] for begin, end in spans],
        allow_forged=allow_forged,
    )
    return EncodedText(
        ids=np.concatenate([piece.ids for piece in pieces]),
        begins=np.concatenate(
            [piece.begins + begin for piece, (begin, _) in zip(pieces, spans, strict=True)]
        ),
        ends=np.concatenate(
            [piece.ends + begin for piece, (begin, _) in zip(pieces, spans, strict=True)]
        ),
        is_control=np.concatenate([piece.is_control for piece in pieces]),
        forged=tuple(
            (begin + at, control)
            for piece, (begin, _) in zip(pieces, spans, strict=True)
            for at, control in piece.forged
        ),
    )
