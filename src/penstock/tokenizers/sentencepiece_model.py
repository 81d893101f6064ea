"""SentencePiece `.model` files.

The sentencepiece package encodes. User-defined pieces that are control entries by our rule are
first marked as control in the model, which makes SentencePiece never produce them from text. The
model is read and changed as a protocol buffer (field numbers: sentencepiece_model.proto of
google/sentencepiece).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import numpy as np

from penstock.core.errors import TokenizerError
from penstock.tokenizers.byte_table import ByteTable
from penstock.tokenizers.fast import FastEncoder, backend_from_sentencepiece
from penstock.tokenizers.spelling import spell_sentencepiece
from penstock.tokenizers.vocabulary import (
    AddedEntry,
    Positioned,
    is_content,
    plain_cuts,
    split_at_controls,
)

if TYPE_CHECKING:
    import sentencepiece

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of pieces."""

_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_ENCODED = 2
"""Field of an encoded text that holds its pieces, each with its id in 2, and begin and end in bytes
in 4 and 5.
"""
_KINDS = {
    1: "Unigram",
    2: "SentencePiece BPE",
    3: "SentencePiece words",
    4: "SentencePiece characters",
}


@final
class SentencePieceVocabulary:
    """A SentencePiece model, with the BOS, EOS and padding that it names."""

    own_encoder = "sentencepiece"

    def __init__(self, content: bytes, config: bytes | None = None) -> None:
        """Args: `content` of the `.model` file, and of the `tokenizer_config.json` next to it."""
        self._model = _hide_controls(content)
        fields = [(number, value) for number, value, _ in _fields(self._model)]
        pieces = [dict(_pairs(value)) for number, value in fields if number == _PIECE]
        if not pieces:
            raise TokenizerError("not a SentencePiece model: it holds no pieces")
        trainer = dict(_pairs(next((value for number, value in fields if number == _TRAINER), b"")))
        normalizer = dict(
            _pairs(next((value for number, value in fields if number == _NORMALIZER), b""))
        )
        self._pieces = [(piece.get(1, b"").decode(), int(piece.get(3, NORMAL))) for piece in pieces]
        self._byte_fallback = bool(trainer.get(35, 0))
        changes_text = bool(normalizer.get(2)) or bool(normalizer.get(4, 1))
        self.normalization = normalizer.get(1, b"some").decode() if changes_text else None
        self.adds_space = bool(normalizer.get(3, 1))
        self.kind = _KINDS[int(trainer.get(3, 1))]
        self.size = len(self._pieces)
        hidden = (UNKNOWN, CONTROL)
        self.controls = {
            text: place for place, (text, kind) in enumerate(self._pieces) if kind in hidden
        }
        self.unknown_id: int | None = next(
            (i for i, (_, kind) in enumerate(self._pieces) if kind == UNKNOWN), None
        )
        self.cuts: tuple[AddedEntry, ...] | None = plain_cuts(self.controls)
        self.bos_id = self.controls.get(trainer.get(46, b"<s>").decode())
        self.eos_id = self.controls.get(trainer.get(47, b"</s>").decode())
        self.pad_id = self.controls.get(trainer.get(48, b"<pad>").decode())
        # The file does not say it. transformers reads it from the configuration, which says no by
        # default; the packages of Llama, Gemma and Mistral, which have none, put BOS before texts.
        says = (
            self.bos_id != self.eos_id
            if config is None
            else bool(json.loads(config).get("add_bos_token", False))
        )
        self.adds_bos = self.bos_id is not None and says

    def identity(self) -> tuple[bytes]:
        """See `Vocabulary`."""
        return (self._model,)

    def encode(self, text: str, *, allow_control: bool) -> list[int]:
        """See `Vocabulary`; each stretch between control entries is encoded as a separate text."""
        pieces = split_at_controls(text, self.controls) if allow_control else [text]
        ids: list[int] = []
        for piece in pieces:
            ids += [piece] if isinstance(piece, int) else self._processor.encode(piece)
        return ids

    def inner_files(self, files: Mapping[str, bytes]) -> None:
        """See `Vocabulary`."""

    def encode_with_positions(self, text: str, *, allow_control: bool) -> Positioned:
        """See `Vocabulary`; only for texts without control entries."""
        if allow_control:
            raise TokenizerError(
                "SentencePiece gives positions only for a text without control entries"
            )
        message = self._processor.encode(text, out_type="serialized_proto")
        pieces = [
            dict(_pairs(value)) for number, value, _ in _fields(message) if number == _ENCODED
        ]
        ids = [int(piece.get(2, 0)) for piece in pieces]
        spans = [(int(piece.get(4, 0)), int(piece.get(5, 0))) for piece in pieces]
        for place in range(len(ids) - 2, -1, -1):
            # Of the byte pieces of a character, only the last has its position.
            (begin, end), (following, last) = spans[place], spans[place + 1]
            if begin == end == following and self._pieces[ids[place]][1] == BYTE:
                spans[place] = (begin, last)
        characters = np.cumsum(np.frombuffer(text.encode(), np.uint8) & 0xC0 != 0x80)
        number_of = np.concatenate(([0], characters)).tolist()
        return ids, [(number_of[begin], number_of[end]) for begin, end in spans]

    def encode_disguised(self, text: str, controls: Sequence[tuple[int, int, str]]) -> Positioned:
        """See `Vocabulary`; never needed, because text is cut at control entries."""
        raise TokenizerError(
            "this vocabulary cuts text at its control entries; encode the stretches between them"
        )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Vocabulary`."""
        ids: list[list[int]] = self._processor.encode(list(texts), num_threads=1)
        return ids

    def sample_encoder(self, texts: Sequence[str]) -> Callable[[Sequence[str]], list[list[int]]]:
        """See `Vocabulary`."""
        return self.encode_batch

    def decode(self, ids: Sequence[int]) -> str:
        """See `Vocabulary`."""
        text: str = self._processor.decode([int(token_id) for token_id in ids])
        return text

    def build_fast(self, missing: str | None) -> FastEncoder:
        """See `Vocabulary`."""
        if missing is not None:
            raise TokenizerError(missing)
        return FastEncoder(backend=backend_from_sentencepiece(self._model, set(self.controls)))

    def build_byte_table(self, *, exact: bool) -> ByteTable:
        """See `Vocabulary`."""
        if exact:
            self._refuse_inexact()
        empty = (UNKNOWN, CONTROL, UNUSED)
        return ByteTable(
            None if kind in empty else spell_sentencepiece(text) for text, kind in self._pieces
        )

    def _refuse_inexact(self) -> None:
        """Raise TokenizerError unless the bytes of every id are known."""
        if not self._byte_fallback:
            raise TokenizerError(
                "no exact byte table: the model has no byte fallback, so <unk> loses text"
            )
        if self.normalization:
            raise TokenizerError(
                f"no exact byte table: the model normalises text first ({self.normalization}, "
                "runs of spaces)"
            )

    @cached_property
    def _processor(self) -> "sentencepiece.SentencePieceProcessor":
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_proto=self._model)


def _hide_controls(content: bytes) -> bytes:
    """Mark user-defined pieces that are control entries as control."""
    parts = []
    for number, value, whole in _fields(content):
        piece = dict(_pairs(value)) if number == _PIECE else {}
        if piece.get(3) == USER_DEFINED and not is_content(
            piece.get(1, b"").decode(), special=False
        ):
            # In a protocol buffer the last value of a field counts, so a second type overrides the
            # first.
            changed = value + bytes([3 << 3, CONTROL])
            whole = bytes([_PIECE << 3 | 2]) + _varint(len(changed)) + changed
        parts.append(whole)
    return b"".join(parts)


def _pairs(message: bytes) -> Iterator[tuple[int, Any]]:
    return ((number, value) for number, value, _ in _fields(message))


def _fields(message: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """Number, value and raw bytes of each field; integers come as int, everything else as bytes.

    Raises:
        TokenizerError: The bytes are not a protocol buffer.
    """
    place = 0
    value: int | bytes
    while place < len(message):
        start = place
        key, place = _read_varint(message, place)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _read_varint(message, place)
        elif wire in (1, 2, 5):
            length, place = (
                _read_varint(message, place) if wire == 2 else ({1: 8, 5: 4}[wire], place)
            )
            value, place = message[place : place + length], place + length
        if wire not in (0, 1, 2, 5) or place > len(message):
            raise TokenizerError(
                f"not a SentencePiece model: byte {start} starts no field of a protocol buffer"
            )
        yield number, value, message[start:place]


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(message):
        byte = message[place]
        value, shift, place = value | (byte & 0x7F) << shift, shift + 7, place + 1
        if byte < 0x80:
            return value, place
    raise TokenizerError("not a SentencePiece model: it ends inside a number")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
