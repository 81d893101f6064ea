"""What every vocabulary format must say, what each id spells in bytes, and where each token of a text ends.

What every id of a vocabulary spells, as bytes, and where each token of a text ends.

What every id of a vocabulary spells, as bytes, in two flat arrays.

Guarantees: for every id that encoding can produce, the entry is exactly the bytes that the id stands for; control
entries and unused ids are empty. Costs: one byte per byte of vocabulary, and 8 bytes per id.

Where each token ends in its text, in bytes, proved by comparing the bytes of the ids with those of the text.

Guarantees: either the positions are exact, or an error says what differs. Only one difference is allowed: a single
space that the tokenizer puts before the text. Costs: about 20 ns per byte, a batch at a time, with no Python object per
token.

The interface of all vocabulary formats, and the rule that separates control entries from content.

**The rule.** An entry that a tokenizer adds to its model (Hugging Face `added_tokens`, SentencePiece user-defined
pieces) is *content* only if it is not marked special and consists only of letters, marks, digits and whitespace: the
runs of spaces and tabs of GPT-NeoX, Phi-2 and Gemma, or added words. Everything else is *control*, marked special or
not: `<tool_call>`, `<think>`, `|||EMAIL_ADDRESS|||`, and also Gemma's `<table>`, which looks like a tag that steers a
model. Control entries are deleted from the encoders that see text; content entries stay, because without them the ids
of ordinary text would change.
"""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np

from penstock.core.errors import TokenizerError
from penstock.core.ragged import Ragged

IntArray = np.ndarray[Any, np.dtype[np.int64]]
ByteArray = np.ndarray[Any, np.dtype[np.uint8]]


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

    def spell(self, ids: Any) -> ByteArray:
        """Bytes of `ids`, end to end, uint8; costs about 10 ns per byte and no Python object per token.

        Raises:
            TokenizerError: An id lies outside the vocabulary.
        """
        ids = self.check(ids)
        if not len(ids):
            return np.empty(0, np.uint8)
        lengths = self.lengths[ids]
        ends = np.cumsum(lengths)
        # Byte k of the output comes from (start of its token's entry) + (k - start of its token in the output).
        shifts = np.repeat(self.offsets[ids] - (ends - lengths), lengths)
        spelled: ByteArray = self.data[shifts + np.arange(ends[-1])]
        return spelled

    def check(self, ids: Any) -> IntArray:
        """`ids` as int64, all inside the vocabulary.

        Raises:
            TokenizerError: An id lies outside the vocabulary, as -100, a masked target, does.
        """
        checked = np.asarray(ids, np.int64)
        outside = checked[(checked < 0) | (checked >= len(self))]
        if len(outside):
            raise TokenizerError(f"id {outside[0]} is outside the vocabulary of {len(self)} ids")
        return checked


SPACE = 0x20


def token_ends(table: ByteTable, texts: Ragged, ids: Ragged) -> Ragged:
    """Byte position in its text after each token.

    Args:
        table: Bytes of each id; control tokens have none, so they end where the token before them does.
        texts: UTF-8 bytes of each text, uint8.
        ids: Ids of each text.

    Returns:
        int64 positions, with the offsets of `ids`.

    Raises:
        TokenizerError: The bytes of some row's ids are not the bytes of its text.
    """
    if len(texts) != len(ids):
        raise TokenizerError(f"{len(texts)} texts, but ids of {len(ids)}")
    spelled = table.spell(ids.values)
    ends = np.concatenate(([0], np.cumsum(table.lengths[np.asarray(ids.values, np.int64)])))
    row_starts = ends[ids.offsets]
    extra = np.diff(row_starts) - texts.lengths
    prefixed = _has_prefix(spelled, row_starts[:-1], extra)
    expected = np.delete(spelled, row_starts[:-1][prefixed]) if prefixed.any() else spelled
    data = texts.values[texts.offsets[0] : texts.offsets[-1]]
    if (extra != prefixed).any() or not np.array_equal(expected, data):
        _explain(texts, Ragged(spelled, row_starts), prefixed)
    shifts = np.repeat(row_starts[:-1] + prefixed, ids.lengths)
    return Ragged(np.maximum(ends[1:] - shifts, 0), ids.offsets)


