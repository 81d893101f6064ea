"""Rendered conversations become token ids; each token has the characters that it touches.

Guarantees: control tokens come only from text that the template wrote. Control text in a message
(*forged* control text) stays text, and is reported. Without forged text, the ids are those of the
tokenizer's own encoder with control text allowed; with it, only the forged occurrences differ.
Positions are proved: the bytes of each id are the bytes of its characters. For costs see
`encode_rendered_batch`.

**The fast way.** A tokenizer cuts a text at its control entries and encodes each stretch between
them as a separate text. Here the text is cut only where the template wrote every character of the
control text. The stretches go through the fast encoder, which knows no control text.

**The slow way** (`encode_whole`) is for vocabularies that do not cut texts so: their control
entries are `normalized` under a normalizer, or count only between words (`single_word`). The
vocabulary's own encoder gets the whole text; ids and positions are its own. If a message forges
control text, the encoder gets the text again, with the template's control entries under unknown
names, so that the forged ones stay text. To check that the names change nothing else, both ways
must agree on the text with the forged occurrences replaced; otherwise there is an error. Costs one
pass of the tokenizers package (2 to 5 MB/s), about four with forged text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
import pyarrow as pa

from penstock.chat.tokens._kernels import find_items, gather, place_tokens
from penstock.chat.tokens.control_text import ControlText, control_text
from penstock.core.arrays import Bool, Bytes, Int64, UInt32
from penstock.core.errors import TokenizerError
from penstock.core.ragged import Ragged
from penstock.tokenizers import Tokenizer

IdArray = UInt32
IntArray = Int64
BoolArray = Bool


Span = tuple[int, int, str]
"""Begin, end, control text."""

FILLERS = "xqzjv0"
"""Characters that replace forged control text; the next one is used if one is itself control
text.
"""


FEW = 150
"""Up to this number of stretches, each is encoded alone: 3 µs each, while a batch costs 0.5 ms."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """Tokens of one text.

    Token i touches `text[begins[i]:ends[i]]`. A character with bytes in several tokens belongs to
    each of them, so neighbours may overlap by one character. A token that is only a space that the
    tokenizer adds before the text is empty. Characters that the vocabulary drops (WordPiece:
    whitespace) belong to no token. A control token covers its text, including whitespace that the
    tokenizer makes part of it.
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


@dataclass(frozen=True, slots=True)
class _Items:
    """Texts cut into stretches and control entries; see `find_items`."""

    data: Bytes
    text_offsets: IntArray
    items: IntArray
    text_items: IntArray
    forged: IntArray


def encode_rendered(
    tokenizer: Tokenizer, text: str, literal: object, *, allow_forged: bool = False
) -> EncodedText:
    """Ids of one rendered text, and the characters of each token.

    Args:
        tokenizer: The tokenizer.
        text: The text, as the template rendered it.
        literal: Which characters the template itself wrote, bool [characters].
        allow_forged: Let control text in messages become control tokens, as other packages do.

    Raises:
        TokenizerError: `literal` is not as long as the text; the text holds a lone surrogate; or
            the positions of the tokens cannot be determined.
    """
    return encode_rendered_batch(tokenizer, [text], [literal], allow_forged=allow_forged)[0]


def encode_rendered_batch(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    literals: Sequence[object],
    *,
    allow_forged: bool = False,
) -> list[EncodedText]:
    """`encode_rendered` of many texts: the same results, faster.

    Measured in processor time (GPT-2, Qwen 2.5, Phi-3; ChatML over web text, 1.8 KB per
    conversation): 25 to 80 MB/s, 14,000 to 45,000 conversations/s; a single text of a few turns 0.1
    ms. Memory: about 25 bytes per token, and the UTF-8 of the texts twice. The results are views of
    arrays of the whole batch, so keeping one keeps all: pass a few thousand conversations at a
    time.

    Raises:
        TokenizerError: See `encode_rendered`; the message names the text by its place in the batch.
    """
    if len(texts) != len(literals):
        raise TokenizerError(
            f"{len(texts)} texts, but literal flags of {len(literals)}; expected one array a text"
        )
    flags = [_check_flags(place, text, literals[place]) for place, text in enumerate(texts)]
    known = control_text(tokenizer)
    if known is None:
        _encode_utf8(texts)
        return [
            encode_whole(tokenizer, text, flag | allow_forged)
            for text, flag in zip(texts, flags, strict=True)
        ]
    literal = np.concatenate(flags) if flags else np.empty(0, np.bool_)
    found = _find(known, _encode_utf8(texts), literal | allow_forged)
    return _place(tokenizer, known, texts, found)


