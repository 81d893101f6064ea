"""From the text of a marker to the token ids that it may be in a row.

A marker of control tokens is always the same ids. Around ordinary text that does not hold, and a marker that is missed
masks a whole turn without a word, so all the forms it can take are found beforehand:

- *What stands before.* `[/INST]` as plain text is other tokens behind a letter than behind a space (SentencePiece), and
  `<` others at the beginning. The marker is encoded behind some contexts, and each form that keeps to itself is
  taken; a token that reaches into the context may do so over whitespace only.
- *What follows.* The newline at the end of `<|im_start|>assistant\\n` merges with newlines that begin the content: one
  token `\\n\\n`. So the last token may also be any that begins with that newline. Such a token belongs to the
  marker: the model is prompted with the marker's own ids, and is never to write a part of them.

Costs: some encodings of a few characters, and one look at the vocabulary's bytes (milliseconds), once a tokenizer.
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from penstock.chat.encoding import encode_rendered
from penstock.errors import TokenizerError
from penstock.tokenizers import ByteTable, Tokenizer

_CONTEXTS = ("x", "x ", "x\n", "x\n\n", ".")


@final
@dataclass(frozen=True, slots=True)
class Marker:
    """Token ids to be found in a row; the last may be one of `tails` instead (sorted)."""

    ids: tuple[int, ...]
    tails: tuple[int, ...] = ()

    def __str__(self) -> str:
        merged = f" (or the last merged: {len(self.tails)} tokens)" if self.tails else ""
        return f"{list(self.ids)}{merged}"


def encode_marker(text: str, tokenizer: Any) -> list[Marker]:
    """Every form of `text` as tokens, without regard to what follows it; empty if it encodes to nothing.

    Args:
        text: What the template writes.
        tokenizer: A penstock tokenizer; anything else with `encode(text, add_special_tokens=False)` gives one form.
    """
    if not isinstance(tokenizer, Tokenizer):
        ids = tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=False))
        return [Marker(ids)] if ids else []
    ids = _encode(text, tokenizer)
    if not ids:
        return []
    table = _byte_table(tokenizer)
    forms = {ids: Marker(ids)}
    if table is not None and not table.is_control[ids[0]]:
        names = {token_id: name.encode() for name, token_id in tokenizer.special_tokens.items()}
        for context in _CONTEXTS:
            form = _form_behind(context, text, tokenizer, table, names)
            if form:
                forms.setdefault(form, Marker(form))
    return list(forms.values())


def encode_start(text: str, tokenizer: Any) -> list[Marker]:
    """`encode_marker` for a marker that content follows: also the forms whose last token has merged with it."""
    forms = encode_marker(text, tokenizer)
    space = text[len(text.rstrip()) :]
    table = _byte_table(tokenizer) if isinstance(tokenizer, Tokenizer) else None
    if not space or table is None or not forms:
        return forms
    head = _encode(text.rstrip(), tokenizer)
    merged = []
    for form in forms:
        last = form.ids[-1]
        if head and form.ids[: len(head)] == head and len(form.ids) > len(head):
            begun = form.ids[: len(head) + 1]
            merged.append(Marker(begun, _beginning_with(space[:1].encode(), table)))
        elif not table.is_control[last]:
            merged.append(Marker(form.ids, _beginning_with(table[last], table)))
    covered = {form.ids for form in merged}
    return merged + [form for form in forms if form.ids not in covered]


def _encode(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    try:
        # The same ids as below, without loading the vocabulary's own encoder (half a second for 150,000 entries).
        return tuple(encode_rendered(tokenizer, text, np.ones(len(text), np.bool_)).ids.tolist())
    except TokenizerError:
        return tuple(tokenizer.encode(text, allow_control=True).tolist())


def _byte_table(tokenizer: Tokenizer) -> ByteTable | None:
    try:
        return tokenizer.byte_table
    except TokenizerError:
        # A lossy normaliser: nothing is known of its tokens but what encoding the marker gives.
        return None


def _form_behind(
    context: str, text: str, tokenizer: Tokenizer, table: ByteTable, names: dict[int, bytes]
) -> tuple[int, ...] | None:
    """The ids of `text` behind `context`; None where its first token holds more of the context than whitespace."""
    ids = _encode(context + text, tokenizer)
    pieces = [names.get(token) or table[token] for token in ids]
    whole, spelled = (context + text).encode(), b"".join(pieces)
    # SentencePiece puts a space before the whole.
    position = -1 if spelled == b" " + whole else 0
    if spelled[-position:] != whole:
        return None
    for number, piece in enumerate(pieces):
        if position + len(piece) > len(context):
            shared = context.encode()[max(position, 0) : len(context)]
            return ids[number:] if not shared.strip() else None
        position += len(piece)
    return None


def _beginning_with(beginning: bytes, table: ByteTable) -> tuple[int, ...]:
    """All ids whose bytes begin with `beginning`, ascending."""
    matches = (table.lengths >= len(beginning)) & ~table.is_control
    for place, byte in enumerate(beginning):
        at = np.minimum(table.offsets[:-1] + place, len(table.data) - 1)
        matches &= table.data[at] == byte
    return tuple(np.flatnonzero(matches).tolist())
