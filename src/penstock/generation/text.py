"""Tokens to text while they come: characters are never cut, and stop strings are found across tokens.

Works on bytes: a stop string is found wherever its bytes are, whatever tokens they came in. Text is held back only
while it may be the beginning of a stop string or of a character. Costs: about a microsecond a token.
"""

import codecs
from collections.abc import Collection, Sequence
from typing import final

from penstock.tokenizers import Tokenizer


@final
class Spelling:
    """The bytes of each id, as fast as Python can look them up."""

    def __init__(self, tokenizer: Tokenizer, silent: Collection[int]) -> None:
        """Args: `silent`: control tokens that give no text; the others give their names.

        Raises:
            TokenizerError: There is no exact table of bytes for this vocabulary.
        """
        table = tokenizer.byte_table
        self._data, self._offsets = table.data.tobytes(), table.offsets.tolist()
        self._names = {i: text.encode() for text, i in tokenizer.special_tokens.items() if i not in silent}

    def __getitem__(self, token: int) -> bytes:
        return self._names.get(token) or self._data[self._offsets[token] : self._offsets[token + 1]]


@final
class TextStream:
    """The text of one sequence, as far as it is certain.

    Attributes:
        stopped: A stop string was found; the text ends before it.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = [text.encode() for text in stops]
        self._held = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.stopped = False

    def push(self, data: bytes, *, may_stop: bool = True) -> str:
        """Text that is certain with the bytes of one more token."""
        self._held += data
        if not may_stop or not self._stops:
            return self._emit(len(self._held))
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._emit(min(found))
        return self._emit(len(self._held) - self._begun())

    def finish(self) -> str:
        """What was held back, at the end of the tokens; a character that is not complete is left out."""
        return "" if self.stopped else self._emit(len(self._held))

    def _emit(self, count: int) -> str:
        certain, self._held = self._held[:count], self._held[count:]
        return self._decoder.decode(certain)

    def _begun(self) -> int:
        """How many bytes at the end may be the beginning of a stop string."""
        longest = max(map(len, self._stops)) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-count:]
            if any(stop.startswith(end) for stop in self._stops):
                return count
        return 0
