"""Checks of a denoiser's settings before the first document: names, ids, and whether the sentinels suffice."""

from collections.abc import Callable
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.objectives.control_tokens import look_up, refuse_shared, spare_ids, tokenizer_of
from penstock.objectives.objective import Facts
from penstock.objectives.tasks import CausalLM, PrefixLM, SpanCorruption, cumulative

if TYPE_CHECKING:
    from penstock.objectives.denoise import Denoise, Token

LONGEST = 1 << 22
"""Tokens of a document, at most: lengths times rates stay in 32 bits for JAX."""


def plain_token(token: Any, role: str) -> "Token":
    """The token as an int or str; a ConfigError where it is neither an id nor a name (True and 1.5 are none)."""
    if isinstance(token, bool) or not isinstance(token, Integral | str):
        raise ConfigError(f"Denoise: {role} is {token!r}; due: a token's id or name")
    return token if isinstance(token, str) else int(token)


def check_settings(denoise: "Denoise") -> None:
    """Raise a ConfigError where settings disagree or are of a wrong kind, or ids are shared between roles."""
    for task in denoise.tasks:
        if not isinstance(task, SpanCorruption | PrefixLM | CausalLM):
            raise ConfigError(f"Denoise: a task is {task!r}; due: SpanCorruption, PrefixLM or CausalLM")
        if task.mode is not None:
            plain_token(task.mode, f"the mode token of task {task.name!r}")
    for name in ("roll", "final_sentinel", "bidirectional", "train_on_inputs"):
        # They are counted as slots, so 2 would not do for True.
        if not isinstance(getattr(denoise, name), bool):
            raise ConfigError(f"Denoise: {name} is {getattr(denoise, name)!r}; due: True or False")
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
        raise ConfigError(f"Denoise: max_length is {length!r}; due: a whole number of 1 or more, or None")
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
    """The largest length in 1..highest that fits, for a property that longer ones lose; 0 if none does."""
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
