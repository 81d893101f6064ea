"""Where each token ends in its text, in bytes, proved by comparing the bytes of the ids with those
of the text.

Guarantees: either the positions are exact, or an error says what differs. Only one difference is
allowed: a single space that the tokenizer puts before the text. Costs: about 20 ns per byte, a
batch at a time, with no Python object per token.
"""

import unicodedata

import numpy as np

from penstock.core.arrays import Bool
from penstock.core.errors import TokenizerError
from penstock.core.ragged import Ragged
from penstock.tokenizers.byte_table import ByteArray, ByteTable, IntArray

SPACE = 0x20


def token_ends(table: ByteTable, texts: Ragged, ids: Ragged) -> Ragged:
    """Byte position in its text after each token.

    Args:
        table: Bytes of each id; control tokens have none, so they end where the token before them
            does.
        texts: UTF-8 bytes of each text, uint8.
        ids: Ids of each text.

    Returns:
        int64 positions, with the offsets of `ids`.

    Raises:
        TokenizerError: The bytes of some row's ids are not the bytes of its text.
    """
    if len(texts) != len(ids):
        raise TokenizerError(f"{len(texts)} texts, but ids of {len(ids)}")
    spelled = table.spell(ids.values)
    ends = np.concatenate(([0], np.cumsum(table.lengths[np.asarray(ids.values, np.int64)])))
    row_starts = ends[ids.offsets]
    extra = np.diff(row_starts) - texts.lengths
    prefixed = _has_prefix(spelled, row_starts[:-1], extra)
    expected = np.delete(spelled, row_starts[:-1][prefixed]) if prefixed.any() else spelled
    data = texts.values[texts.offsets[0] : texts.offsets[-1]]
    if (extra != prefixed).any() or not np.array_equal(expected, data):
        _explain(texts, Ragged(spelled, row_starts), prefixed)
    shifts = np.repeat(row_starts[:-1] + prefixed, ids.lengths)
    return Ragged(np.maximum(ends[1:] - shifts, 0), ids.offsets)


def _has_prefix(spelled: ByteArray, starts: IntArray, extra: IntArray) -> Bool:
    """Rows in which the ids spell one byte more than the text, and begin with a space; bool
    [rows].
    """
    prefixed: Bool = extra == 1
    prefixed[prefixed] = spelled[starts[prefixed]] == SPACE
    return prefixed


def _explain(texts: Ragged, spelled: Ragged, prefixed: Bool) -> None:
    """Raise for the first row that differs, with the reason if it is known."""
    for row in range(len(texts)):
        wanted, found = texts[row], spelled[row][int(prefixed[row]) :]
        if np.array_equal(wanted, found):
            continue
        shorter = min(len(wanted), len(found))
        different = np.flatnonzero(wanted[:shorter] != found[:shorter])
        place = int(different[0]) if len(different) else shorter
        shown = [
            bytes(part[max(place - 8, 0) : place + 16]).decode(errors="replace")
            for part in (wanted, found)
        ]
        raise TokenizerError(
            f"row {row}: the ids spell other bytes than the text from byte {place} on: "
            f"{shown[1]!r} where the text has {shown[0]!r}; "
            f"{_known_reason(bytes(wanted).decode(errors='replace'))}"
        )


def _known_reason(text: str) -> str:
    if "▁" in text:
        return (
            "the text holds a literal ▁ (U+2581), which SentencePiece turns into a space: replace "
            "it, or drop the text"
        )
    if not unicodedata.is_normalized("NFC", text):
        return (
            "the text is not in NFC form, and the tokenizer normalises: give "
            "unicodedata.normalize('NFC', text)"
        )
    return "were they encoded from this text, by this tokenizer, without control text?"
