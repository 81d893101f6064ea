"""Unicode normal forms of texts, by the tokenizers package, for the texts that may change.

A text does not change if none of its characters changes alone, is a mark that may change places, or
may compose with the one before it. Only characters that Unicode 3.2 had are trusted: their normal
forms are fixed for ever, so the version that a package knows does not matter.
"""

import unicodedata
from functools import cache
from typing import Literal, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.arrays import Bool, Bytes, Int64
from penstock.core.errors import TokenizerError
from penstock.core.json_values import JsonObject
from penstock.tokenizers._split_kernels import texts_with
from penstock.tokenizers.character_sets import CHARACTERS
from penstock.tokenizers.fast import text_buffers
from penstock.tokenizers.piece_cache import frozen
from tokenizers import normalizers

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
FORMS: tuple[Form, ...] = ("NFC", "NFD", "NFKC", "NFKD")
_TRUSTED_END = 0x10000


@final
class NormalForms:
    """One form, or several in turn."""

    def __init__(self, normalizer: JsonObject) -> None:
        """Read the normalizer of a `tokenizer.json`.

        Raises:
            TokenizerError: It does more than normal forms.
        """
        names = list(_names(normalizer))
        forms = [form for form in FORMS if form in names]
        wrong = [name for name in names if name not in FORMS]
        if wrong:
            raise TokenizerError(f"it normalises text by {', '.join(wrong)}")
        self._steps = [getattr(normalizers, name)() for name in names]
        self._unsafe = np.zeros(CHARACTERS, np.bool_)
        for form in forms:
            self._unsafe |= unsafe_characters(form)

    def apply(self, text: str) -> str:
        """The normal form of a text."""
        for step in self._steps:
            text = step.normalize_str(text)
        return text

    def normalise(self, texts: pa.Array) -> tuple[pa.Array, Bytes, Int64]:
        """The normal forms of texts, an Arrow array, and its buffers: bytes and offsets."""
        data, offsets = text_buffers(texts)
        changing = np.empty(len(texts), np.bool_)
        texts_with(frozen(data), offsets, self._unsafe, changing)
        rows = np.flatnonzero(changing)
        if not len(rows):
            return texts, data, offsets
        changed = [self.apply(text) for text in texts.take(pa.array(rows)).to_pylist()]
        new = pc.replace_with_mask(texts, pa.array(changing), pa.array(changed, texts.type))
        return new, *text_buffers(new)


def _names(normalizer: JsonObject) -> list[str]:
    if normalizer["type"] != "Sequence":
        return [normalizer["type"]]
    return [name for one in normalizer["normalizers"] for name in _names(one)]


@cache
def unsafe_characters(form: Form) -> Bool:
    """The characters with which a text may not be in a normal form, bool [0x110000]."""
    unsafe = np.ones(CHARACTERS, np.bool_)
    known = unicodedata.ucd_3_2_0
    seconds = set()
    for code in range(_TRUSTED_END):
        character = chr(code)
        if (
            known.category(character) not in ("Cn", "Cs")
            and known.combining(character) == 0
            and unicodedata.normalize(form, character) == character
        ):
            unsafe[code] = False
        parts = unicodedata.decomposition(character).split()
        if len(parts) == 2 and parts[0][0] != "<":
            seconds.add(int(parts[1], 16))
    unsafe[list(seconds)] = True
    # Letters of Korean syllables, whose composition no table lists.
    unsafe[0x1100:0x1200] = True
    unsafe[0xA960:0xA980] = unsafe[0xD7B0:0xD800] = True
    return unsafe
