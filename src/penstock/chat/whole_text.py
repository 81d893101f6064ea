"""The slow way to encode a rendered text, for vocabularies that do not simply cut a text at their control entries.

Such are control entries that are `normalized` under a normalizer, or that stand only between words (`single_word`).
Here the vocabulary's own encoder gets the whole text. Where a message forges control text, it gets the text again with
the template's control entries under names that nobody knows, so that what the message spells stays text.

Guarantees: ids and positions are the own encoder's. That the names change nothing is checked on the text with the
forged occurrences made harmless, where both ways must agree; otherwise there is an error. Costs: one pass of the
tokenizers package (2 to 5 MB/s), about four where something is forged.
"""

import numpy as np

from penstock.chat.encoded_text import BoolArray, EncodedText, IntArray, check_positions
from penstock.errors import TokenizerError
from penstock.tokenizers import Tokenizer

Span = tuple[int, int, str]
"""Begin, end, control text."""

FILLERS = "xqzjv0"
"""What takes the place of forged control text; the next one where one is control text itself."""


def encode_whole(tokenizer: Tokenizer, text: str, literal: BoolArray) -> EncodedText:
    """Ids and positions of one text; see `encode_rendered`.

    Raises:
        TokenizerError: Forged control text cannot be kept out without changing other ids; or there are no positions.
    """
    twin, forged = text, []
    for filler in FILLERS:
        ids, positions = tokenizer.encode_with_positions(twin, allow_control=True)
        spans, is_control = _find_controls(tokenizer, twin, ids, positions)
        found = [span for span in spans if not literal[span[0] : span[1]].all()]
        if not found:
            break
        forged += found
        for span in found:
            twin = _make_harmless(twin, span, literal, filler)
    else:
        raise TokenizerError(
            f"character {forged[-1][0]}: {forged[-1][2]!r} in a message cannot be kept from becoming a control token; "
            "drop the conversation, or allow forged control text"
        )
    if forged:
        ids, positions = _encode_forged(tokenizer, text, twin, spans, ids)
        kept, is_control = _find_controls(tokenizer, text, ids, positions)
        if [span[:2] for span in kept] != [span[:2] for span in spans]:
            raise TokenizerError(
                f"control tokens stand at {kept[:6]}, due: where the template has control text, {spans[:6]}; this "
                "tokenizer cannot keep messages from control text"
            )
    check_positions(text, positions, is_control)
    return EncodedText(
        ids=ids.astype(np.uint32),
        begins=positions[:, 0].copy(),
        ends=positions[:, 1].copy(),
        is_control=is_control,
        forged=tuple(sorted({(begin, control) for begin, _, control in forged})),
    )


def _find_controls(tokenizer: Tokenizer, text: str, ids: IntArray, positions: IntArray) -> tuple[list[Span], BoolArray]:
    """The control tokens among `ids`: where their text stands, without the whitespace they took; and which they are."""
    names = {token_id: control for control, token_id in tokenizer.special_tokens.items()}
    spans, is_control = [], np.zeros(len(ids), np.bool_)
    for place in np.flatnonzero(np.isin(ids, list(names))).tolist():
        begin, end = positions[place].tolist()
        control, covered = names[int(ids[place])], text[begin:end]
        exact = covered.find(control)
        # Normalised control text is not found as it is written; it may have taken whitespace only if it has none.
        core = control if exact >= 0 else covered.strip() if control == control.strip() else covered
        if ids[place] == tokenizer.unknown_id and core != control:
            continue  # text that the vocabulary cannot spell
        begin += exact if exact >= 0 else covered.find(core)
        spans.append((begin, begin + len(core), control))
        is_control[place] = True
    return spans, is_control


def _make_harmless(text: str, span: Span, literal: BoolArray, filler: str) -> str:
    """`text` with the message's part of forged control text replaced, but for its ends, if that will do.

    What stands next to it may ask whether that is a letter or a space.
    """
    begin, end, _ = span
    foreign = [place for place in range(begin, end) if not literal[place]]
    inside = [place for place in foreign if begin < place < end - 1]
    characters = list(text)
    for place in inside or foreign:
        characters[place] = filler
    return "".join(characters)


def _encode_forged(
    tokenizer: Tokenizer, text: str, twin: str, spans: list[Span], due: IntArray
) -> tuple[IntArray, IntArray]:
    """Ids and positions of `text` with control tokens at `spans` only; `due` are those of its harmless twin."""
    found, _ = tokenizer.encode_disguised(twin, spans)
    if not np.array_equal(found, due):
        raise TokenizerError(
            f"a message spells control text ({text[:60]!r}…), and with this tokenizer it cannot be kept text without "
            "changing other ids; drop the conversation, or allow forged control text"
        )
    return tokenizer.encode_disguised(text, spans)
