"""The bytes that each id of a vocabulary stands for, in two flat arrays.

Guarantees: for every id that encoding can produce, the entry is exactly the bytes that the id
stands for; control entries and unused ids are empty. Costs: one byte per byte of vocabulary, and 8
bytes per id.
"""

from collections.abc import Iterable
from typing import final

import numpy as np

from penstock.core.arrays import Bytes, Int64
from penstock.core.errors import TokenizerError

IntArray = Int64
ByteArray = Bytes


@final
class ByteTable:
    """id → bytes.

    Attributes:
        data: The bytes of all ids, end to end, uint8.
        offsets: Where each id's bytes begin, int64 [vocab + 1].
        lengths: Bytes of each id, int64 [vocab].
        is_control: Ids that stand for no text: control entries, unknown, unused, bool [vocab].
    """

    __slots__ = ("data", "is_control", "lengths", "offsets")

    def __init__(self, entries: Iterable[bytes | None]) -> None:
        """Build from the bytes of id 0, 1, 2, …; None marks an id that stands for no text."""
        listed = list(entries)
        self.data: ByteArray = np.frombuffer(b"".join(entry or b"" for entry in listed), np.uint8)
        self.lengths: IntArray = np.array([len(entry or b"") for entry in listed], np.int64)
        self.offsets: IntArray = np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int64)
        self.is_control = np.array([entry is None for entry in listed], np.bool_)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, token_id: int) -> bytes:
        self.check([token_id])
        return self.data[self.offsets[token_id] : self.offsets[token_id + 1]].tobytes()

    def spell(self, ids: object) -> ByteArray:
        """Bytes of `ids`, end to end, uint8; costs about 10 ns per byte and no Python object per
        token.

        Raises:
            TokenizerError: An id lies outside the vocabulary.
        """
        ids = self.check(ids)
        if not len(ids):
            return np.empty(0, np.uint8)
        lengths = self.lengths[ids]
        ends = np.cumsum(lengths)
        # Byte k of the output comes from (start of its token's entry) + (k - start of its token in
        # the output).
        shifts = np.repeat(self.offsets[ids] - (ends - lengths), lengths)
        spelled: ByteArray = self.data[shifts + np.arange(ends[-1])]
        return spelled

    def check(self, ids: object) -> IntArray:
        """`ids` as int64, all inside the vocabulary.

        Raises:
            TokenizerError: An id lies outside the vocabulary, as -100, a masked target, does.
        """
        checked = np.asarray(ids, np.int64)
        outside = checked[(checked < 0) | (checked >= len(self))]
        if len(outside):
            raise TokenizerError(f"id {outside[0]} is outside the vocabulary of {len(self)} ids")
        return checked
