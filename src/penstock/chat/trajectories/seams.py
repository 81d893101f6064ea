"""Ids of text that follows other tokens, as the whole text would have them.

An encoder sees more than the text at a seam: a control token may take the white space behind it
(Phi-3's `<|end|>`), and SentencePiece puts a space before a text that begins one. So the text is
encoded behind the name of the control token that it follows, whose ids are then dropped.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.chat.tokens.encoding import encode_rendered
from penstock.core.arrays import Bool
from penstock.tokenizers import Tokenizer

_LEADS = ("\n", ".")
"""Texts that a SentencePiece encoder may begin with instead, where no control token is."""


def encode_behind(
    tokenizer: Tokenizer, names: Mapping[int, str], before: int | None, text: str, literal: Bool
) -> list[int]:
    """Ids of a text behind a token.

    Args:
        tokenizer: The tokenizer.
        names: Names of its control tokens.
        before: The token; None: the text begins here.
        text: What is encoded.
        literal: Which of its characters the template wrote, bool [characters].
    """
    if not text:
        return []
    name = None if before is None else names.get(before)
    leads: Sequence[tuple[str, bool]] = ()
    if name:
        leads = ((name, True),)
    elif before is not None and tokenizer.adds_space:
        leads = tuple((lead, False) for lead in _LEADS)
    for lead, is_control in leads:
        flags = np.full(len(lead), is_control)
        head = _ids(tokenizer, lead, flags)
        both = _ids(tokenizer, lead + text, np.concatenate([flags, literal]))
        if both[: len(head)] == head:
            return both[len(head) :]
    return _ids(tokenizer, text, literal)


def _ids(tokenizer: Tokenizer, text: str, literal: Bool) -> list[int]:
    found: list[int] = encode_rendered(tokenizer, text, literal).ids.tolist()
    return found