def _has_prefix(spelled: ByteArray, starts: IntArray, extra: IntArray) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Rows in which the ids spell one byte more than the text, and begin with a space; bool [rows]."""
    prefixed: np.ndarray[Any, np.dtype[np.bool_]] = extra == 1
    prefixed[prefixed] = spelled[starts[prefixed]] == SPACE
    return prefixed


def _explain(texts: Ragged, spelled: Ragged, prefixed: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
    """Raise for the first row that differs, with the reason if it is known."""
    for row in range(len(texts)):
        wanted, found = texts[row], spelled[row][int(prefixed[row]) :]
        if np.array_equal(wanted, found):
            continue
        shorter = min(len(wanted), len(found))
        different = np.flatnonzero(wanted[:shorter] != found[:shorter])
        place = int(different[0]) if len(different) else shorter
        shown = [bytes(part[max(place - 8, 0) : place + 16]).decode(errors="replace") for part in (wanted, found)]
        raise TokenizerError(
            f"row {row}: the ids spell other bytes than the text from byte {place} on: {shown[1]!r} where the text has "
            f"{shown[0]!r}; {_known_reason(bytes(wanted).decode(errors='replace'))}"
        )


def _known_reason(text: str) -> str:
    if "▁" in text:
        return (
            "the text holds a literal ▁ (U+2581), which SentencePiece turns into a space: replace it, or drop the text"
        )
    if not unicodedata.is_normalized("NFC", text):
        return "the text is not in NFC form, and the tokenizer normalises: give unicodedata.normalize('NFC', text)"
    return "were they encoded from this text, by this tokenizer, without control text?"


END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>")
BEGIN_NAMES = ("<s>", "<bos>", "<|bos|>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>")
PAD_NAMES = ("<pad>", "<|pad|>", "[PAD]", "<|padding|>")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AddedEntry:
    """An entry added to the model, at which text is cut before it is encoded.

    `lstrip` and `rstrip`: it includes the whitespace before or after it.
    """

    text: str
    token_id: int
    is_control: bool
    lstrip: bool = False
    rstrip: bool = False


Positioned = tuple[Sequence[int], Sequence[tuple[int, int]]]
"""Ids, and (begin, end) of each in characters."""


class Vocabulary(Protocol):
    """One vocabulary in any format; built from bytes, with everything expensive done on first use."""

    kind: str
    """"byte-level BPE", "SentencePiece BPE", "Unigram", "WordPiece", "tiktoken", "tekken"…"""
    own_encoder: str
    """The package that defines the ids: "tokenizers", "tiktoken" or "sentencepiece"."""
    size: int
    """One more than the highest id."""
    controls: dict[str, int]
    """All control entries, text → id."""
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    adds_bos: bool
    """Whether its own package puts BOS before a text, as the tokenizer of the model that it belongs to does."""
    adds_space: bool
    """Whether a space is put before the text."""
    normalization: str | None
    """What is done to text first, except writing spaces as `▁`: "NFC", or a lossy form; None: nothing."""

    def identity(self) -> bytes:
        """Everything that affects ids, as bytes to be hashed."""

    unknown_id: int | None
    """The id of text that the model cannot spell; also a control entry."""

    @property
    def cuts(self) -> tuple[AddedEntry, ...] | None:
        """The entries at which the own encoder cuts a text, leftmost and then longest first.

        It encodes each stretch between them as a separate text; None: it does something else.
        """

    def encode(self, text: str, *, allow_control: bool) -> list[int]:
        """Ids by the own encoder, without BOS and EOS."""

    def inner_files(self, files: Mapping[str, bytes]) -> dict[str, bytes] | None:
        """Files of the vocabulary that encodes stretches that do not begin their text; None: this vocabulary does."""

    def encode_with_positions(self, text: str, *, allow_control: bool) -> Positioned:
        """Like `encode`, with begin and end of each token in characters; TokenizerError if these are unknown."""

    def encode_disguised(self, text: str, controls: Sequence[tuple[int, int, str]]) -> Positioned:
        """Like `encode_with_positions`, but exactly the (begin, end, text) of `controls` become control tokens."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids by the own encoder; control text stays text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text by the own decoder, for vocabularies without a byte table."""

    def build_fast(self) -> tuple[Any, int]:
        """A gigatoken backend and the number to add to its ids; TokenizerError says why there is none."""

    def build_byte_table(self, *, exact: bool) -> ByteTable:
        """The exact table (TokenizerError says why there is none), or the strings of tokens."""


def is_content(text: str, *, special: bool) -> bool:
    """Whether an added entry is ordinary content; see the rule above."""
    return not special and all(is_plain(character) for character in text)


def is_plain(character: str) -> bool:
    """A letter, a mark, a digit or whitespace; `▁` is how SentencePiece writes a space."""
    import unicodedata

    return character.isspace() or character == "▁" or unicodedata.category(character)[0] in "LMN"


def named_control(controls: dict[str, int], names: Sequence[str]) -> int | None:
    """The id of the only control entry with a conventional name; None if there is none, or more than one."""
    found = [controls[name] for name in names if name in controls]
    return found[0] if len(found) == 1 else None


def plain_cuts(controls: dict[str, int]) -> tuple[AddedEntry, ...]:
    """Control entries as entries to cut at, without the whitespace around them."""
    return tuple(AddedEntry(text=text, token_id=token_id, is_control=True) for text, token_id in controls.items())


def split_at_controls(text: str, controls: dict[str, int]) -> list[str | int]:
    """Cut `text` at control entries, longest first: pieces of text, and ids in place of control entries."""
    import re

    if not controls:
        return [text]
    longest_first = sorted(controls, key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
    return [controls[piece] if place % 2 else piece for place, piece in enumerate(pieces) if piece]
