"""The tasks of a denoiser with their weights.

Rates and mean lengths are exact rationals, read from their decimal text: 0.15 is 3/20, not the
nearest float.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from itertools import accumulate
from numbers import Integral
from typing import final

from penstock.core.errors import ConfigError
from penstock.plan.objectives._denoise_kernels import CAUSAL, PREFIX, SPANS

Token = int | str
"""A token's id, or the name of a control entry."""
Rational = float | str | Fraction
LARGEST = 1000
"""Maximum of numerators and denominators, so that lengths times rates fit 32 bits up to four
million tokens.
"""
SCALE = 1 << 32
"""Random words are below this."""
LONGEST = 1 << 22
"""Maximum tokens of a document: lengths times rates stay in 32 bits for JAX."""


@final
@dataclass(frozen=True, slots=True)
class SpanCorruption:
    """Take spans out of a document and predict them (T5, Raffel et al. 2020): the R and X denoisers
    of UL2.

    Of L tokens, round(L * rate) are noise, in round(noise / mean) spans, halves to the even number;
    how noise and the rest are cut into spans is uniform over all ways. At least one token is noise
    and one is kept.
    """

    rate: Rational
    """Share of the tokens that is noise, above 0 and below 1."""
    mean: Rational
    """Mean tokens of a span, 1 to 1,000."""
    _: KW_ONLY
    mode: int | str | None = None
    """The token put first to say which task this is: its id, its name, or none."""
    weight: Rational = 1.0
    """Share of the documents, relative to the other tasks."""
    name: str = "spans"
    """Its name in inspection."""

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        if not exact("mean", self.mean) >= 1:
            raise ConfigError(f"SpanCorruption: mean is {self.mean}; expected 1 token or more")

    def numbers(self) -> tuple[int, ...]:
        """Its part of a program, without weight and mode."""
        rate, mean = exact("rate", self.rate), exact("mean", self.mean)
        return SPANS, rate.numerator, rate.denominator, mean.numerator, mean.denominator, 1


@final
@dataclass(frozen=True, slots=True)
class PrefixLM:
    """Read the beginning of a document and predict the rest: the S denoiser of UL2.

    The beginning has 1 to L - 1 tokens, all alike, or a fixed share of the tokens.
    """

    _: KW_ONLY
    mode: int | str | None = None
    """The token put first to say which task this is: its id, its name, or none."""
    weight: Rational = 1.0
    """Share of the documents, relative to the other tasks."""
    sentinel: bool = True
    """Whether sentinel 0 comes before the rest, as its first target; T5's own `prefix_lm` has
    none.
    """
    rate: Rational | None = None
    """Share of the tokens that is predicted; None draws it."""
    name: str = "S"
    """Its name in inspection."""

    def __post_init__(self) -> None:
        if self.rate is not None:
            _check_rate(self.rate)

    def numbers(self) -> tuple[int, ...]:
        """Its part of a program, without weight and mode."""
        rate = Fraction(0) if self.rate is None else exact("rate", self.rate)
        return PREFIX, rate.numerator, rate.denominator, 1, 1, int(self.sentinel)


@final
@dataclass(frozen=True, slots=True)
class CausalLM:
    """Leave a document as it is and predict every token, under causal attention."""

    _: KW_ONLY
    mode: int | str | None = None
    """The token put first to say which task this is: its id, its name, or none."""
    weight: Rational = 1.0
    """Share of the documents, relative to the other tasks."""
    name: str = "causal"
    """Its name in inspection."""

    def numbers(self) -> tuple[int, ...]:
        """Its part of a program, without weight and mode."""
        return CAUSAL, 0, 1, 1, 1, 0


Task = SpanCorruption | PrefixLM | CausalLM


def exact(name: str, value: Rational) -> Fraction:
    """The exact rational of a number's decimal text.

    Raises:
        ConfigError: It is not a number, or its numerator or denominator is above 1,000.
    """
    try:
        number = value if isinstance(value, Fraction) else Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            f"{name} is {value!r}; expected a number such as 0.15, or '3/20'"
        ) from None
    if max(abs(number.numerator), number.denominator) > LARGEST:
        raise ConfigError(
            f"{name} is {value!r}, that is {number}; expected a fraction with numbers up to "
            f"{LARGEST:,}, because lengths are integer arithmetic; the nearest is "
            f"{number.limit_denominator(LARGEST)}"
        )
    return number


def _check_rate(rate: Rational) -> None:
    if not 0 < exact("rate", rate) < 1:
        raise ConfigError(f"rate is {rate}; expected a share above 0 and below 1")


def cumulative(tasks: Sequence[Task]) -> list[int]:
    """Upper ends of the tasks on the scale of 2^32, by largest remainder; the last is 2^32.

    Raises:
        ConfigError: A weight is not above 0, or so small that its task would never be drawn.
    """
    weights = []
    for task in tasks:
        try:
            weights.append(Fraction(str(task.weight)))
        except ValueError:
            raise ConfigError(
                f"task {task.name!r}: weight is {task.weight!r}; expected a number above 0"
            ) from None
        if weights[-1] <= 0:
            raise ConfigError(
                f"task {task.name!r}: weight is {task.weight}; expected a number above 0; to "
                "have none, leave it out"
            )
    shares = [weight * SCALE / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    neediest = sorted(range(len(tasks)), key=lambda task: counts[task] - shares[task])
    for number in neediest[: SCALE - sum(counts)]:
        counts[number] += 1
    if 0 in counts:
        rare = tasks[counts.index(0)]
        raise ConfigError(
            f"task {rare.name!r}: weight {rare.weight} is below 2^-32 of all; give it more, "
            "or leave it out"
        )
    return list(accumulate(counts))


def plain_token(token: object, role: str) -> Token:
    """The token as an int or str; a ConfigError if it is neither an id nor a name (True and 1.5 are
    neither).
    """
    if isinstance(token, bool) or not isinstance(token, Integral | str):
        raise ConfigError(f"Denoise: {role} is {token!r}; expected a token's id or name")
    return token if isinstance(token, str) else int(token)


def longest_that(fits: Callable[[int], bool], highest: int) -> int:
    """The largest length in 1..highest that fits; 0 if none does. If a length fits, all shorter
    ones must.
    """
    low, high = 0, min(highest, LONGEST)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
