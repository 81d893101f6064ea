"""Ids of pieces: those seen before from a hash table, new ones from the tokenizers package.

The package's own model encodes each piece by itself, as it does in a text: it never sees a piece's
neighbours. So ids are its ids, with whatever it does about unknown bytes. Entries of the table are
compared byte by byte. When it is full it begins again; it takes 60 MB at most.
"""  # noqa: E501

import threading
from collections.abc import Sequence
from typing import final

import numpy as np

from penstock.core.arrays import Array, Bytes, Int64, UInt32
from penstock.core.errors import TokenizerError
from penstock.tokenizers._piece_kernels import hash_pieces
from penstock.tokenizers._split_kernels import (
    LONG,
    count_ids,
    find_entries,
    join_ids,
    spell_pieces,
)
from penstock.tokenizers.spelling import spell_as_characters
from penstock.tokenizers.splitter import Pieces
from tokenizers import AddedToken, Tokenizer

MOST_ENTRIES = 1 << 20
MOST_BYTES = 1 << 24
LONGEST = 64
"""Bytes of the longest piece that is kept."""

_FIRST_SLOTS = 1 << 15
_MOST_FILLERS = 100_000
_SEPARATOR = ord(" ")
"""It stands for no byte, so no piece has it."""
_ALPHABET = np.array([ord(spell_as_characters(bytes([byte]))) for byte in range(256)], np.uint16)


@final
class PieceModel:
    """The model of an encoder of the tokenizers package, for pieces alone."""

    def __init__(self, encoder: Tokenizer, highest: int) -> None:
        """Share the model of an encoder.

        Args:
            encoder: It has a BPE of byte-level characters.
            highest: The highest id of its model.

        Raises:
            TokenizerError: Its ids are too scattered to tell pieces apart.
        """
        self._encoder = Tokenizer(encoder.model)
        # An entry between pieces makes the package cut there; its id must be none of the model's.
        # New entries get the ids after the number of entries, which may be taken.
        fillers = highest + 1 - self._encoder.get_vocab_size(with_added_tokens=False)
        if fillers > _MOST_FILLERS:
            raise TokenizerError(f"its {highest + 1} ids have {fillers} gaps")
        names = [*(f" {place}" for place in range(max(fillers, 0))), chr(_SEPARATOR)]
        self._encoder.add_special_tokens(
            [AddedToken(name, special=True, normalized=False) for name in names]
        )
        self._separator = self._encoder.token_to_id(names[-1])
        if self._separator <= highest:
            raise TokenizerError("its model has a token of white space")

    def encode(self, characters: Array, count: int) -> tuple[UInt32, Int64]:
        """Ids of pieces.

        Args:
            characters: The pieces' characters with a separator after each, uint16.
            count: The number of pieces.

        Returns:
            Their ids, and where those of each end.
        """
        text = characters[:-1].tobytes().decode("utf-16-le")
        encoding = self._encoder.encode_batch_fast([text], add_special_tokens=False)[0]
        ids = np.array([*encoding.ids, self._separator], np.uint32)
        between = np.flatnonzero(ids == self._separator)
        assert len(between) == count, "a piece's ids include the separator"
        return np.delete(ids, between), between - np.arange(count)


@final
class PieceCache:
    """The ids of pieces by a model; threads take turns."""

    def __init__(
        self, model: PieceModel, *, most: int = MOST_ENTRIES, longest: int = LONGEST
    ) -> None:
        """Begin empty.

        Args:
            model: It encodes what is new.
            most: Number of entries at which it begins again.
            longest: Bytes of the longest piece that is kept.
        """
        self._model = model
        self._most = most
        self._longest = longest
        self._lock = threading.Lock()
        self._words = np.empty(MOST_BYTES, np.uint8)
        self._offsets = np.zeros(most + 1, np.int64)
        self._begin()

    def _begin(self) -> None:
        self.size = 0
        """Number of entries."""
        self._slots = np.zeros(min(_FIRST_SLOTS, self._largest()), np.uint64)
        self._ids = np.empty(1 << 15, np.uint32)
        self._ends = np.zeros(1 << 14, np.int64)

    def _largest(self) -> int:
        return 1 << (2 * self._most - 1).bit_length()

    def encode(self, data: Bytes, pieces: Pieces) -> tuple[UInt32, Int64]:
        """Ids of pieces, and where those of each begin, int64 [pieces + 1].

        Args:
            data: The bytes that the pieces are of, read-only.
            pieces: The pieces.
        """
        count = len(pieces.begins)
        entries = np.empty(count, np.int32)
        bounds = np.zeros(count + 1, np.int64)
        parts: list[UInt32] = []
        with self._lock:
            at = 0
            while at < count:
                done = self._find(data, pieces, at, entries)
                count_ids(entries, at, done, self._ends, bounds)
                parts.append(np.empty(bounds[done] - bounds[at], np.uint32))
                join_ids(entries, at, done, self._ends, self._ids, parts[-1])
                if done < count:
                    self._grow()
                at = done
        return parts[0] if len(parts) == 1 else _joined(parts), bounds

    def _find(self, data: Bytes, pieces: Pieces, at: int, entries: Array) -> int:
        """Find or make the entries of pieces from one on; the piece where it stopped."""
        old = self.size
        done, self.size = find_entries(
            data,
            pieces.begins,
            pieces.ends,
            at,
            self._longest,
            self._words,
            self._offsets,
            self._slots,
            old,
            min(self._most, len(self._slots) // 2),
            entries,
        )
        long = at + np.flatnonzero(entries[at:done] == LONG)
        if self.size > old:
            bounds = self._offsets[old : self.size + 1]
            self._encode(frozen(self._words), bounds[:-1], bounds[1:], old)
        if len(long):
            # Only until the next call: the next new entry takes their place.
            begins, ends = (one[long].astype(np.int64) for one in (pieces.begins, pieces.ends))
            self._encode(data, begins, ends, self.size)
            entries[long] = np.arange(self.size, self.size + len(long))
        return int(done)

    def _encode(self, data: Bytes, begins: Array, ends: Array, first: int) -> None:
        """Encode pieces and keep their ids as those of entries from `first` on."""
        count = len(begins)
        spelled = np.empty(int((ends - begins).sum()) + count, np.uint16)
        spell_pieces(data, begins, ends, _ALPHABET, _SEPARATOR, spelled)
        ids, places = self._model.encode(spelled, count)
        begin = self._ends[first]
        self._ids = _roomy(self._ids, begin + len(ids))
        self._ends = _roomy(self._ends, first + count + 1)
        self._ids[begin : begin + len(ids)] = ids
        self._ends[first + 1 : first + count + 1] = begin + places

    def _grow(self) -> None:
        """Make room for entries: a larger table, or an empty one."""
        if 2 * len(self._slots) > self._largest() or self.size < len(self._slots) // 2:
            self._begin()
            return
        self._slots = np.zeros(2 * len(self._slots), np.uint64)
        hash_pieces(self._words, self._offsets, self.size, self._slots)


def frozen(array: Array) -> Array:
    """A read-only view: a kernel is compiled once for these, and once for others."""
    view = array.view()
    view.flags.writeable = False
    return view


def _roomy(array: Array, length: int) -> Array:
    """The same array, or a longer copy."""
    if length <= len(array):
        return array
    longer = np.empty(2 * length, array.dtype)
    longer[: len(array)] = array
    return longer


def _joined(parts: Sequence[UInt32]) -> UInt32:
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)