def _check_flags(place: int, text: str, literal: object) -> BoolArray:
    flags = np.asarray(literal, np.bool_)
    if flags.shape != (len(text),):
        raise TokenizerError(
            f"text {place} has {len(text)} characters, its literal flags are of shape {flags.shape}"
        )
    return flags


def _encode_utf8(texts: Sequence[str]) -> list[bytes]:
    encoded = []
    for place, text in enumerate(texts):
        try:
            encoded.append(text.encode())
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"text {place}: character {error.start} is U+{ord(text[error.start]):04X}, "
                "half of a surrogate pair, which has no UTF-8; repair the text"
            ) from error
    return encoded


def _find(known: ControlText, encoded: Sequence[bytes], literal: BoolArray) -> _Items:
    """Cut the texts at the control text that may become control tokens."""
    data = np.frombuffer(b"".join(encoded), np.uint8)
    text_offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(text) for text in encoded], out=text_offsets[1:])
    text_items, counts = (
        np.empty(len(encoded) + 1, np.int64),
        np.array([len(data) // 8 + 2 * len(encoded), 16]),
    )
    items, forged = np.empty((0, 3), np.int64), np.empty((0, 3), np.int64)
    while counts[0] > len(items) or counts[1] > len(forged):
        items, forged = np.empty((counts[0], 3), np.int64), np.empty((counts[1], 3), np.int64)
        find_items(
            data,
            text_offsets,
            literal,
            known.steps,
            known.accepts,
            known.is_control,
            known.lstrip,
            known.rstrip,
            items,
            text_items,
            forged,
            counts,
        )
    return _Items(data, text_offsets, items[: counts[0]], text_items, forged[: counts[1]])


def _encode_stretches(tokenizer: Tokenizer, found: _Items) -> tuple[IdArray, IntArray]:
    """Ids of all stretches, end to end, and begin and end of those of each item, int64 [items,
    2].
    """
    rows = np.zeros((len(found.items), 2), np.int64)
    is_stretch = found.items[:, 2] < 0
    groups = [(tokenizer, is_stretch)]
    if tokenizer.inner is not tokenizer:
        leading = np.isin(found.items[:, 0], found.text_offsets[:-1])
        groups = [(tokenizer, is_stretch & leading), (tokenizer.inner, is_stretch & ~leading)]
    values = []
    done = 0
    for encoder, chosen in groups:
        encoded = _encode(encoder, found.data, found.items[chosen])
        rows[chosen, 0], rows[chosen, 1] = encoded.offsets[:-1] + done, encoded.offsets[1:] + done
        values.append(encoded.values)
        done += len(encoded.values)
    return np.concatenate(values) if len(values) > 1 else values[0], rows


def _encode(encoder: Tokenizer, data: Bytes, stretches: IntArray) -> Ragged:
    """Ids of stretches, one row each."""
    if len(stretches) > FEW:
        return encoder.encode_batch(_as_arrow(data, stretches))
    return encoder.encode_each(
        [data[begin:end].tobytes().decode() for begin, end, _ in stretches.tolist()]
    )


def _as_arrow(data: Bytes, stretches: IntArray) -> object:
    """The stretches as an Arrow array of strings."""
    begins, ends = np.ascontiguousarray(stretches[:, 0]), np.ascontiguousarray(stretches[:, 1])
    offsets = np.zeros(len(stretches) + 1, np.int64)
    np.cumsum(ends - begins, out=offsets[1:])
    gathered = np.empty(offsets[-1], np.uint8)
    gather(data, begins, ends, gathered)
    return pa.LargeStringArray.from_buffers(
        len(stretches), pa.py_buffer(offsets), pa.py_buffer(gathered)
    )


def _place(
    tokenizer: Tokenizer, known: ControlText, texts: Sequence[str], found: _Items
) -> list[EncodedText]:
    """Ids, positions and flags of all tokens, split by text."""
    values, rows = _encode_stretches(tokenizer, found)
    count = int((rows[:, 1] - rows[:, 0]).sum()) + int((found.items[:, 2] >= 0).sum())
    ids, control = np.empty(count, np.uint32), np.empty(count, np.bool_)
    begins, ends = np.empty(count, np.int64), np.empty(count, np.int64)
    tokens, exact = np.empty((len(found.items), 2), np.int64), np.empty(len(found.items), np.bool_)
    token_offsets = np.empty(len(texts) + 1, np.int64)
    table = _table(tokenizer)
    place_tokens(
        found.data,
        found.text_offsets,
        found.items,
        found.text_items,
        rows,
        values,
        known.ids,
        table.values,
        table.offsets,
        ids,
        begins,
        ends,
        control,
        tokens,
        token_offsets,
        exact,
    )
    for item in np.flatnonzero(~exact).tolist():
        _ask_encoder(tokenizer, found, item, tokens[item], ids, begins, ends)
    leaked = np.flatnonzero(known.is_control_id[ids] & ~control)
    if len(leaked):
        raise TokenizerError(
            f"token {leaked[0]} of the batch is control entry {ids[leaked[0]]}, which the "
            "vocabulary's model gives for ordinary text; with this tokenizer, messages could "
            "write control tokens; use another one"
        )
    forged: list[list[tuple[int, str]]] = [[] for _ in texts]
    for text, character, entry in found.forged.tolist():
        forged[text].append((character, known.entries[entry].text))
    parts = [slice(low, high) for low, high in pairwise(token_offsets.tolist())]
    return [
        EncodedText(
            ids=ids[p],
            begins=begins[p],
            ends=ends[p],
            is_control=control[p],
            forged=tuple(forged[text]),
        )
        for text, p in enumerate(parts)
    ]


def _table(tokenizer: Tokenizer) -> Ragged:
    """Bytes of each id; empty offsets if there is no exact table."""
    try:
        table = tokenizer.byte_table
    except TokenizerError:
        return Ragged(np.empty(0, np.uint8), np.empty(0, np.int64))
    return Ragged(table.data, table.offsets)


def _ask_encoder(
    tokenizer: Tokenizer,
    found: _Items,
    item: int,
    tokens: IntArray,
    ids: IdArray,
    begins: IntArray,
    ends: IntArray,
) -> None:
    """Set the positions of a stretch with ids that do not spell its bytes (normalised text), from
    the own encoder.

    Raises:
        TokenizerError: It gives none, other ids, or positions that run backwards or leave the
            stretch.
    """
    begin, end, _ = found.items[item]
    text = int(np.searchsorted(found.text_offsets, begin, "right")) - 1
    stretch = found.data[begin:end].tobytes().decode()
    encoder = tokenizer if begin == found.text_offsets[text] else tokenizer.inner
    token, first = int(tokens[0]), int(tokens[1])
    own_ids, positions = encoder.encode_with_positions(stretch)
    part = slice(token, token + len(own_ids))
    if not np.array_equal(own_ids, ids[part]):
        raise TokenizerError(
            f"text {text}: {tokenizer.encoder} and the vocabulary's own encoder disagree on "
            f"{stretch[:60]!r}, so the positions of its tokens are unknown; report it, or "
            "normalise the text (NFC) first"
        )
    check_positions(stretch, positions, np.zeros(len(own_ids), np.bool_))
    begins[part], ends[part] = positions[:, 0] + first, positions[:, 1] + first


def check_positions(text: str, positions: IntArray, is_control: BoolArray) -> None:
    """Check the (begin, end) that an encoder gives each token, in characters of `text`, int64
    [tokens, 2].

    The tokenizers package encodes whitespace twice if both a control entry (`rstrip`) and an entry
    for runs of spaces contain it; such ids represent another text.

    Raises:
        TokenizerError: They run backwards or leave the text, or a control token shares characters
            with a neighbour.
    """
    shared = (positions[1:, 0] < positions[:-1, 1]) & (is_control[1:] | is_control[:-1])
    flat = positions.ravel()
    if (
        shared.any()
        or (np.diff(positions, axis=0) < 0).any()
        or (flat < 0).any()
        or (flat > len(text)).any()
    ):
        raise TokenizerError(
            f"the tokens of {text[:60]!r} have no positions: the vocabulary's own encoder "
            f"gives {positions[:6].tolist()}, and they must follow each other inside its "
            f"{len(text)} characters; drop it"
        )


def encode_whole(tokenizer: Tokenizer, text: str, literal: BoolArray) -> EncodedText:
    """Ids and positions of one text; see `encode_rendered`.

    Raises:
        TokenizerError: Forged control text cannot stay text without changing other ids; or there
            are no positions.
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
            f"character {forged[-1][0]}: {forged[-1][2]!r} in a message cannot stay text with "
            "this tokenizer; drop the conversation, or allow forged control text"
        )
    if forged:
        ids, positions = _encode_forged(tokenizer, text, twin, spans, ids)
        kept, is_control = _find_controls(tokenizer, text, ids, positions)
        if [span[:2] for span in kept] != [span[:2] for span in spans]:
            raise TokenizerError(
                f"control tokens are at {kept[:6]}, expected where the template has control "
                f"text, at {spans[:6]}; with this tokenizer, control text in messages cannot "
                "stay text; drop the conversation"
            )
    check_positions(text, positions, is_control)
    return EncodedText(
        ids=ids.astype(np.uint32),
        begins=positions[:, 0].copy(),
        ends=positions[:, 1].copy(),
        is_control=is_control,
        forged=tuple(sorted({(begin, control) for begin, _, control in forged})),
    )


def _find_controls(
    tokenizer: Tokenizer, text: str, ids: IntArray, positions: IntArray
) -> tuple[list[Span], BoolArray]:
    """The control tokens among `ids`: spans of their text without whitespace around it; and a flag
    for each id.
    """
    names = {token_id: control for control, token_id in tokenizer.special_tokens.items()}
    spans, is_control = [], np.zeros(len(ids), np.bool_)
    for place in np.flatnonzero(np.isin(ids, list(names))).tolist():
        begin, end = positions[place].tolist()
        control, covered = names[int(ids[place])], text[begin:end]
        exact = covered.find(control)
        # Normalised control text is not in the text as such; whitespace around it is not its own if
        # it has none.
        core = control if exact >= 0 else covered.strip() if control == control.strip() else covered
        if ids[place] == tokenizer.unknown_id and core != control:
            continue  # text that the vocabulary cannot spell
        begin += exact if exact >= 0 else covered.find(core)
        spans.append((begin, begin + len(core), control))
        is_control[place] = True
    return spans, is_control


def _make_harmless(text: str, span: Span, literal: BoolArray, filler: str) -> str:
    """`text` with the message's part of forged control text replaced; its ends are kept if
    possible.

    Tokens next to it may depend on whether its ends are letters or spaces.
    """
    begin, end, _ = span
    foreign = [place for place in range(begin, end) if not literal[place]]
    inside = [place for place in foreign if begin < place < end - 1]
    characters = list(text)
    for place in inside or foreign:
        characters[place] = filler
    return "".join(characters)


def _encode_forged(
    tokenizer: Tokenizer, text: str, twin: str, spans: list[Span], twin_ids: IntArray
) -> tuple[IntArray, IntArray]:
    """Ids and positions of `text` with control tokens only at `spans`.

    Args:
        tokenizer, text, spans: The text, and where the template wrote control text.
        twin: `text` with its forged control text replaced.
        twin_ids: Ids of `twin`, which the other way of encoding must give too.
    """
    found, _ = tokenizer.encode_disguised(twin, spans)
    if not np.array_equal(found, twin_ids):
        raise TokenizerError(
            f"a message has control text ({text[:60]!r}…), which with this tokenizer cannot "
            "stay text without changing other ids; drop the conversation, or allow forged "
            "control text"
        )
    return tokenizer.encode_disguised(text, spans)
