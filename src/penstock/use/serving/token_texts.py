"""Texts and log-probabilities of tokens in OpenAI's formats, and where each token's text begins.

A token's text may be a part of a character, or no part of the answer's text: a BOS before a prompt,
a stop id, the space that SentencePiece puts before a text. So places are counted in the bytes that
tokens add to the text.
"""

import codecs
from collections.abc import Iterator, Sequence
from typing import Any, final

from penstock.learn.generation import Event, LogProbabilities
from penstock.tokenizers import Tokenizer

Json = dict[str, Any]
SAID = "said"
"""Key of the bytes that a token adds to the text; taken out before tokens are sent."""


@final
class TokenTexts:
    """The texts of tokens, or the names of control tokens, with log-probabilities in OpenAI's
    format.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._table = tokenizer.byte_table
        self._names = {token: text.encode() for text, token in tokenizer.special_tokens.items()}

    def logprobs_of(self, event: Event) -> Json | None:
        """An event's log-probabilities in the format of chats, and `SAID`; None if they were not
        requested.
        """
        if event.logprobs is None:
            return None
        stops = event.finish_reason == "stop" and event.token in self._names
        return {
            **self._of(event.token, event.logprobs),
            SAID: b"" if stops else self._spelled(event.token),
        }

    def of_prompt(
        self, ids: Sequence[int], scores: Sequence[LogProbabilities], text: str
    ) -> list[Json]:
        """Those of a prompt's tokens; the first has none. `text`: the prompt's, as it comes
        back.
        """
        first = {**self._token(ids[0], 0.0), "logprob": None, "top_logprobs": None}
        found = [
            first,
            *(self._of(token, score) for token, score in zip(ids[1:], scores, strict=True)),
        ]
        return [{**one, SAID: said} for one, said in zip(found, self._said(ids, text), strict=True)]

    def _said(self, ids: Sequence[int], text: str) -> Iterator[bytes]:
        """The bytes of each token that are in a prompt's text; what comes before it is not."""
        spelled = [self._spelled(token) for token in ids]
        whole, due = b"".join(spelled), text.encode("utf-8", "surrogatepass")
        if whole.endswith(due):
            before = len(whole) - len(due)
        else:
            # The tokenizer changes texts, such as to lower case: only a BOS is known to come before
            # it.
            first = self._names.get(ids[0], b"")
            before = 0 if due.startswith(first) else len(first)
        for one in spelled:
            yield one[before:]
            before = max(0, before - len(one))

    def _of(self, token: int, found: LogProbabilities) -> Json:
        likeliest = [self._token(other, value) for other, value in found.likeliest]
        return {**self._token(token, found.token), "top_logprobs": likeliest}

    def _token(self, token: int, value: float) -> Json:
        spelled = self._spelled(token)
        # OpenAI uses -9999 for almost impossible tokens, because JSON has no infinity.
        return {
            "token": spelled.decode("utf-8", "replace"),
            "logprob": max(value, -9999.0),
            "bytes": list(spelled),
        }

    def _spelled(self, token: int) -> bytes:
        # A model may have more embedding rows than the tokenizer has ids.
        return self._names.get(token, b"") or (
            self._table[token] if token < len(self._table) else b""
        )


@final
class Offsets:
    """Where tokens begin in a text, in characters; a token within a character is where that
    begins.
    """

    def __init__(self, at: int = 0) -> None:
        self._at, self._decoder = at, codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, said: bytes) -> int:
        """Where the next token begins, which adds these bytes to the text."""
        at = self._at
        self._at += len(self._decoder.decode(said))
        return at


def as_chat(tokens: Sequence[Json]) -> list[Json]:
    """Log-probabilities in the format of chats."""
    return [{name: value for name, value in token.items() if name != SAID} for token in tokens]


def as_completion(tokens: Sequence[Json], offsets: Offsets, most: int | None = None) -> Json:
    """Log-probabilities in the format of completions; `most`: length of the text, if it is
    known.
    """
    places = [offsets.next(token[SAID]) for token in tokens]
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [_alternatives(token) for token in tokens],
        "text_offset": places if most is None else [min(place, most) for place in places],
    }


def _alternatives(token: Json) -> Json | None:
    """Text → log-probability; of tokens that look alike, such as parts of characters, the
    likeliest. The token itself is there, too, so they may be one more than asked for.
    """
    others = token["top_logprobs"]
    if others is None:
        return None
    found = {one["token"]: one["logprob"] for one in reversed(others)}
    return {**found, token["token"]: found.get(token["token"], token["logprob"])}
