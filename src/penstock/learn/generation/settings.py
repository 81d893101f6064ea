"""Sampling settings, and what an engine returns: events for single tokens, or whole sequences.
Imports no torch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, final

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping, JsonObject

MOST_LOGPROBS = 100
"""Maximum number of alternatives returned for a token."""
MOST_CHANGE = 100.0
"""The largest penalty or bias of a logit: it decides what is chosen, and no logit overflows."""
LEAST_REPETITION, MOST_REPETITION = 0.01, 100.0
"""The range of `repetition_penalty`: no logit overflows."""
NO_TOKEN = -1
"""The token of an event that ends a sequence without one."""
COLDEST = 1e-6
"""The lowest temperature above 0: logits divided by much less overflow float32."""

FinishReason = Literal["stop", "length"]
"""stop: a stop id or a stop string; length: `max_tokens`, or the context is full."""
_NEUTRAL = ("temperature", "seed", "max_tokens", "stop", "logprobs", "tempered_logprobs")
"""Settings that do not change the probabilities of tokens, or do so as `temperature` says."""
_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Values of a `generation_config.json` that are defaults of sampling in vLLM, next to
`max_new_tokens`. `do_sample` is none of them there.
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of a sequence are chosen, and when it ends.

    Filters are applied in the order of the fields, each to the tokens that the previous ones kept.
    Tokens with equal logits are kept or removed together, so the result depends only on the logits.
    Penalties and biases change the logits before that.
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token. At least `COLDEST`, if not 0."""
    top_k: int | None = None
    """Sample from the k most likely tokens; None: all."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens with this share of the probability (Holtzman et al.
    2020); 1: all.
    """
    min_p: float = 0.0
    """Sample from tokens with at least this share of the most likely token's probability (Nguyen et
    al. 2024, arXiv:2407.01082); 0: all.
    """
    seed: int = 0
    """A draw is a function of the seed, the choice number and the place in the sequence."""
    min_tokens: int = 0
    """Minimum number of tokens before a stop id or a stop string may end the sequence."""
    max_tokens: int | None = 256
    """Maximum number of tokens; None: as many as the context holds."""
    stop: tuple[str, ...] = ()
    """Texts that end the sequence; they are not part of it."""
    logprobs: int | None = None
    """Return each token's log-probability, and those of this number of most likely tokens; None:
    neither. They are the model's own: before penalties, biases, temperature and filters.
    """
    tempered_logprobs: bool = False
    """Log-probabilities are those at `temperature`, of logits / temperature; before penalties,
    biases and filters.
    """
    frequency_penalty: float = 0.0
    """Subtracted from the logit of each token as often as it was chosen in this sequence, the
    prompt not counted; −100 to 100.
    """
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that was chosen in this sequence; −100 to
    100.
    """
    repetition_penalty: float = 1.0
    """Positive logits of the tokens of prompt and text are divided by it, and negative ones
    multiplied, once each, before the other penalties (Keskar et al. 2019, as in transformers and
    vLLM); 0.01 to 100; 1: nothing changes.
    """
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Id → what is added to its logit, −100 to 100."""
    json_schema: str | None = None
    """A JSON schema, as JSON, that the text must meet unless `max_tokens` cuts it; `min_tokens`
    does not count then. Needs llguidance.
    """

    def __post_init__(self) -> None:
        warm = self.temperature
        _check(
            "temperature",
            warm,
            warm == 0 or (warm >= COLDEST and math.isfinite(warm)),
            f"0, or {COLDEST:g} or more",
        )
        _check(
            "top_k",
            self.top_k,
            self.top_k is None or _whole(self.top_k, 1),
            "a whole number of 1 or more",
        )
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        _check("seed", self.seed, _whole(self.seed, None), "a whole number")
        _check(
            "min_tokens", self.min_tokens, _whole(self.min_tokens, 0), "a whole number of 0 or more"
        )
        most = self.max_tokens
        _check("max_tokens", most, most is None or _whole(most, 1), "a whole number of 1 or more")
        if most is not None and self.min_tokens > most:
            raise ConfigError(
                f"min_tokens {self.min_tokens} is more than max_tokens {most}; change one"
            )
        _check("stop", self.stop, _texts(self.stop), "a tuple of Unicode texts that are not empty")
        count, expected = self.logprobs, f"a whole number, 0 to {MOST_LOGPROBS}"
        _check(
            "logprobs",
            count,
            count is None or (_whole(count, 0) and count <= MOST_LOGPROBS),
            expected,
        )
        _check(
            "temperature",
            warm,
            warm > 0 or not self.tempered_logprobs,
            "above 0 with tempered_logprobs",
        )
        for name in ("frequency_penalty", "presence_penalty"):
            _check_change(name, getattr(self, name))
        repeated = self.repetition_penalty
        expected = f"{LEAST_REPETITION:g} to {MOST_REPETITION:g}"
        _check(
            "repetition_penalty",
            repeated,
            LEAST_REPETITION <= repeated <= MOST_REPETITION,
            expected,
        )
        _check(
            "logit_bias",
            self.logit_bias,
            isinstance(self.logit_bias, Mapping),
            "a mapping of ids to numbers",
        )
        for token, bias in self.logit_bias.items():
            _check("an id of logit_bias", token, _whole(token, 0), "a whole number of 0 or more")
            _check_change(f"logit_bias of id {token}", bias)
        if self.json_schema is not None:
            _check_schema(self.json_schema)

    def filters(self) -> JsonObject:
        """Settings that make some tokens likelier or less likely than the model at `temperature`
        does.
        """
        return {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name not in _NEUTRAL and getattr(self, one.name) not in (one.default, {})
        }


