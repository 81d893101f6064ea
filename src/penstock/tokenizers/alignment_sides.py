"""One side of an alignment: what a tokenizer's ids spell, and what the tokenizer did to its text before.

One side of an alignment: what a tokenizer's ids spell, as flat arrays; and the walk over two sides.

Costs: spelling and walking take about 10 ns per token and 2 ns per byte, and no Python object per token.

Undo what a tokenizer did to a text before it cut it into tokens, to compare it with another tokenizer.

Two uses. *Normalised*: the bytes of both sides in one Unicode form. A token end is kept only where the text before and
after it normalises independently, so a token that ends between a letter and its accent is never matched with one that
does not. *Canonical*: both sides without whitespace, case and accents, for vocabularies in which tokens do not spell
their text (WordPiece, lossy normalisers).

Costs: about 10 ns per byte of plain ASCII, 1 µs per other character; only where plain bytes differ.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, final

import numpy as np

from penstock.core.errors import TokenizerError
from penstock.tokenizers._alignment_kernels import (
    BEGINS,
    DIFFERS,
    ENDS,
    EQUIVALENT,
    EXACT,
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
from penstock.tokenizers.tokenizer import Tokenizer
from penstock.tokenizers.vocabulary import ByteArray, ByteTable, IntArray

BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
BoundsArray = np.ndarray[Any, np.dtype[np.int32]]
KindArray = np.ndarray[Any, np.dtype[np.uint8]]

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
    """int64 [tokens + 1]: number of changes in the text before each token; None: the text was not changed."""


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
        """Args: `pairs`, id → number of its pair; `exact`: use the byte table, else the strings of tokens."""
        table = tokenizer.byte_table if exact else tokenizer.rough_byte_table
        self._table, self._spaced = table, tokenizer.adds_space
        self.parts: IntArray = np.where(table.is_control, 0, TEXT).astype(np.int64)
        for token_id, number in pairs.items():
            if not (0 <= token_id < len(table) and table.is_control[token_id]):
                raise TokenizerError(f"control_pairs: id {token_id} is not a control token of {tokenizer}")
            self.parts[token_id] |= PAIRED * (number + 1)
        for named, part in ((tokenizer.bos_id, BEGINS), (tokenizer.eos_id, ENDS)):
            if named is not None:
                self.parts[named] = max(int(self.parts[named]), 0) | part
        plain = (self.parts == TEXT) & (table.lengths > 0) & (table.lengths <= MOST_BYTES)
        self._entries: IntArray = table.offsets[:-1] << OFFSET_AT | table.lengths << 1 | (~plain).astype(np.int64)
        self.plain = (self.parts, table.data, self._entries, _heads(table), self._spaced)

    def spell(self, ids: IntArray) -> Side:
        """The bytes of `ids` as a side.

        Raises:
            TokenizerError: An id lies outside the vocabulary.
        """
        size = count_bytes(ids, self._table.lengths)
        if size < 0:
            raise TokenizerError(f"id {ids[-1 - size]} is outside the vocabulary of {len(self._table)} ids")
        data, ends = np.empty(size, np.uint8), np.empty(len(ids), np.int64)
        spell(ids, self._table.data, self._table.offsets, data, ends)
        opened = np.ones(len(ids), np.bool_)
        return Side(ids=ids, parts=self.parts, data=data, ends=ends, open=opened, spaced=self._spaced)


def _heads(table: ByteTable) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The first bytes of each id as one number, padded with zeros, uint64 [vocab]."""
    heads = np.zeros((len(table), HEAD_BYTES), np.uint8)
    for place in range(HEAD_BYTES):
        longer = np.flatnonzero(table.lengths > place)
        heads[longer, place] = table.data[table.offsets[longer] + place]
    return heads.view(np.uint64)[:, 0]


def walk_same(student: TokenTable, student_ids: IntArray, teacher: TokenTable, teacher_ids: IntArray) -> Chunks | None:
    """`walk` for sides that spell the same plain text; None if they may not, or if an id is unknown."""
    chunks = _room(student_ids, teacher_ids)
    count = walk_plain(student_ids, *student.plain, teacher_ids, *teacher.plain, *chunks)
    return None if count < 0 else _first(chunks, count)


def walk(student: Side, teacher: Side, *, resume: bool = False) -> Chunks | None:
    """The finest chunks with equal bytes.

    Args:
        student: The student's tokens.
        teacher: The teacher's tokens.
        resume: Where bytes differ, continue at the next place that is proved equal; if False, return None there.
    """
    chunks = _room(student.ids, teacher.ids)
    heads, links = _index(teacher.data) if resume else (_NO_INDEX, _NO_INDEX)
    count, ended = walk_kernel(
        *(student.ids, student.parts, student.data, student.ends, student.open, student.spaced),
        *(teacher.ids, teacher.parts, teacher.data, teacher.ends, teacher.open, teacher.spaced),
        *(heads, links, *chunks),
    )
    return None if ended == DIFFERS else _first(chunks, count)


Room = tuple[BoundsArray, BoundsArray, KindArray]


def _room(student_ids: IntArray, teacher_ids: IntArray) -> Room:
    """Space for the largest possible number of chunks."""
    most = min(len(student_ids), len(teacher_ids))
    return np.empty((most, 2), np.int32), np.empty((most, 2), np.int32), np.empty(most, np.uint8)


def _first(room: Room, count: int) -> Chunks:
    return Chunks(room[0][:count], room[1][:count], room[2][:count])


