"""The tasks of a denoiser with their weights, and the checks of its settings: names, ids, enough sentinels.

Rates and mean lengths are exact rationals, read from their decimal text: 0.15 is 3/20, not the nearest float.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction
from itertools import accumulate
from numbers import Integral
from typing import TYPE_CHECKING, Any, final

from penstock.core.errors import ConfigError
from penstock.objectives._denoise_kernels import CAUSAL, PREFIX, SPANS
from penstock.objectives.control_tokens import look_up, refuse_shared, spare_ids, tokenizer_of
from penstock.objectives.objective import Facts

if TYPE_CHECKING:
    from penstock.objectives.denoise import Denoise, Token

Rational = float | str | Fraction
LARGEST = 1000
"""Maximum of numerators and denominators, so that lengths times rates fit 32 bits up to four million tokens."""
SCALE = 1 << 32
"""Random words are below this."""


@final
@dataclass(frozen=True, slots=True)
class SpanCorruption:
    """Take spans out of a document and predict them (T5, Raffel et al. 2020): the R and X denoisers of UL2.

    Of L tokens, round(L * rate) are noise, in round(noise / mean) spans, halves to the even number; how noise and the
    rest are cut into spans is uniform over all ways. At least one token is noise and one is kept.
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
    """What inspection calls it."""

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
    """Whether sentinel 0 stands before the rest, as its first target; T5's own `prefix_lm` has none."""
    rate: Rational | None = None
    """Share of the tokens that is predicted; None draws it."""
    name: str = "S"
    """What inspection calls it."""

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
    """What inspection calls it."""

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
        raise ConfigError(f"{name} is {value!r}; expected a number such as 0.15, or '3/20'") from None
    if max(abs(number.numerator), number.denominator) > LARGEST:
        raise ConfigError(
            f"{name} is {value!r}, that is {number}; expected a fraction with numbers up to {LARGEST:,}, "
            f"because lengths are integer arithmetic; the nearest is {number.limit_denominator(LARGEST)}"
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
            raise ConfigError(f"task {task.name!r}: weight is {task.weight!r}; expected a number above 0") from None
        if weights[-1] <= 0:
            raise ConfigError(
                f"task {task.name!r}: weight is {task.weight}; expected a number above 0; to have none, leave it out"
            )
    shares = [weight * SCALE / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    neediest = sorted(range(len(tasks)), key=lambda task: counts[task] - shares[task])
    for number in neediest[: SCALE - sum(counts)]:
        counts[number] += 1
    if 0 in counts:
        rare = tasks[counts.index(0)]
        raise ConfigError(
            f"task {rare.name!r}: weight {rare.weight} is below 2^-32 of all; give it more, or leave it out"
        )
    return list(accumulate(counts))


LONGEST = 1 << 22
"""Maximum tokens of a document: lengths times rates stay in 32 bits for JAX."""


def plain_token(token: Any, role: str) -> "Token":
    """The token as an int or str; a ConfigError if it is neither an id nor a name (True and 1.5 are neither)."""
    if isinstance(token, bool) or not isinstance(token, Integral | str):
        raise ConfigError(f"Denoise: {role} is {token!r}; expected a token's id or name")
    return token if isinstance(token, str) else int(token)


def check_settings(denoise: "Denoise") -> None:
    """Raise a ConfigError if settings contradict each other or have a wrong type, or roles share ids."""
    for task in denoise.tasks:
        if not isinstance(task, SpanCorruption | PrefixLM | CausalLM):
            raise ConfigError(f"Denoise: a task is {task!r}; expected SpanCorruption, PrefixLM or CausalLM")
        if task.mode is not None:
            plain_token(task.mode, f"the mode token of task {task.name!r}")
    for name in ("roll", "final_sentinel", "bidirectional", "train_on_inputs"):
        # They are counted as slots, so 2 cannot stand for True.
        if not isinstance(getattr(denoise, name), bool):
            raise ConfigError(f"Denoise: {name} is {getattr(denoise, name)!r}; expected True or False")
    if not denoise.tasks:
        raise ConfigError("Denoise: tasks is empty; name at least one, such as SpanCorruption(0.15, 3)")
    cumulative(denoise.tasks)
    if denoise.train_on_inputs and denoise.bidirectional:
        raise ConfigError(
            "Denoise: train_on_inputs=True needs bidirectional=False: inputs that see each other in both directions "
            "would be predicted from themselves"
        )
    length: Any = denoise.max_length
    if length is not None and (not isinstance(length, Integral) or length < 1):
        raise ConfigError(f"Denoise: max_length is {length!r}; expected a whole number of 1 or more, or None")
    refuse_shared(_roles(denoise))


def _roles(denoise: "Denoise") -> list[tuple[str, int]]:
    """(role, id) of all tokens that are ids; tasks may share a mode token."""
    modes = {task.mode: task.name for task in denoise.tasks if isinstance(task.mode, int)}
    roles = [(f"Denoise: the mode token of task {name!r}", mode) for mode, name in modes.items()]
    if isinstance(denoise.input_end, int):
        roles.append(("Denoise: input_end", denoise.input_end))
    sentinels = enumerate(denoise.sentinels or ())
    return roles + [(f"Denoise: sentinel {number}", token) for number, token in sentinels if isinstance(token, int)]


def longest_that(fits: Callable[[int], bool], highest: int) -> int:
    """The largest length in 1..highest that fits; 0 if none does. If a length fits, all shorter ones must."""
    low, high = 0, min(highest, LONGEST)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def check_capacity(denoise: "Denoise", length: int, where: str) -> None:
    """Raise a ConfigError if a document of `length` may need more sentinels than there are."""
    have = len(denoise.sentinels or ())
    _, needed, task = denoise.worst(length)
    if needed <= have:
        return
    enough = longest_that(lambda shorter: denoise.worst(shorter)[1] <= have, length)
    cure = f"split documents at max_length={enough:,}, or " if enough > 1 else ""
    raise ConfigError(
        f"{where}: a document of {length:,} tokens needs up to {needed:,} sentinels in task {task!r}, and there are "
        f"{have:,}; {cure}name more sentinels, or add some: penstock tokenizer add TOKENIZER --sentinels {needed} "
        "--output DIR"
    )


def resolve(denoise: "Denoise", facts: Facts) -> "Denoise":
    """See `Denoise.resolve`."""
    where = f"{facts.where}: {denoise.name}"
    longest = min(facts.longest, denoise.document_limit(facts.sequence_length))
    tokens = [denoise.input_end, *(denoise.sentinels or ()), *(task.mode for task in denoise.tasks)]
    spare = denoise.sentinels is None
    if any(isinstance(token, str) for token in tokens) or (spare and denoise.worst(longest)[1]):
        denoise = _look_up_all(denoise, tokenizer_of(facts, denoise.tokenizer, where), where)
    elif spare:
        denoise = replace(denoise, sentinels=())
    check_capacity(denoise, longest, where)
    return denoise


def _look_up_all(denoise: "Denoise", tokenizer: Any, where: str) -> "Denoise":
    add = f"or add it: penstock tokenizer add {tokenizer.name} --token NAME --output DIR, and tokenizer=DIR here"

    def find(token: "Token", role: str, cure: str) -> int:
        if isinstance(token, int):
            return token
        return look_up(tokenizer, token, role=role, where=where, cure=f"{cure}, {add}")

    tasks = []
    for task in denoise.tasks:
        cure = "name another (modes=… of a preset, mode= of a task), have none (None)"
        role = f"the mode token of task {task.name!r}"
        tasks.append(task if task.mode is None else replace(task, mode=find(task.mode, role, cure)))
    input_end = None if denoise.input_end is None else find(denoise.input_end, "input_end", "name another")
    if denoise.sentinels is not None:
        sentinels = [find(token, "a sentinel", "name others") for token in denoise.sentinels]
    else:
        others = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, input_end, *(task.mode for task in tasks)]
        sentinels = spare_ids(tokenizer.special_tokens, taken={token for token in others if token is not None})
    return replace(denoise, tasks=tasks, input_end=input_end, sentinels=sentinels)
