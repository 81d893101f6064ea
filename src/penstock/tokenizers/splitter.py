"""Cuts texts into the pieces that a byte-level vocabulary encodes one at a time.

Each step of the pre-tokenizer of a `tokenizer.json` becomes an automaton, which cuts the pieces of
the step before it. Steps after `ByteLevel` see the characters that stand for bytes, one for each
byte. So Falcon's last steps take the bytes B2, B3, B9 and BC to BE, which are written ²³¹¼½¾, for
digits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from penstock.core.arrays import Array, Bytes, Int64
from penstock.core.errors import TokenizerError
from penstock.core.json_values import JsonObject
from penstock.tokenizers import character_sets
from penstock.tokenizers._split_kernels import COLUMNS, MATCH, STOP, WIDE, cut_pieces
from penstock.tokenizers.spelling import spell_as_characters
from penstock.tokenizers.split_automaton import END, Automaton, compile_split
from penstock.tokenizers.split_regex import Characters, Choice, Node, Repeat, literal, read_pattern
from penstock.tokenizers.steps import flatten

Int32 = np.ndarray[Any, np.dtype[np.int32]]

BYTE_LEVEL_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""By which the step `ByteLevel` of the tokenizers package splits, as GPT-2 did."""

_JOINS = {
    "Isolated": 0b0000,
    "Removed": 0b0000,
    "Contiguous": 0b1001,
    "MergedWithPrevious": 0b0010,
    "MergedWithNext": 0b0100,
}
"""Which stretches continue the piece before them; see `cut_pieces`."""
_FLIPPED = {0b0010: 0b0100, 0b0100: 0b0010}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The pieces of texts.

    Attributes:
        places: Where each begins, and where it ends, int32 [2, pieces].
        rows: The first piece of each text, int32 [texts + 1].
    """

    places: Int32
    rows: Int32


@final
@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: what it matches, and what becomes of the matches and of what lies between them."""

    node: Node
    joins: int = 0
    drops: int = 0
    bytewise: bool = False
    words: bool = False
    """Whether it leaves pieces about as short as words."""

    @cached_property
    def automaton(self) -> Automaton:
        """It finds matches."""
        return compile_split(self.node)

    @cached_property
    def table(self) -> Array:
        """Its transitions as `cut_pieces` takes them, uint32 [states × 256]."""
        automaton = self.automaton
        if self.bytewise:
            alphabet = [ord(spell_as_characters(bytes([byte]))) for byte in range(COLUMNS)]
            columns = automaton.classes[alphabet]
        else:
            kinds = automaton.ends.shape[1]
            if kinds > COLUMNS - WIDE:
                raise TokenizerError(f"its pattern tells {kinds} classes of characters apart")
            columns = np.zeros(COLUMNS, np.uint8)
            columns[:WIDE] = automaton.classes[:WIDE]
            columns[WIDE : WIDE + kinds] = np.arange(kinds)
        targets = automaton.targets[:, columns]
        flags = MATCH * automaton.ends[:, columns] + STOP * (targets == 0)
        table: Array = (COLUMNS * targets + flags).astype(np.uint32)
        return table.ravel()

    def cut(self, data: Bytes, pieces: Pieces) -> Pieces:
        """Cut pieces further."""
        begins, ends = pieces.places
        room = np.empty((2, int((ends - begins).sum(dtype=np.int64))), np.int32)
        rows = pieces.rows.copy()
        count = cut_pieces(
            data,
            begins,
            ends,
            rows,
            0x100 if self.bytewise else WIDE,
            self.automaton.classes,
            self.table,
            self.automaton.ends[:, END].copy(),
            self.joins,
            self.drops,
            room,
        )
        return Pieces(places=room[:, :count], rows=rows)


