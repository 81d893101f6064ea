"""How vocabularies spell bytes: GPT-2's alphabet of characters that stand for bytes, and
SentencePiece's pieces.
"""

from collections.abc import Iterable


def _byte_alphabet() -> dict[int, int]:
    """Code point → byte: printable Latin-1 stands for itself, the other 68 bytes for U+0100
    onwards.

    Source: GPT-2's `bytes_to_unicode` (github.com/openai/gpt-2, encoder.py).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {
        0x100 + place: byte for place, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_alphabet()
_CHARACTER_OF_BYTE = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}
_ALPHABET = frozenset(map(chr, _BYTE_OF_CHARACTER))


def spell_byte_level(tokens: Iterable[str]) -> list[bytes | None]:
    """Bytes of byte-level tokens; None for one with a character outside GPT-2's alphabet of
    bytes.
    """
    return [_spell_byte_level(token) for token in tokens]


def is_byte_level(token: str) -> bool:
    """Whether a token has only characters of GPT-2's alphabet of bytes."""
    return _ALPHABET.issuperset(token)


def _spell_byte_level(token: str) -> bytes | None:
    try:
        return (
            token.translate(_BYTE_OF_CHARACTER).encode("latin-1")
            if _ALPHABET.issuperset(token)
            else None
        )
    except UnicodeEncodeError:
        return None


def spell_as_characters(token: bytes) -> str:
    """The inverse: the characters that stand for bytes."""
    return token.decode("latin-1").translate(_CHARACTER_OF_BYTE)


def spell_sentencepiece(piece: str) -> bytes:
    """Bytes of a SentencePiece piece: `<0x0A>` is a byte, `▁` a space."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
