"""One side of an alignment, what a tokenizer's ids spell, as flat arrays; and the walk over two
sides.

Costs: spelling and walking take about 10 ns per token and 2 ns per byte, and no Python object per
token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from penstock.core.arrays import Bool, Bytes, Int32, UInt64
from penstock.core.errors import TokenizerError
from penstock.tokenizers._alignment_kernels import (
    BEGINS,
    DIFFERS,
    ENDS,
    HEAD_BYTES,
    MOST_BYTES,
    OFFSET_AT,
    PAIRED,
    TEXT,
    count_bytes,
    index_places,
    spell,
    walk_plain,
)
from penstock.tokenizers._alignment_kernels import walk as walk_kernel
from penstock.tokenizers.byte_table import ByteArray, ByteTable, IntArray
from penstock.tokenizers.tokenizer import Tokenizer

BoolArray = Bool
BoundsArray = Int32
KindArray = Bytes
Room = tuple[BoundsArray, BoundsArray, KindArray]

_NO_INDEX = np.empty(0, np.int32)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """Tokens of one side, spelled."""

    ids: IntArray
    """int64 [tokens]."""
    parts: IntArray
    """int64 [vocab]: for each id, TEXT, or the role of a control token."""
    data: ByteArray
    """uint8 [bytes]: the bytes of all tokens, end to end."""
    ends: IntArray
    """int64 [tokens]: where each token ends in `data`."""
    open: BoolArray
    """bool [tokens]: whether a chunk may end after it."""
    spaced: bool
    """Whether the tokenizer puts a space before a text."""
    edits: IntArray | None = None
    """int64 [tokens + 1]: number of changes in the text before each token; None: the text was not
    changed.
    """


@final
@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Ranges of tokens on both sides, int32 [chunks, 2], and their kinds, uint8 [chunks]."""

    student_bounds: BoundsArray
    teacher_bounds: BoundsArray
    kinds: KindArray


def has_byte_table(tokenizer: Tokenizer) -> bool:
    """Whether the bytes of every id are known."""
    try:
        _ = tokenizer.byte_table
    except TokenizerError:
        return False
    return True


@final
class TokenTable:
    """Bytes and role of each id of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, pairs: Mapping[int, int], *, exact: bool) -> None:
        """Args: `pairs`, id → number of its pair; `exact`: use the byte table, else the strings of
        tokens.
        """
        table = tokenizer.byte_table if exact else tokenizer.rough_byte_table
        self._table, self._spaced = table, tokenizer.adds_space
        self.parts: IntArray = np.where(table.is_control, 0, TEXT).astype(np.int64)
        for token_id, number in pairs.items():
            if not (0 <= token_id < len(table) and table.is_control[token_id]):
                raise TokenizerError(
                    f"control_pairs: id {token_id} is not a control token of {tokenizer}"
                )
            self.parts[token_id] |= PAIRED * (number + 1)
        for named, part in ((tokenizer.bos_id, BEGINS), (tokenizer.eos_id, ENDS)):
            if named is not None:
                self.parts[named] = max(int(self.parts[named]), 0) | part
        plain = (self.parts == TEXT) & (table.lengths > 0) & (table.lengths <= MOST_BYTES)
        self._entries: IntArray = (
            table.offsets[:-1] << OFFSET_AT | table.lengths << 1 | (~plain).astype(np.int64)
        )
        self.plain = (self.parts, table.data, self._entries, _heads(table), self._spaced)

    def spell(self, ids: IntArray) -> Side:
        """The bytes of `ids` as a side.

        Raises:
            TokenizerError: An id lies outside the vocabulary.
        """
        size = count_bytes(ids, self._table.lengths)
        if size < 0:
            raise TokenizerError(
                f"id {ids[-1 - size]} is outside the vocabulary of {len(self._table)} ids"
            )
        data, ends = np.empty(size, np.uint8), np.empty(len(ids), np.int64)
        spell(ids, self._table.data, self._table.offsets, data, ends)
        opened = np.ones(len(ids), np.bool_)
        return Side(
            ids=ids, parts=self.parts, data=data, ends=ends, open=opened, spaced=self._spaced
        )


def _heads(table: ByteTable) -> UInt64:
    """The first bytes of each id as one number, padded with zeros, uint64 [vocab]."""
    heads = np.zeros((len(table), HEAD_BYTES), np.uint8)
    for place in range(HEAD_BYTES):
        longer = np.flatnonzero(table.lengths > place)
        heads[longer, place] = table.data[table.offsets[longer] + place]
    return heads.view(np.uint64)[:, 0]


def walk_same(
    student: TokenTable, student_ids: IntArray, teacher: TokenTable, teacher_ids: IntArray
) -> Chunks | None:
    """`walk` for sides that spell the same plain text; None if they may not, or if an id is
    unknown.
    """
    chunks = _room(student_ids, teacher_ids)
    count = walk_plain(student_ids, *student.plain, teacher_ids, *teacher.plain, *chunks)
    return None if count < 0 else _first(chunks, count)


def walk(student: Side, teacher: Side, *, resume: bool = False) -> Chunks | None:
    """The finest chunks with equal bytes.

    Args:
        student: The student's tokens.
        teacher: The teacher's tokens.
        resume: Where bytes differ, continue at the next place that is proved equal; if False,
            return None there.
    """
    chunks = _room(student.ids, teacher.ids)
    heads, links = _index(teacher.data) if resume else (_NO_INDEX, _NO_INDEX)
    count, ended = walk_kernel(
        *(student.ids, student.parts, student.data, student.ends, student.open, student.spaced),
        *(teacher.ids, teacher.parts, teacher.data, teacher.ends, teacher.open, teacher.spaced),
        *(heads, links, *chunks),
    )
    return None if ended == DIFFERS else _first(chunks, count)


def _room(student_ids: IntArray, teacher_ids: IntArray) -> Room:
    """Space for the largest possible number of chunks."""
    most = min(len(student_ids), len(teacher_ids))
    return np.empty((most, 2), np.int32), np.empty((most, 2), np.int32), np.empty(most, np.uint8)


def _first(room: Room, count: int) -> Chunks:
    return Chunks(room[0][:count], room[1][:count], room[2][:count])


def _index(data: ByteArray) -> tuple[Int32, Int32]:
    heads = np.empty(1 << max(2 * len(data), 4).bit_length(), np.int32)
    links = np.empty(len(data), np.int32)
    index_places(data, heads, links)
    return heads, links
