"""Counts the distinct pieces of texts, and learns the merges of a byte-level BPE from them.

Guarantees: the merges are those of the trainer of the `tokenizers` package, for the same pieces.
Which characters are letters, digits and spaces, that package's own patterns say.
"""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from tokenizers.pre_tokenizers import Split

from penstock.core.arrays import Bytes, Int64
from penstock.tokenizers import _merge_kernels, _piece_kernels
from penstock.tokenizers.spelling import spell_as_characters, spell_byte_level
from tokenizers import Regex

CHARACTERS = 0x110000
_CLASSES = (
    (r"\p{L}+", _piece_kernels.LETTER),
    (r"\p{N}+", _piece_kernels.DIGIT),
    (r"\s+", _piece_kernels.SPACE),
)
_MOST_UNKNOWN = 1 << 16
_FIRST_SLOTS = 1 << 16


@final
class PieceCounts:
    """How often each distinct piece of some texts occurs; pieces are those of `SPLIT_PATTERN`."""

    def __init__(self) -> None:
        self.size = 0
        """Number of distinct pieces."""
        self.words = np.empty(1 << 20, np.uint8)
        """Their bytes, one after another."""
        self._classes = np.full(CHARACTERS, _piece_kernels.UNKNOWN, np.uint8)
        self._classify(np.arange(0x80))
        self._slots = np.zeros(_FIRST_SLOTS, np.uint64)
        self._offsets = np.zeros(_FIRST_SLOTS // 2 + 1, np.int64)
        self._counts = np.empty(_FIRST_SLOTS // 2, np.int64)

    @property
    def counts(self) -> Int64:
        """How often each occurs, int64 [size]."""
        return self._counts[: self.size]

    @property
    def offsets(self) -> Int64:
        """Where each begins in `words`, and where the last ends, int64 [size + 1]."""
        return self._offsets[: self.size + 1]

    def add(self, texts: Sequence[bytes]) -> None:
        """Count the pieces of texts in UTF-8; a piece never continues in the next text."""
        data = np.frombuffer(b"".join(texts), np.uint8)
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        found = np.empty(_MOST_UNKNOWN, np.int64)
        while unknown := _piece_kernels.find_unknown(data, self._classes, found):
            self._classify(found[:unknown])
        used = int(self._offsets[self.size])
        if used + len(data) > len(self.words):
            self.words = _longer(self.words, 2 * used + len(data))
        text = at = 0
        while True:
            text, at, self.size = _piece_kernels.count_pieces(
                data,
                ends,
                text,
                at,
                self._classes,
                self.words,
                self._offsets,
                self._counts,
                self._slots,
                self.size,
            )
            if text == len(ends):
                return
            self._slots = np.zeros(2 * len(self._slots), np.uint64)
            _piece_kernels.hash_pieces(self.words, self._offsets, self.size, self._slots)
            self._offsets = _longer(self._offsets, len(self._slots) // 2 + 1)
            self._counts = _longer(self._counts, len(self._slots) // 2)

    def _classify(self, characters: Int64) -> None:
        """Ask the `tokenizers` package for the classes of characters, int64 [n]."""
        text = "".join(map(chr, characters.tolist()))
        self._classes[characters] = _piece_kernels.OTHER
        for pattern, kind in _CLASSES:
            matched = np.ones(len(text), np.bool_)
            for _, (begin, end) in Split(Regex(pattern), "removed").pre_tokenize_str(text):
                matched[begin:end] = False
            self._classes[characters[matched]] = kind
        self._classes[[ord("\r"), ord("\n")]] = _piece_kernels.LINE_END


def learn_merges(
    pieces: PieceCounts, entries: Sequence[str], vocab_size: int
) -> tuple[list[str], list[tuple[int, int]]]:
    """Learn merges until there are `vocab_size` ids, or nothing is left to merge.

    Args:
        pieces: The pieces of the text.
        entries: The first ids, in the characters that stand for bytes; all 256 bytes are among
            them.
        vocab_size: The most ids.

    Returns:
        All ids as `entries` gives them, and the pairs of ids to merge, in order.
    """
    spelled = [token or b"" for token in spell_byte_level(entries)]
    ids = np.zeros(256, np.int32)
    for place, token in enumerate(spelled):
        if len(token) == 1:
            ids[token[0]] = place
    symbols = ids[pieces.words[: pieces.offsets[-1]]]
    most = min(
        vocab_size, len(spelled) + len(symbols)
    )  # each new id takes at least one symbol away
    offsets = np.zeros(most + 1, np.int64)
    np.cumsum([len(token) for token in spelled], out=offsets[1 : len(spelled) + 1])
    tokens: Bytes = np.frombuffer(b"".join(spelled), np.uint8).copy()
    slots = np.zeros(1 << (2 * most).bit_length(), np.uint64)
    _piece_kernels.hash_pieces(tokens, offsets, len(spelled), slots)
    merges, tokens, size = _merge_kernels.learn_merges(
        symbols, pieces.offsets[:-1], np.diff(pieces.offsets), pieces.counts,
        tokens, offsets, slots, len(spelled), most,
    )  # fmt: skip
    characters, edges = spell_as_characters(tokens[: offsets[size]].tobytes()), offsets.tolist()
    made = [characters[edges[at] : edges[at + 1]] for at in range(len(spelled), size)]
    return [*entries, *made], list(
        zip(merges["left"].tolist(), merges["right"].tolist(), strict=True)
    )


def _longer(array: Any, length: int) -> Any:
    new = np.empty(length, array.dtype)
    new[: len(array)] = array
    return new
