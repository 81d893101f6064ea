"""Tokens as text that is safe to show: one string per token, nothing hidden, nothing that moves the
cursor.

If several tokens share the bytes of a character, the token that completes it shows it, and the
tokens before it show their bytes as `<e2><82>`. Line ends, tabs and other characters that do not
print are shown as marks or escapes.
"""

import codecs
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from penstock.core.errors import TokenizerError
from penstock.core.terminal import visible
from penstock.data.shards.tables.corpus import Corpus
from penstock.data.shards.tables.document import Origin
from penstock.tokenizers import Tokenizer


def token_texts(tokenizer: Tokenizer | None, ids: Any, *, lines: bool = False) -> list[str]:
    """The text of each token, ready to show.

    Args:
        tokenizer: A `Tokenizer`; None: show the ids.
        ids: Token ids [tokens].
        lines: Keep line ends and tabs.
    """
    ids = [int(token) for token in ids]
    if tokenizer is None:
        return [f"{token} " for token in ids]
    controls = {token: text for text, token in tokenizer.special_tokens.items()}
    try:
        table = tokenizer.byte_table
    except TokenizerError:
        pairs = zip([-1, *ids[:-1]], ids, strict=True)
        return [
            visible(controls.get(token) or _decoded(tokenizer, before, token), lines=lines)
            for before, token in pairs
        ]
    shown: list[str] = []
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    for token in ids:
        if token in controls:
            decoder.reset()
            shown.append(visible(controls[token], lines=lines))
            continue
        spelled = table[token] if token < len(table) else b""
        try:
            shown.append(visible(decoder.decode(spelled), lines=lines) or _as_bytes(spelled))
        except UnicodeDecodeError:
            decoder.reset()
            shown.append(_as_bytes(spelled))
    return shown


def part_texts(
    tokenizer: Tokenizer | None, parts: Sequence[Sequence[int]], *, lines: bool = False
) -> list[str]:
    """The text of successive stretches of tokens.

    Unlike in `token_texts`, a character that two parts share is only in the part that completes it.

    Args:
        tokenizer: A `Tokenizer`; None: show the ids.
        parts: Token ids of each part.
        lines: Keep line ends and tabs.
    """
    table = None
    if tokenizer is not None:
        with suppress(TokenizerError):
            table = tokenizer.byte_table
    if tokenizer is None or table is None:
        each = iter(token_texts(tokenizer, [token for ids in parts for token in ids], lines=lines))
        return ["".join(islice(each, len(ids))) for ids in parts]
    controls = {token: text.encode() for text, token in tokenizer.special_tokens.items()}
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    spelled = [
        b"".join(
            controls.get(token) or (table[token] if token < len(table) else b"") for token in ids
        )
        for ids in parts
    ]
    texts = [
        decoder.decode(part, number == len(spelled) - 1) for number, part in enumerate(spelled)
    ]
    return [visible(text, lines=lines) for text in texts]


def _decoded(tokenizer: Tokenizer, before: int, token: int) -> str:
    """Text of a token after the one before it; for a token alone, many tokenizers omit its first
    space.
    """
    alone: str = tokenizer.decode([token])
    if before < 0:
        return alone
    first, both = tokenizer.decode([before]), tokenizer.decode([before, token])
    return both[len(first) :] if both.startswith(first) else alone


def _as_bytes(spelled: bytes) -> str:
    return "".join(f"<{byte:02x}>" for byte in spelled) or "<>"


def tokenizer_of(dataset: Corpus) -> Tokenizer | None:
    """The tokenizer in a dataset's folder `tokenizer`; None if there is none."""
    return dataset.loaded_tokenizer


def origin_text(origin: Origin) -> str:
    """`web.jsonl:12`; "?" if it is unknown."""
    return str(origin) if origin.file else "?"


def in_words(value: object) -> str:
    """The value of a setting as readable text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return "+".join(map(str, value)) or "none"
    return str(value)
