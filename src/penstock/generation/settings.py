"""How tokens are chosen and when a sequence ends. Imports no torch."""

import math
from dataclasses import dataclass
from typing import final

from penstock.errors import ConfigError

MOST_LOGPROBS = 100
"""Alternatives told of a token, at most."""
COLDEST = 1e-6
"""The lowest temperature but 0: logits divided by much less are no numbers in float32."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one sequence is written.

    Filters are applied in the order of the fields, each to what the ones before it kept. Tokens of equal logits are
    kept or left out together, so what is kept depends on the logits alone.
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token. `COLDEST` at least, if not 0."""
    top_k: int | None = None
    """Keep the so many likeliest tokens; None: all."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens that have this share of the probability (Holtzman et al. 2020); 1: all."""
    min_p: float = 0.0
    """Keep tokens at least this share as likely as the likeliest (Nguyen et al. 2024, arXiv:2407.01082); 0: all."""
    seed: int = 0
    """Draws are a function of it, of the number of the choice and of the place in the sequence."""
    min_tokens: int = 0
    """No stop id is chosen and no stop string looked for before so many tokens."""
    max_tokens: int | None = 256
    """Tokens at most; None: as many as the context holds."""
    stop: tuple[str, ...] = ()
    """Texts that end the sequence, and are no part of it."""
    logprobs: int | None = None
    """Tell the log-probability of each token, and of so many likeliest ones; None: of none."""

    def __post_init__(self) -> None:
        warm = self.temperature
        _check(
            "temperature", warm, warm == 0 or (warm >= COLDEST and math.isfinite(warm)), f"0, or {COLDEST:g} or more"
        )
        _check("top_k", self.top_k, self.top_k is None or _whole(self.top_k, 1), "a whole number of 1 or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        _check("seed", self.seed, _whole(self.seed, None), "a whole number")
        _check("min_tokens", self.min_tokens, _whole(self.min_tokens, 0), "a whole number of 0 or more")
        most = self.max_tokens
        _check("max_tokens", most, most is None or _whole(most, 1), "a whole number of 1 or more")
        if most is not None and self.min_tokens > most:
            raise ConfigError(f"min_tokens {self.min_tokens} is more than max_tokens {most}; change one")
        _check("stop", self.stop, _texts(self.stop), "a tuple of Unicode texts that are not empty")
        asked = self.logprobs
        due = f"a whole number, 0 to {MOST_LOGPROBS}"
        _check("logprobs", asked, asked is None or (_whole(asked, 0) and asked <= MOST_LOGPROBS), due)


def _whole(value: object, least: int | None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def _texts(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(text, str) and text != "" and _is_unicode(text) for text in value
    )


def _is_unicode(text: str) -> bool:
    """Whether it has bytes, that is no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check(name: str, found: object, fine: bool, due: str) -> None:
    if not fine:
        raise ConfigError(f"{name} must be {due}, got {found!r}")