@final
class Splitter:
    """Cuts texts as the pre-tokenizer of a `tokenizer.json` does."""

    def __init__(self, pre_tokenizer: JsonObject | None) -> None:
        """Compile the steps.

        Raises:
            TokenizerError: A step is not supported; the message says which, and why.
        """
        steps = read_steps(pre_tokenizer)
        for step in steps:
            _ = step.table
        # After GPT-2's pattern pieces are words: what cuts them further is done once for each.
        words = any(step.words for step in steps)
        self.steps = [step for step in steps if not (words and step.bytewise)]
        self._later = [step for step in steps if words and step.bytewise]

    def cut(self, data: Bytes, offsets: Int64) -> Pieces:
        """Cut texts, if there are `cut_words` not to the end.

        Args:
            data: UTF-8 bytes of less than 2 GiB, read-only.
            offsets: Where each text begins, int64 [texts + 1].
        """
        bounds = offsets.astype(np.int32)
        # A text without bytes has no piece.
        filled = bounds[1:] > bounds[:-1]
        rows = np.concatenate(([0], np.cumsum(filled))).astype(np.int32)
        pieces = Pieces(places=np.stack([bounds[:-1][filled], bounds[1:][filled]]), rows=rows)
        for step in self.steps:
            pieces = step.cut(data, pieces)
        return pieces

    @property
    def cut_words(self) -> Callable[[Bytes, Int32], Pieces] | None:
        """The rest of the steps, which is still to be done for each piece by itself; None: nothing.

        It takes the bytes, and begins and ends of pieces, int32 [2, pieces], as texts.
        """
        return self._cut_words if self._later else None

    def _cut_words(self, data: Bytes, places: Int32) -> Pieces:
        pieces = Pieces(places=places, rows=np.arange(places.shape[1] + 1, dtype=np.int32))
        for step in self._later:
            pieces = step.cut(data, pieces)
        return pieces


def read_steps(pre_tokenizer: JsonObject | None) -> list[Step]:
    """The steps of a pre-tokenizer; those that change nothing are left out.

    Raises:
        TokenizerError: A step is not supported.
    """
    steps: list[Step] = []
    bytewise = False
    for one in flatten(pre_tokenizer):
        if one["type"] == "ByteLevel":
            if bytewise:
                raise TokenizerError("it has two steps ByteLevel")
            if one.get("add_prefix_space", True):
                raise TokenizerError("its step ByteLevel puts a space before the text")
            if one.get("use_regex", True):
                steps.append(Step(node=read_pattern(BYTE_LEVEL_PATTERN), words=True))
            bytewise = True
        else:
            steps.append(_step(one, bytewise=bytewise))
    if not bytewise:
        raise TokenizerError("it has no step ByteLevel")
    return steps


def _step(step: JsonObject, *, bytewise: bool) -> Step:
    kind = step["type"]
    if kind == "Split":
        pattern = step["pattern"]
        node = read_pattern(pattern["Regex"]) if "Regex" in pattern else literal(pattern["String"])
        return _behaving(node, step["behavior"], bytewise=bytewise, invert=bool(step.get("invert")))
    if kind == "Digits":
        way = "Isolated" if step.get("individual_digits") else "Contiguous"
        return _behaving(_set_of(character_sets.numbers()), way, bytewise=bytewise)
    if kind == "Punctuation":
        node = _set_of(character_sets.punctuation())
        return _behaving(node, step.get("behavior", "Isolated"), bytewise=bytewise)
    if kind == "WhitespaceSplit":
        return _behaving(_set_of(character_sets.white_space()), "Removed", bytewise=bytewise)
    if kind == "Whitespace":
        words, others = map(_set_of, character_sets.words_and_others())
        node = Choice((Repeat(words, 1, None), Repeat(others, 1, None)))
        return _behaving(node, "Removed", bytewise=bytewise, invert=True)
    raise TokenizerError(f"it has the step {kind}")


def _set_of(found: Array) -> Characters:
    return Characters(tuple(character_sets.asked()[found].tolist()))


def _behaving(node: Node, behavior: str, *, bytewise: bool, invert: bool = False) -> Step:
    """A step with one of the package's behaviors."""
    if behavior not in _JOINS:
        raise TokenizerError(f"it splits with the behavior {behavior}")
    joins = _JOINS[behavior]
    drops = (0b01 if invert else 0b10) if behavior == "Removed" else 0
    if invert:
        joins = _FLIPPED.get(joins, joins)
    return Step(node=node, joins=joins, drops=drops, bytewise=bytewise)
