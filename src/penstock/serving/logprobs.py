"""Log-probabilities of tokens as OpenAI writes them, of chats and of completions."""

from collections.abc import Sequence
from typing import Any, final

from penstock.generation import Event
from penstock.tokenizers import Tokenizer

Json = dict[str, Any]


@final
class TokenTexts:
    """What tokens are called: their own text, or the name of a control token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._table = tokenizer.byte_table
        self._names = {token: text.encode() for text, token in tokenizer.special_tokens.items()}

    def tell(self, event: Event) -> Json | None:
        """An event's token as chats tell it; None where nobody asked."""
        if event.logprobs is None:
            return None
        likeliest = [self._token(token, value) for token, value in event.logprobs.likeliest]
        return {**self._token(event.token, event.logprobs.token), "top_logprobs": likeliest}

    def _token(self, token: int, value: float) -> Json:
        # A model may have more rows than the tokenizer has ids.
        spelled = self._names.get(token, b"") or (self._table[token] if token < len(self._table) else b"")
        # -9999 is OpenAI's word for "as good as never": JSON has no infinity.
        return {"token": spelled.decode("utf-8", "replace"), "logprob": max(value, -9999.0), "bytes": list(spelled)}


def as_completion(tokens: Sequence[Json], offset: int) -> Json:
    """Tokens as completions tell them; `offset`: characters before the first."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token["token"])
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [{top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in tokens],
        "text_offset": offsets,
    }