def sampling_defaults(generation: JsonMapping) -> JsonObject:
    """The defaults of sampling that a model's `generation_config.json` gives, as keyword arguments
    of `Sampling`.

    Raises:
        ConfigError: A value is out of range.
    """
    known = {one.name for one in fields(Sampling)}
    found = {
        name: generation[name]
        for name in _DEFAULTS
        if name in known and generation.get(name) is not None
    }
    if generation.get("max_new_tokens") is not None:
        found["max_tokens"] = generation["max_new_tokens"]
    if found.get("top_k") in (0, -1):
        # In transformers and in vLLM, both mean all tokens.
        del found["top_k"]
    try:
        Sampling(**found)
    except (ConfigError, TypeError) as error:
        raise ConfigError(
            f"generation_config.json of the model: {error}; correct it there"
        ) from None
    return found


def _check_change(name: str, value: float) -> None:
    _check(
        name, value, -MOST_CHANGE <= value <= MOST_CHANGE, f"-{MOST_CHANGE:g} to {MOST_CHANGE:g}"
    )


def _check_schema(schema: str) -> None:
    try:
        found = json.loads(schema)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"json_schema is not valid JSON: {error}") from None
    _check("json_schema", schema, isinstance(found, dict), "a JSON object")


def _whole(value: object, least: int | None) -> bool:
    return (
        isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)
    )


def _texts(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(text, str) and text != "" and _is_unicode(text) for text in value
    )


def _is_unicode(text: str) -> bool:
    """Whether a text can be encoded: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check(name: str, found: object, fine: bool, expected: str) -> None:
    if not fine:
        raise ConfigError(f"{name} must be {expected}, got {found!r}")


@final
@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """The model's own log-probabilities for a token; natural logarithms."""

    token: float
    likeliest: tuple[tuple[int, float], ...]
    """(id, log-probability) of the requested number of alternatives, the most likely first."""


@final
@dataclass(frozen=True, slots=True)
class Event:
    """One more token of a sequence."""

    sequence: int
    token: int
    """`NO_TOKEN` if an error came before one was chosen."""
    text: str
    """The text that became certain: empty while a character or a stop string may have begun."""
    finish_reason: FinishReason | None = None
    """None until the last event."""
    logprobs: LogProbabilities | None = None
    error: ConfigError | None = None
    """Why the sequence ends here without a finish_reason: its JSON schema is too complex, or allows
    nothing.
    """


@final
@dataclass(frozen=True, slots=True)
class Generated:
    """A whole sequence, without its prompt."""

    tokens: tuple[int, ...]
    """All chosen tokens, including a stop id."""
    text: str
    finish_reason: FinishReason
    logprobs: tuple[LogProbabilities, ...] = ()
    """One per token, if they were requested."""
