"""One tokenizer's ids as another's: the text that they spell, encoded again, with the other's
control tokens.

Costs: about as much as encoding with the other tokenizer, and 5 µs per stretch between control
tokens.
"""

from collections.abc import Mapping
from typing import Any, final

import numpy as np

from penstock.tokenizers._alignment_kernels import BEGINS, ENDS, TEXT
from penstock.tokenizers.alignment_sides import Side
from penstock.tokenizers.byte_table import IntArray
from penstock.tokenizers.tokenizer import Tokenizer

CONTINUES = range(0x80, 0xC0)
"""Bytes that do not begin a character of UTF-8."""


@final
class Retokenizer:
    """From a student's ids to a teacher's."""

    def __init__(
        self, student: Tokenizer, teacher: Tokenizer, pairs: Mapping[int, int], *, exact: bool
    ) -> None:
        """Args: `pairs`, control ids, student → teacher; `exact`, whether the student has a byte
        table.
        """
        self._student, self._teacher, self._pairs, self._exact = (
            student,
            teacher,
            dict(pairs),
            exact,
        )
        self._always_spaced = (
            student.inner is student
        )  # a space before texts is also one before stretches
        # If the teacher begins each stretch with a space, text before and after a dropped token is
        # one stretch.
        self._joins = teacher.adds_space and teacher.inner is teacher

    def encode(self, ids: IntArray, spelled: Side, *, begins_text: bool) -> IntArray:
        """The teacher's ids; `spelled` is what `ids` spell."""
        encoded: list[Any] = []
        parts = spelled.parts[ids]
        first, at_start, text = 0, begins_text, ""
        for place in [*np.flatnonzero(parts != TEXT).tolist(), len(ids)]:
            if place > first:
                spaced = (
                    begins_text if first == 0 else (at_start and not text) or self._always_spaced
                )
                text += self._text(ids, spelled, first, place, spaced)
            first = place + 1
            control = (
                self._counterpart(int(ids[place]), int(parts[place]), place == 0)
                if place < len(ids)
                else []
            )
            if self._joins and not control and place < len(ids):
                continue
            if text:
                if self._joins and not begins_text and not encoded:
                    text = text.removeprefix(" ") or text  # the teacher adds its own
                encoded.append((self._teacher if at_start else self._teacher.inner).encode(text))
                at_start, text = False, ""
            encoded.append(control)
            at_start = at_start and place < len(ids) and bool(parts[place] & BEGINS)
        return np.concatenate(encoded).astype(np.int64)

    def _text(self, ids: IntArray, spelled: Side, first: int, end: int, spaced: bool) -> str:
        """The text of ids first:end; `spaced`: without the space that the student's tokenizer put
        before it.
        """
        if not self._exact:
            return self._student.decode(ids[first:end])
        begin = int(spelled.ends[first - 1]) if first else 0
        data = spelled.data[begin : int(spelled.ends[end - 1])].tobytes()
        if self._student.adds_space and spaced:
            data = data.removeprefix(b" ")
        try:
            return data.decode()
        except UnicodeDecodeError:
            return _whole_characters(data).decode(errors="replace")

    def _counterpart(self, token_id: int, part: int, is_first: bool) -> list[int]:
        """The teacher's control token with the same role, if there is one.

        A token that is both BOS and EOS, as in GPT-2, is BOS at the first place and EOS elsewhere.
        """
        if token_id in self._pairs:
            return [self._pairs[token_id]]
        begins = bool(part & BEGINS) and (is_first or not part & ENDS) and part != TEXT
        ends = bool(part & ENDS) and not begins
        found = self._teacher.bos_id if begins else self._teacher.eos_id if ends else None
        return [] if found is None else [found]


def _whole_characters(data: bytes) -> bytes:
    """`data` without incomplete characters at its beginning and end."""
    begin = 0
    while begin < min(3, len(data)) and data[begin] in CONTINUES:
        begin += 1
    for back in range(1, min(4, len(data) - begin) + 1):
        lead = data[-back]
        if lead in CONTINUES:
            continue
        size = 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        return data[begin : len(data) - back] if size > back else data[begin:]
    return data[begin:]
