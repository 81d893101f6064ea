"""Sampled replies: their text, and the message that they say."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from penstock.chat.calls import Splitter, family_of
from penstock.chat.render.template import Template
from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.token_text import Spelling

CUT = "length"
"""Why a reply ended that its limit cut."""
STOPPED = ("stop", "tool_calls", "function_call")
"""Why a reply ended that ended by itself."""
ROUNDING = 1e-3
"""Log-probabilities may be so far above 0: engines round."""
_THOUGHTS = ("<think>", "</think>")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A reply as it was sampled."""

    message: int
    """Number of its message."""
    before: str
    """The text of what was sent and sampled before it."""
    ids: tuple[int, ...]
    text: str
    is_text: bool
    """Whether its bytes are UTF-8; False where it was cut inside a character."""
    ended: str
    """Name of the control token at its end; empty: none."""
    stopped: bool = False
    """Whether the engine says that it ended by itself."""
    cut: bool = False
    """Whether the engine says that a limit cut it."""


@final
class TokenTexts:
    """Bytes and texts of ids, control tokens by their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._spelling = Spelling(tokenizer, ())
        self.names: Mapping[int, str] = {
            token: text for text, token in tokenizer.special_tokens.items()
        }

    def data(self, ids: Iterable[int], before: int | None = None) -> bytes:
        """Bytes of tokens; `before`: the token in front of them, which may bring a space that is no
        part of the text.
        """
        data = b"".join(self._spelling[token] for token in ids)
        spaced = before is not None and self._spelling.spaced(before)
        return data[1:] if spaced and data.startswith(b" ") else data

    def text(self, ids: Iterable[int], before: int | None = None) -> tuple[str, bool]:
        """Their text, and whether all bytes are UTF-8."""
        data = self.data(ids, before)
        try:
            return data.decode(), True
        except UnicodeDecodeError:
            return data.decode(errors="replace"), False


def message_of(
    text: str, template: Template, tools: Sequence[Any] | None, number: int, *, cut: bool
) -> JsonObject:
    """The message that a reply's text says: thoughts, content, calls.

    Args:
        text: Without the control token that ends it.
        template: Its family says how calls are written.
        tools: What may be called; None: nothing.
        number: Of the reply, for the ids of calls.
        cut: Whether its limit cut it: then it makes no call, which may lack its end.
    """
    message: JsonObject = {"role": "assistant"}
    begin, end = _THOUGHTS
    if end in text:
        thoughts, text = text.split(end, 1)
        message["reasoning_content"] = thoughts.strip().removeprefix(begin).strip()
        text = text.lstrip("\n")
    family = None if cut or not tools else family_of(template.source)
    split = Splitter(family, tools or ())
    content = split.push(text)
    rest, calls = split.finish()
    message["content"] = content + rest
    if calls:
        message["tool_calls"] = [
            {
                # Nine characters, which Mistral's templates want.
                "id": f"call{number % 1000:03d}{place % 100:02d}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(calls)
        ]
    return message


def without_end(ids: Sequence[int], names: Mapping[int, str]) -> Sequence[int]:
    """Tokens without the control token at their end."""
    return ids[:-1] if ids and ids[-1] in names else ids


def as_message(given: JsonMapping) -> JsonObject:
    """A message of the caller's, with the role that a reply has."""
    return {**given, "role": given.get("role", "assistant")}


def check_reply(
    where: str,
    ids: Sequence[int],
    logs: Sequence[float] | None,
    weights: Sequence[float] | None,
    vocab_size: int,
) -> tuple[list[int], list[float], list[float]]:
    """Ids, log-probabilities and weights of a reply as plain numbers; zeros and ones where there
    are none.

    Raises:
        ConfigError: Lengths differ, or a number is out of range.
    """
    own = [int(token) for token in ids]
    for name, given in (("log-probabilities", logs), ("weights", weights)):
        if given is not None and len(given) != len(own):
            raise ConfigError(f"{where}: {len(given)} {name} for {len(own)} tokens")
    if wrong := [one for one in own if not 0 <= one < vocab_size]:
        raise ConfigError(
            f"{where}: id {wrong[0]} is not in the vocabulary of {vocab_size}; give the engine's "
            "tokenizer"
        )
    numbers = [0.0] * len(own) if logs is None else [float(one) for one in logs]
    for place, one in enumerate(numbers):
        if not (math.isfinite(one) and one <= ROUNDING):
            raise ConfigError(
                f"{where}: the log-probability of token {place} is {one}; expected nats, 0 at most"
            )
    shares = [1.0] * len(own) if weights is None else [float(one) for one in weights]
    for place, one in enumerate(shares):
        if not (math.isfinite(one) and one >= 0):
            raise ConfigError(f"{where}: the weight of token {place} is {one}; expected 0 or more")
    return own, [min(one, 0.0) for one in numbers], shares


def check_stops(stops: Iterable[int], names: Mapping[int, str], tokenizer: str) -> None:
    """Refuse ids that end a generation and are no control tokens.

    Raises:
        ConfigError: One is none.
    """
    for one in stops:
        if one not in names:
            raise ConfigError(
                f"stop id {one} is no control token of {tokenizer}; replies end with control tokens"
            )
