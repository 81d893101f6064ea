"""Ids of pieces: those seen before from a hash table, new ones from the tokenizers package.

The package's own model encodes each piece by itself, as it does in a text: it never sees a piece's
neighbours. So ids are its ids, with whatever it does about unknown bytes. Entries of the table are
compared byte by byte. When it is full it begins again; it takes 60 MB at most.
"""  # noqa: E501

import threading
from typing import final

import numpy as np

from penstock.core.arrays import Array, Bytes, Int64, UInt32
from penstock.core.errors import TokenizerError
from penstock.tokenizers._id_kernels import (
    WIDTH,
    count_ids,
    double_slots,
    find_values,
    join_ids,
    settle_values,
    spell_pieces,
)
from penstock.tokenizers.spelling import spell_as_characters
from penstock.tokenizers.splitter import Int32
from tokenizers import AddedToken, Tokenizer

MOST_ENTRIES = 1 << 19
SEGMENT = 1 << 16
"""Pieces that are encoded at once; only between two segments the table may begin again."""
LONGEST = 128
"""Bytes of the longest piece that is kept."""

_FIRST_SLOTS = 1 << 13
_FIRST_BYTES = 1 << 16
_MOST_BYTES = 1 << 25
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

    def encode(self, data: Bytes, begins: Int64, ends: Int64) -> tuple[UInt32, Int64]:
        """Ids of pieces.

        Args:
            data: The bytes that they are of, read-only.
            begins: Where each begins, int64 [pieces].
            ends: Where each ends, int64 [pieces].

        Returns:
            Their ids, and where those of each begin, int64 [pieces + 1].
        """
        count = len(begins)
        spelled = np.empty(int((ends - begins).sum()) + count, np.uint16)
        spell_pieces(data, begins, ends, _ALPHABET, _SEPARATOR, spelled)
        text = spelled.tobytes().decode("utf-16-le")
        ids = np.array(self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        between = np.flatnonzero(ids == self._separator)
        if len(between) != count:
            raise AssertionError("the ids of a piece include the separator")
        bounds = np.concatenate(([0], between - np.arange(count)))
        return np.delete(ids, between).astype(np.uint32), bounds


@final
class PieceCache:
    """The ids of pieces by a model; threads take turns."""

    def __init__(
        self, model: PieceModel, *, most: int = MOST_ENTRIES, longest: int = LONGEST
    ) -> None:
        """Begin empty.

        Args:
            model: It encodes what is new.
            most: Number of pieces, of `SEGMENT` pieces more, at which it begins again.
            longest: Bytes of the longest piece that is kept.
        """
        self._model = model
        self._most = most
        self._longest = longest
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._slots = np.zeros(WIDTH * _FIRST_SLOTS, np.uint64)
        self._words = np.empty(_FIRST_BYTES, np.uint8)
        self._kept = np.empty(_FIRST_BYTES, np.uint32)
        self._used = 0
        # Pieces in the table, bytes of words, new pieces.
        self._state = np.zeros(3, np.int64)

    def __len__(self) -> int:
        """The number of pieces that are kept."""
        return int(self._state[0])

    def encode(self, data: Bytes, pieces: Int32) -> tuple[UInt32, Int64]:
        """Ids of pieces, and where those of each begin, int64 [pieces + 1].

        Args:
            data: The bytes that the pieces are of, read-only.
            pieces: Where each begins and ends, int32 [2, pieces].
        """
        bounds = np.zeros(pieces.shape[1] + 1, np.int64)
        parts = [np.empty(0, np.uint32)]
        with self._lock:
            for begin in range(0, pieces.shape[1], SEGMENT):
                end = begin + SEGMENT
                segment = np.ascontiguousarray(pieces[:, begin:end])
                parts.append(self._encode(data, segment, bounds[begin : end + 1]))
        return parts[1] if len(parts) == 2 else np.concatenate(parts), bounds

    def _encode(self, data: Bytes, pieces: Int32, bounds: Int64) -> UInt32:
        if self._state[0] > self._most or len(self._words) > _MOST_BYTES:
            self._begin()
        values = np.empty(pieces.shape[1], np.uint64)
        new = np.empty((3, len(values)), np.int64)
        at = self._state[2] = 0
        while True:
            at = find_values(
                data, pieces, at, self._longest, self._slots, self._words, self._state, new, values
            )
            if at == len(values):
                break
            self._grow(new)
        new = new[:, : self._state[2]]
        new_ids, new_bounds = self._encode_new(data, new)
        total = count_ids(values, new_bounds, bounds[0], bounds[1:])
        joined = np.empty(total - bounds[0], np.uint32)
        join_ids(values, new_bounds, new_ids, self._kept, joined)
        return joined

    def _encode_new(self, data: Bytes, new: Int64) -> tuple[UInt32, Int64]:
        """Encode new pieces and keep their ids; returns these, and where those of each begin."""
        if not new.shape[1]:
            return np.empty(0, np.uint32), np.zeros(1, np.int64)
        begins, ends, slots = (np.ascontiguousarray(one) for one in new)
        ids, bounds = self._model.encode(data, begins, ends)
        settle_values(self._slots, slots, bounds, ids, self._used)
        self._kept = _roomy(self._kept, self._used, self._used + len(ids))
        self._kept[self._used : self._used + len(ids)] = ids
        self._used += len(ids)
        return ids, bounds

    def _grow(self, new: Int64) -> None:
        """Make room for pieces; `new`: begin, end and slot of those that are not encoded yet."""
        slots = np.zeros(2 * len(self._slots), np.uint64)
        double_slots(self._slots, slots, new[2])
        self._slots = slots
        self._words = _roomy(self._words, int(self._state[1]), 2 * len(self._words))


def frozen(array: Array) -> Array:
    """A read-only view: a kernel is compiled once for these, and once for others."""
    view = array.view()
    view.flags.writeable = False
    return view


def _roomy(array: Array, used: int, length: int) -> Array:
    """The same array, or a longer copy."""
    if length <= len(array):
        return array
    longer = np.empty(2 * length, array.dtype)
    longer[:used] = array[:used]
    return longer
