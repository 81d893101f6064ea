"""The bytes of each id, for text that is put together token by token."""

from collections.abc import Collection
from typing import final

from penstock.tokenizers.tokenizer import Tokenizer


@final
class Spelling:
    """The bytes of each id, for quick access."""

    def __init__(self, tokenizer: Tokenizer, silent: Collection[int]) -> None:
        """Args: `silent`: control tokens without text; the others give their names.

        Raises:
            TokenizerError: There is no exact byte table for this vocabulary.
        """
        table = tokenizer.byte_table
        # Views, not copies: each conversation has one, and vocabularies are large.
        self._data, self._offsets = table.data.data, table.offsets
        self._names = {
            i: text.encode() for text, i in tokenizer.special_tokens.items() if i not in silent
        }
        self._tokenizer, self._controls = (
            tokenizer,
            {i: text for text, i in tokenizer.special_tokens.items()},
        )
        self._spaced: dict[int, bool] = {}

    def spaced(self, token: int) -> bool:
        """Whether the encoder puts a space before text that follows this token, as SentencePiece
        does.

        Such a space is no part of the text: behind `<|assistant|>`, the text of `▁Yes` is "Yes".
        """
        if token not in self._controls or not self._tokenizer.adds_space:
            return False
        if token not in self._spaced:
            ids = self._tokenizer.encode(f"{self._controls[token]}x", allow_control=True).tolist()
            self._spaced[token] = ids[:1] == [token] and b"".join(self[i] for i in ids[1:]) == b" x"
        return self._spaced[token]

    def __getitem__(self, token: int) -> bytes:
        return self._names.get(token) or bytes(
            self._data[self._offsets[token] : self._offsets[token + 1]]
        )
