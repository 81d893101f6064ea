"""Undo what a tokenizer did to a text before it cut it into tokens, to compare it with another
tokenizer.

Two uses. *Normalised*: the bytes of both sides in one Unicode form. A token end is kept only where
the text before and after it normalises independently, so a token that ends between a letter and its
accent is never matched with one that does not. *Canonical*: both sides without whitespace, case and
accents, for vocabularies in which tokens do not spell their text (WordPiece, lossy normalisers).

Costs: about 10 ns per byte of plain ASCII, 1 µs per other character; only where plain bytes differ.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np

from penstock.core.arrays import Array
from penstock.tokenizers._alignment_kernels import EQUIVALENT, EXACT
from penstock.tokenizers.alignment_sides import Chunks, Side
from penstock.tokenizers.byte_table import ByteArray, IntArray

Form = Literal["NFC", "NFKC"]

Edit = tuple[int, int, str]
"""Begin and end in characters, and the replacement."""

_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


def normalise(side: Side, form: Form) -> Side:
    """`side` in a Unicode normalisation form ("NFC" or "NFKC"); broken UTF-8 stays as it is."""
    return _rewrite(side, lambda text: _normal_edits(text, form))


def canonicalise(side: Side) -> Side:
    """`side` without whitespace, case, accents and compatibility forms."""
    return _rewrite(side, _canonical_edits)


def mark_equivalent(chunks: Chunks, given: tuple[Side, Side], normal: tuple[Side, Side]) -> None:
    """Mark chunks that are EXACT on normalised sides as EQUIVALENT if their original bytes
    differ.
    """
    bounds = chunks.student_bounds, chunks.teacher_bounds
    edited = np.zeros(len(chunks.kinds), np.bool_)
    for side, where in zip(normal, bounds, strict=True):
        if side.edits is not None:
            edited |= side.edits[where[:, 1]] > side.edits[where[:, 0]]
    for chunk in np.flatnonzero(edited & (chunks.kinds == EXACT)):
        spelled = [_bytes_of(side, where[chunk]) for side, where in zip(given, bounds, strict=True)]
        if spelled[0] != spelled[1]:
            chunks.kinds[chunk] = EQUIVALENT


def _bytes_of(side: Side, bounds: Array) -> bytes:
    begin, end = (int(side.ends[place - 1]) if place else 0 for place in bounds)
    return side.data[begin:end].tobytes()


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
    before = np.searchsorted(
        spans[:, 1], side.ends, "right"
    )  # spans that end at or before each end
    inside = np.zeros(len(side.ends), np.bool_)
    some = before < len(spans)
    inside[some] = spans[before[some], 0] < side.ends[some]
    ends = side.ends + grown[before]
    ends[inside] = (spans[before[inside], 0] + grown[before[inside]]).astype(np.int64)
    touched = np.concatenate(([0], before + inside))
    return replace(side, data=data, ends=ends, open=~inside, edits=touched)


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
    """Whether nothing before this character can combine with it: no mark, and no vowel or final of
    a Hangul syllable.

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
    return "".join(
        c for c in plain if not unicodedata.category(c).startswith("M") and not c.isspace()
    )
