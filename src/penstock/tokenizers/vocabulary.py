"""The interface of all vocabulary formats, and the rule that separates control entries from
content.

**The rule.** An entry that a tokenizer adds to its model (Hugging Face `added_tokens`,
SentencePiece user-defined pieces) is *content* only if it is not marked special and consists only
of letters, marks, digits and whitespace: the runs of spaces and tabs of GPT-NeoX, Phi-2 and Gemma,
or added words. Everything else is *control*, marked special or not: `<tool_call>`, `<think>`,
`|||EMAIL_ADDRESS|||`, and also Gemma's `<table>`, which looks like a tag that steers a model.
Control entries are deleted from the encoders that see text; content entries stay, because without
them the ids of ordinary text would change.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from penstock.tokenizers.byte_table import ByteTable
from penstock.tokenizers.fast import Encoder

END_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<｜end▁of▁sentence｜>",
)
BEGIN_NAMES = ("<s>", "<bos>", "<|bos|>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>")
PAD_NAMES = ("<pad>", "<|pad|>", "[PAD]", "<|padding|>")

Positioned = tuple[Sequence[int], Sequence[tuple[int, int]]]
"""Ids, and (begin, end) of each in characters."""


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


class Vocabulary(Protocol):
    """One vocabulary in any format; built from bytes, with everything expensive done on first
    use.
    """

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
    """Whether its own package puts BOS before a text, as the tokenizer of the model that it belongs
    to does.
    """
    adds_space: bool
    """Whether a space is put before the text."""
    normalization: str | None
    """What is done to text first, except writing spaces as `▁`: "NFC", or a lossy form; None:
    nothing.
    """

    def identity(self) -> Iterable[bytes]:
        """Everything that affects ids, as bytes to be hashed, in parts."""

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
        """Files of the vocabulary that encodes stretches that do not begin their text; None: this
        vocabulary does.
        """

    def encode_with_positions(self, text: str, *, allow_control: bool) -> Positioned:
        """Like `encode`, with begin and end of each token in characters; TokenizerError if these
        are unknown.
        """

    def encode_disguised(self, text: str, controls: Sequence[tuple[int, int, str]]) -> Positioned:
        """Like `encode_with_positions`, but exactly the (begin, end, text) of `controls` become
        control tokens.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids by the own encoder; control text stays text."""

    def sample_encoder(self, texts: Sequence[str]) -> Callable[[Sequence[str]], list[list[int]]]:
        """What does as `encode_batch` for these texts, and may do so without most of the
        vocabulary.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text by the own decoder, for vocabularies without a byte table."""

    def build_fast(self, missing: str | None) -> Encoder:
        """The fast encoder; TokenizerError says why there is none.

        Args:
            missing: Why gigatoken does not load here; None: it does.
        """

    def build_byte_table(self, *, exact: bool) -> ByteTable:
        """The exact table (TokenizerError says why there is none), or the strings of tokens."""


def is_content(text: str, *, special: bool) -> bool:
    """Whether an added entry is ordinary content; see the rule above."""
    return not special and all(is_plain(character) for character in text)


def is_plain(character: str) -> bool:
    """A letter, a mark, a digit or whitespace; `▁` is how SentencePiece writes a space."""
    return character.isspace() or character == "▁" or unicodedata.category(character)[0] in "LMN"


def named_control(controls: dict[str, int], names: Sequence[str]) -> int | None:
    """The id of the only control entry with a conventional name; None if there is none, or more
    than one.
    """
    found = [controls[name] for name in names if name in controls]
    return found[0] if len(found) == 1 else None


def plain_cuts(controls: dict[str, int]) -> tuple[AddedEntry, ...]:
    """Control entries as entries to cut at, without the whitespace around them."""
    return tuple(
        AddedEntry(text=text, token_id=token_id, is_control=True)
        for text, token_id in controls.items()
    )


def split_at_controls(text: str, controls: dict[str, int]) -> list[str | int]:
    """Cut `text` at control entries, longest first: pieces of text, and ids in place of control
    entries.
    """
    if not controls:
        return [text]
    longest_first = sorted(controls, key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
    return [controls[piece] if place % 2 else piece for place, piece in enumerate(pieces) if piece]
