"""Ids of pieces: those seen before from a hash table, new ones from a model.

Entries of the table are compared byte by byte, so that nothing depends on a hash. When it is full
it begins again: it takes about 60 MB at most.
"""

import threading
from collections.abc import Callable
from typing import final

import numpy as np

from penstock.core.arrays import Array, Bytes, Int64, UInt32
from penstock.core.compiled import address_of
from penstock.tokenizers._id_kernels import (
    WIDTH,
    count_ids,
    double_slots,
    find_values,
    join_ids,
    settle_values,
)
from penstock.tokenizers.piece_model import LONGEST, PieceModel
from penstock.tokenizers.splitter import Int32, Pieces

MOST_ENTRIES = 1 << 19
SEGMENT = 1 << 16
"""Pieces that are encoded at once; only between two segments the table may begin again."""

_FIRST_SLOTS = 1 << 13
_FIRST_BYTES = 1 << 16
_MOST_BYTES = 1 << 25


@final
class PieceCache:
    """The ids of pieces by a model; threads take turns."""

    def __init__(
        self,
        model: PieceModel,
        cut: Callable[[Bytes, Int32], Pieces] | None = None,
        *,
        most: int = MOST_ENTRIES,
        longest: int = LONGEST,
    ) -> None:
        """Begin empty.

        Args:
            model: It encodes what is new.
            cut: Cuts new pieces further before they are encoded.
            most: Number of pieces, of `SEGMENT` pieces more, at which it begins again.
            longest: Bytes of the longest piece that is kept.
        """
        self._model = model
        self._cut = cut
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
        whole = self._model.whole
        if whole:
            data = frozen(np.frombuffer(b"".join(whole), np.uint8))
            ends = np.cumsum([len(one) for one in whole], dtype=np.int32)
            places = np.stack([np.append(0, ends[:-1]).astype(np.int32), ends])
            ids = np.array(list(whole.values()), np.uint32)
            self._values_of(data, places, lambda _: (ids, np.arange(len(ids) + 1)))

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
        if self._state[0] > self._most or self._state[1] > _MOST_BYTES:
            self._begin()
        values, ids, starts, counts = self._values_of(
            data, pieces, lambda new: self._encode_new(data, new)
        )
        total = count_ids(values, counts, bounds[0], bounds[1:])
        joined = np.empty(total - bounds[0], np.uint32)
        join_ids(values, starts, counts, ids, self._kept, joined)
        return joined

    def _values_of(
        self, data: Bytes, pieces: Int32, encode: Callable[[Int64], tuple[UInt32, Int64]]
    ) -> tuple[Array, UInt32, Int64, Int64]:
        """The values of pieces in the table, where new ones are put.

        Args:
            data: The bytes that the pieces are of.
            pieces: Where each begins and ends.
            encode: Gives the ids of new pieces and where those of each begin, from their begins and
                ends, int64 [2, new pieces].

        Returns:
            The values; ids of new pieces; where those of each begin; their number.
        """
        values = np.empty(pieces.shape[1], np.uint64)
        new = np.empty((3, len(values)), np.int64)
        at = self._state[2] = 0
        while True:
            at = find_values(
                data,
                pieces,
                at,
                self._longest,
                self._slots,
                np.uint64(address_of(self._slots)),
                self._words,
                self._state,
                new,
                values,
            )
            if at == len(values):
                break
            self._grow(new)
        new = np.ascontiguousarray(new[:, : self._state[2]])
        if not new.shape[1]:
            none = np.empty(0, np.int64)
            return values, np.empty(0, np.uint32), none, none
        ids, bounds = encode(new[:2])
        starts, counts = bounds[:-1].copy(), np.diff(bounds)
        settle_values(self._slots, new[2], starts, counts, ids, self._used)
        self._kept = _roomy(self._kept, self._used, self._used + len(ids))
        self._kept[self._used : self._used + len(ids)] = ids
        self._used += len(ids)
        return values, ids, starts, counts

    def _encode_new(self, data: Bytes, new: Int64) -> tuple[UInt32, Int64]:
        """Ids of new pieces, and where those of each begin."""
        if self._cut is None:
            return self._model.encode(data, new[0], new[1])
        pieces = self._cut(data, new.astype(np.int32))
        begins, ends = pieces.places.astype(np.int64)
        ids, bounds = self._model.encode(data, begins, ends)
        return ids, bounds[pieces.rows]

    def _grow(self, new: Int64) -> None:
        """Make room for pieces; `new`: begin, end and slot of those that are not encoded yet."""
        if 2 * WIDTH * self._state[0] < len(self._slots):
            self._words = _roomy(self._words, int(self._state[1]), 2 * len(self._words))
            return
        slots = np.zeros(2 * len(self._slots), np.uint64)
        double_slots(self._slots, slots, new[2])
        self._slots = slots


def frozen(array: Array) -> Array:
    """A read-only view: a kernel is compiled once for these, and once for others."""
    view = array.view()
    view.flags.writeable = False
    return view


def _roomy(array: Array, used: int, length: int) -> Array:
    """The same array, or a longer copy."""
    if length <= len(array):
        return array
    longer = np.empty(length + length // 2, array.dtype)
    longer[:used] = array[:used]
    return longer
