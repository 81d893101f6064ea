"""What an engine tells: a token at a time, or whole sequences."""

from dataclasses import dataclass
from typing import Literal, final

FinishReason = Literal["stop", "length"]
"""stop: a stop id or a stop string; length: `max_tokens`, or the context is full."""


@final
@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """How likely the model itself found a token; natural logarithms."""

    token: float
    likeliest: tuple[tuple[int, float], ...]
    """(id, log-probability) of as many alternatives as were asked for, likeliest first."""


@final
@dataclass(frozen=True, slots=True)
class Event:
    """One more token of a sequence."""

    sequence: int
    token: int
    text: str
    """What became certain of the text: empty while a character or a stop string may have begun."""
    finish_reason: FinishReason | None = None
    """None while more comes."""
    logprobs: LogProbabilities | None = None


@final
@dataclass(frozen=True, slots=True)
class Generated:
    """A whole sequence, without its prompt."""

    tokens: tuple[int, ...]
    """All that were chosen, a stop id too."""
    text: str
    finish_reason: FinishReason
    logprobs: tuple[LogProbabilities, ...] = ()
    """One a token where they were asked for."""
