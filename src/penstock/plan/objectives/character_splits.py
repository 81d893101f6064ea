"""Cut a tokenized document between characters: the token at a cut is split, the text around it
encoded again.

Guarantees: the sections spell the document's bytes, in order; tokens far from a cut are unchanged;
control tokens are never cut or encoded. A cut moves to the border of its token if its sides cannot
be encoded exactly, or if it makes too many tokens; so nothing is lost.

Costs: a sum over the document's tokens, and one encoding of a few tokens' text on each side of a
cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from penstock.core.arrays import Array, Float32, Int32
from penstock.tokenizers import Tokenizer

WINDOWS = (4, 16)
"""Tokens next to a cut that are encoded again with it: the first number that leaves the far end
unchanged.

Byte pairs merge within a word (or another piece that the tokenizer's pattern cuts out), so a few
tokens on, encoding falls back into step; where even the larger number does not (a long run without
a space), the cut token is encoded alone.
"""

REACH = max(WINDOWS) + 4
"""Tokens next to a cut that are read: a few more, because a window may end inside a character of
several tokens.
"""

GUARD = "\n"
"""Put before a piece for tokenizers that put a space before every text; its tokens are taken off
again.
"""

Tokens = Int32
Place = tuple[int, int]
"""A token, and a byte in it: just before that byte."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """Ids, int32 [n], and their weights, float32 [n]."""

    ids: Tokens
    weights: Float32

    @staticmethod
    def of(token: int, weight: float) -> "Section":
        """One token."""
        return Section(np.array([token], np.int32), np.array([weight], np.float32))

    @staticmethod
    def joined(sections: Sequence["Section"]) -> "Section":
        """All of them, end to end; none: an empty one."""
        empty = np.empty(0, np.int32)
        ids = np.concatenate([empty, *(section.ids for section in sections)])
        return Section(
            ids,
            np.concatenate([empty.astype(np.float32), *(section.weights for section in sections)]),
        )


@final
class CharacterSplitter:
    """Cuts documents of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Args: `tokenizer`, a `Tokenizer`; raises TokenizerError where it has no exact byte
        table.
        """
        self._table = tokenizer.byte_table
        self._encoder = tokenizer.inner
        # A character begins at each byte that does not continue one (UTF-8); an id without bytes
        # counts as one.
        self._begins = (self._table.data & 0xC0) != 0x80
        before = np.concatenate(([0], np.cumsum(self._begins)))
        spelled = before[self._table.offsets[1:]] - before[self._table.offsets[:-1]]
        self._silent = self._table.lengths == 0
        self._characters = np.where(self._silent, 1, spelled)
        firsts = np.minimum(self._table.offsets[:-1], len(self._begins) - 1)
        self._aligned = self._silent | self._begins[firsts]

    def count(self, tokens: Tokens) -> int:
        """Characters of a document; a control token is one. A token of continuing bytes alone has
        none.
        """
        return int(self._characters[self._table.check(tokens)].sum())

    def split(
        self, tokens: Tokens, weights: Float32, first: int, second: int, room: int
    ) -> tuple[Section, Section, Section]:
        """Cut before character `first` and before character `second`.

        Args:
            tokens: [n] the document.
            weights: [n] weight of each token; a token encoded again gets the weight of the token
                that its last byte comes from, as tokens of chats get theirs by their last
                character.
            first: 0 to `count`, at most `second`.
            second: 0 to `count`.
            room: The sections have at most n + room tokens.

        Returns:
            What comes before, between and after.
        """
        ends = np.cumsum(self._characters[tokens])
        cut_1, cut_2 = (self._place(tokens, ends, point) for point in (first, second))
        border_1 = (cut_1[0], 0)
        border_2 = (cut_2[0] + (cut_2[1] > 0), 0)
        begin, end = (0, 0), (len(tokens), 0)
        for left, right in ((cut_1, cut_2), (cut_1, border_2), (border_1, cut_2)):
            places = ((begin, left), (left, right), (right, end))
            sections = [self._section(tokens, weights, *place) for place in places]
            made = [section for section in sections if section is not None]
            if len(made) == 3 and sum(len(section.ids) for section in made) <= len(tokens) + room:
                return made[0], made[1], made[2]
        before, between, after = (
            slice(0, border_1[0]),
            slice(border_1[0], border_2[0]),
            slice(border_2[0], None),
        )
        return tuple(Section(tokens[part], weights[part]) for part in (before, between, after))  # type: ignore[return-value]

    def _place(self, tokens: Tokens, ends: Array, point: int) -> Place:
        """Where character number `point` begins; behind the last token for the one after the
        last.
        """
        token = int(np.searchsorted(ends, point, side="right"))
        if token == len(tokens):
            return token, 0
        token_id = int(tokens[token])
        if self._silent[token_id]:
            return token, 0
        inside = point - (int(ends[token]) - int(self._characters[token_id]))
        spelled = slice(self._table.offsets[token_id], self._table.offsets[token_id + 1])
        return token, int(np.flatnonzero(self._begins[spelled])[inside])

    def _section(self, tokens: Tokens, weights: Array, begin: Place, end: Place) -> Section | None:
        """The section between two places; None if it cannot be encoded."""
        (first, begin_byte), (last, end_byte) = begin, end
        if begin == end:
            return Section.joined(())
        near = last - first <= 2 * REACH
        if begin_byte and end_byte and near and not self._silent[tokens[first:last]].any():
            return self._encoded(tokens, weights, begin, end)
        parts: list[Section | None] = []
        if begin_byte:
            head, first = self._head(tokens, weights, begin, last)
            parts.append(head)
        tail: list[Section | None] = []
        if end_byte:
            ending, last = self._tail(tokens, weights, first, end)
            tail.append(ending)
        parts += [Section(tokens[first:last], weights[first:last]), *tail]
        made = [part for part in parts if part is not None]
        return Section.joined(made) if len(made) == len(parts) else None

    def _head(
        self, tokens: Tokens, weights: object, begin: Place, last: int
    ) -> tuple[Section | None, int]:
        """The rest of a cut token with some tokens after it, and the first token that stays as it
        is.
        """
        text_end = self._text_end(tokens, begin[0] + 1, min(last, begin[0] + REACH))
        for window in (*WINDOWS, 0):
            stop = min(begin[0] + 1 + window, text_end)
            while stop < text_end and not self._aligned[tokens[stop]]:
                stop += 1
            made = self._encoded(tokens, weights, begin, (stop, 0))
            whole = stop == last or self._silent[tokens[stop]]
            if made is not None and (whole or not window or made.ids[-1] == tokens[stop - 1]):
                return made, stop
        return None, last

    def _tail(
        self, tokens: Tokens, weights: object, first: int, end: Place
    ) -> tuple[Section | None, int]:
        """The beginning of a cut token with some tokens before it, and the first token that is in
        it.
        """
        text_begin = self._text_begin(tokens, max(first, end[0] - REACH), end[0])
        for window in (*WINDOWS, 0):
            start = max(end[0] - window, text_begin)
            while start > text_begin and not self._aligned[tokens[start]]:
                start -= 1
            made = self._encoded(tokens, weights, (start, 0), end)
            whole = start == first or self._silent[tokens[start - 1]]
            if made is not None and (whole or not window or made.ids[0] == tokens[start]):
                return made, start
        return None, first

    def _text_end(self, tokens: Tokens, first: int, last: int) -> int:
        """The first control token of [first, last), or last."""
        silent = np.flatnonzero(self._silent[tokens[first:last]])
        return first + int(silent[0]) if len(silent) else last

    def _text_begin(self, tokens: Tokens, first: int, last: int) -> int:
        """One after the last control token of [first, last), or first."""
        silent = np.flatnonzero(self._silent[tokens[first:last]])
        return first + int(silent[-1]) + 1 if len(silent) else first

    def _encoded(self, tokens: Tokens, weights: Any, begin: Place, end: Place) -> Section | None:
        """The text between two places, encoded again."""
        touched = slice(begin[0], end[0] + (end[1] > 0))
        lengths = self._table.lengths[tokens[touched]]
        cut_off = int(lengths[-1]) - end[1] if end[1] else 0
        part = slice(begin[1], int(lengths.sum()) - cut_off)
        ids = self._encode(self._table.spell(tokens[touched])[part].tobytes())
        if ids is None:
            return None
        of_bytes = np.repeat(weights[touched], lengths)[part]
        return Section(ids, of_bytes[np.cumsum(self._table.lengths[ids]) - 1])

    def _encode(self, spelled: bytes) -> Tokens | None:
        """Ids that spell exactly these bytes; None if the tokenizer has none, or they are not whole
        characters.
        """
        try:
            text = spelled.decode()
        except UnicodeDecodeError:
            return None
        ids: Tokens = self._encoder.encode(text).astype(np.int32)
        if self._table.spell(ids).tobytes() == spelled:
            return ids
        ids = self._encoder.encode(GUARD + text).astype(np.int32)
        ends = np.cumsum(self._table.lengths[ids])
        guard = int(np.searchsorted(ends, ends[-1] - len(spelled))) + 1
        return ids[guard:] if self._table.spell(ids[guard:]).tobytes() == spelled else None