def _index(data: ByteArray) -> tuple[np.ndarray[Any, np.dtype[np.int32]], np.ndarray[Any, np.dtype[np.int32]]]:
    heads = np.empty(1 << max(2 * len(data), 4).bit_length(), np.int32)
    links = np.empty(len(data), np.int32)
    index_places(data, heads, links)
    return heads, links


Form = Literal["NFC", "NFKC"]


def normalise(side: Side, form: Form) -> Side:
    """`side` in a Unicode normalisation form ("NFC" or "NFKC"); broken UTF-8 stays as it is."""
    return _rewrite(side, lambda text: _normal_edits(text, form))


def canonicalise(side: Side) -> Side:
    """`side` without whitespace, case, accents and compatibility forms."""
    return _rewrite(side, _canonical_edits)


def mark_equivalent(chunks: Chunks, given: tuple[Side, Side], normal: tuple[Side, Side]) -> None:
    """Mark chunks that are EXACT on normalised sides as EQUIVALENT if their original bytes differ."""
    bounds = chunks.student_bounds, chunks.teacher_bounds
    edited = np.zeros(len(chunks.kinds), np.bool_)
    for side, where in zip(normal, bounds, strict=True):
        if side.edits is not None:
            edited |= side.edits[where[:, 1]] > side.edits[where[:, 0]]
    for chunk in np.flatnonzero(edited & (chunks.kinds == EXACT)):
        spelled = [_bytes_of(side, where[chunk]) for side, where in zip(given, bounds, strict=True)]
        if spelled[0] != spelled[1]:
            chunks.kinds[chunk] = EQUIVALENT


def _bytes_of(side: Side, bounds: Any) -> bytes:
    begin, end = (int(side.ends[place - 1]) if place else 0 for place in bounds)
    return side.data[begin:end].tobytes()


Edit = tuple[int, int, str]
"""Begin and end in characters, and the replacement."""


def _rewrite(side: Side, edits_of: Callable[[str], Iterator[Edit]]) -> Side:
    text = side.data.tobytes().decode(errors="surrogateescape")
    edits = list(edits_of(text))
    if not edits:
        return side
    pieces, spans, sizes = [], [], []
    done = place = 0
    for begin, end, new in edits:
        kept = text[done:begin].encode(errors="surrogateescape")
        place += len(kept)
        written = new.encode(errors="surrogateescape")
        size = len(text[begin:end].encode(errors="surrogateescape"))
        spans.append((place, place + size))
        sizes.append(len(written))
        pieces += [kept, written]
        done, place = end, place + size
    pieces.append(text[done:].encode(errors="surrogateescape"))
    data = np.frombuffer(b"".join(pieces), np.uint8)
    return _carry(side, data, np.array(spans, np.int64), np.array(sizes, np.int64))


def _carry(side: Side, data: ByteArray, spans: IntArray, sizes: IntArray) -> Side:
    """Token ends in the new bytes; an end inside a changed span is dropped."""
    grown = np.concatenate(([0], np.cumsum(sizes - (spans[:, 1] - spans[:, 0]))))
    before = np.searchsorted(spans[:, 1], side.ends, "right")  # spans that end at or before each end
    inside = np.zeros(len(side.ends), np.bool_)
    some = before < len(spans)
    inside[some] = spans[before[some], 0] < side.ends[some]
    ends = side.ends + grown[before]
    ends[inside] = (spans[before[inside], 0] + grown[before[inside]]).astype(np.int64)
    touched = np.concatenate(([0], before + inside))
    return replace(side, data=data, ends=ends, open=~inside, edits=touched)


_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


def _normal_edits(text: str, form: Form) -> Iterator[Edit]:
    """The smallest stretches that normalise independently and are not normal yet."""
    for found in _NOT_ASCII.finditer(text):
        begin = max(found.start() - 1, 0)  # a mark may belong to the letter before it
        run = text[begin : found.end()]
        if unicodedata.is_normalized(form, run):
            continue
        starts = [0, *(k for k in range(1, len(run)) if _stands_alone(run[k], form)), len(run)]
        new = [unicodedata.normalize(form, run[a:b]) for a, b in pairwise(starts)]
        if "".join(new) != unicodedata.normalize(form, run):
            starts, new = [0, len(run)], [unicodedata.normalize(form, run)]
        for (a, b), piece in zip(pairwise(starts), new, strict=True):
            if piece != run[a:b]:
                yield begin + a, begin + b, piece


@lru_cache(maxsize=65536)
def _stands_alone(character: str, form: Form) -> bool:
    """Whether nothing before this character can combine with it: no mark, and no vowel or final of a Hangul syllable.

    Source: Unicode Standard Annex #15, normalisation and concatenation.
    """
    first = unicodedata.normalize("NFKD" if "K" in form else "NFD", character)[0]
    return unicodedata.category(first)[0] != "M" and not 0x1160 <= ord(first) <= 0x11FF


def _canonical_edits(text: str) -> Iterator[Edit]:
    return ((k, k + 1, new) for k, new in enumerate(map(_canonical, text)) if new != text[k])


@lru_cache(maxsize=65536)
def _canonical(character: str) -> str:
    if character.isspace() or character == "▁":
        return ""
    plain = unicodedata.normalize("NFKD", character.casefold())
    return "".join(c for c in plain if not unicodedata.category(c).startswith("M") and not c.isspace())
