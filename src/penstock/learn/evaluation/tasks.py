"""Tasks: their settings, what a task provides, and the tasks by name. Imports no torch.

A task has problems with ids, and answers them with a model; each answer has a score. A task's
module is imported when the task is made.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, final

from penstock.core.errors import ConfigError
from penstock.core.randomness import key_for
from penstock.learn.generation.settings import Sampling

if TYPE_CHECKING:
    from penstock.learn.evaluation.subject import Subject
    from penstock.learn.generation import Generated

LM_EVAL = "lm-eval:"
"""Prefix of the names of lm-eval's tasks."""
TASKS = {
    "mmlu": ("mmlu", "Mmlu"),
    "gsm8k": ("gsm8k", "Gsm8k"),
    "bits_per_byte": ("bits_per_byte", "BitsPerByte"),
    "humaneval": ("code", "CodeTask"),
    "humaneval_plus": ("code", "CodeTask"),
    "mbpp": ("code", "CodeTask"),
    "mbpp_plus": ("code", "CodeTask"),
}
"""Name → (module in this package, class that takes the settings)."""
MAX_TOKENS = 512
_WRITTEN = ("chat", "samples", "temperature", "max_tokens")
_OPTIONS: Mapping[str, Sequence[str]] = {
    "mmlu": ("chat", "shots"),
    "gsm8k": (*_WRITTEN, "shots"),
    "bits_per_byte": ("overlap",),
    "humaneval": (*_WRITTEN, "unsafe"),
    "humaneval_plus": (*_WRITTEN, "unsafe"),
    "mbpp": (*_WRITTEN, "unsafe", "shots"),
    "mbpp_plus": (*_WRITTEN, "unsafe"),
    LM_EVAL: ("chat", "shots", "temperature", "max_tokens"),
}
"""Name → the settings that have a meaning for it, besides `_OF_ALL`."""
_OF_ALL = ("name", "data", "limit", "seed")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """Settings of one task."""

    name: str
    """mmlu, gsm8k, humaneval, humaneval_plus, mbpp, mbpp_plus, bits_per_byte, lm-eval:NAME."""
    data: str | None = None
    """A file or a folder; None: from the Hugging Face Hub, if the task is there."""
    limit: int | None = None
    """Maximum number of problems, from the first; in a task with groups, of each group. None:
    all.
    """
    shots: int | None = None
    """Number of solved problems in each prompt; None: as published."""
    chat: bool = False
    """Use the model's chat template instead of plain text."""
    samples: int = 1
    """Number of replies to each problem, in tasks with written replies."""
    temperature: float | None = None
    """Sampling temperature of replies; 0 takes the most likely token. None: 0, or what a task of
    lm-eval says.
    """
    max_tokens: int | None = None
    """Maximum tokens of a reply. None: 512, or what a task of lm-eval says."""
    overlap: int | None = None
    """bits_per_byte: context tokens repeated at the start of each further window, in documents
    longer than the context; None: half of the context.
    """
    unsafe: bool = False
    """Run code that the model wrote even if there is no sandbox."""
    seed: int = 0
    """Seed of the draws, together with the problem and the number of the reply."""

    def __post_init__(self) -> None:
        for name, least in (
            ("limit", 1),
            ("shots", 0),
            ("samples", 1),
            ("max_tokens", 1),
            ("overlap", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"task {self.name}: {name} must be {least} or more, got {value}")
        temperature = self.temperature or 0.0
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise ConfigError(f"task {self.name}: temperature must be 0 or more, got {temperature}")
        self._refuse_meaningless()
        if self.samples > 1 and temperature == 0:
            raise ConfigError(
                f"task {self.name}: {self.samples} samples at temperature 0 would be "
                "identical; set a temperature"
            )

    def _refuse_meaningless(self) -> None:
        """Refuse settings that differ from their defaults and would change nothing."""
        takes = options_of(self.name)
        defaults = {one.name: one.default for one in fields(self)}
        # These are what None means; a run file may hold them.
        meant = {"temperature": 0.0, "max_tokens": MAX_TOKENS} if self.name in TASKS else {}
        for name in defaults if takes else ():
            value = getattr(self, name)
            if name not in takes and value not in (defaults[name], meant.get(name)):
                known = ", ".join(sorted(takes - {"name"}))
                raise ConfigError(
                    f"task {self.name}: {name} has no meaning for it, got {value!r}; leave it "
                    f"out. It takes {known}"
                )

    @property
    def reply_tokens(self) -> int:
        """Maximum tokens of a reply to one of our own tasks."""
        return MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def used(self) -> dict[str, Any]:
        """The settings that have a meaning for one of our own tasks, by name, with what None means
        filled in.
        """
        takes = options_of(self.name)
        filled = asdict(self) | {
            "temperature": self.temperature or 0.0,
            "max_tokens": self.reply_tokens,
        }
        return {name: value for name, value in filled.items() if not takes or name in takes}


def options_of(name: str) -> frozenset[str]:
    """The names of the settings that have a meaning for a task; empty if it is not known."""
    known = _OPTIONS.get(LM_EVAL if name.startswith(LM_EVAL) else name)
    return frozenset() if known is None else frozenset((*_OF_ALL, *known))


def settings_of_all(
    names: Sequence[str], data: Mapping[str, str | None], options: Mapping[str, Any]
) -> list[TaskSettings]:
    """The settings of several tasks, each with those options that have a meaning for it.

    Args:
        names: The tasks.
        data: Name → place of its data.
        options: Settings for all of them.

    Raises:
        ConfigError: There is no such task, an option has no meaning for any of them, or there are
            options and no tasks.
    """
    for name in names:
        check_name(name)
    takes = [options_of(name) for name in names]
    if options and not names:
        raise ConfigError(
            f"{', '.join(options)}: settings of tasks, and no task is named; leave them out, or "
            "name a task"
        )
    for option in options:
        if not any(option in one for one in takes):
            # Raises with what the first one takes.
            TaskSettings(name=names[0], **{option: options[option]})
    return [
        TaskSettings(
            name=name,
            data=data.get(name),
            **{option: value for option, value in options.items() if option in own},
        )
        for name, own in zip(names, takes, strict=True)
    ]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem."""

    name: str
    """Its id, unique in the task."""
    group: str = ""
    """A group that gets its own results, such as MMLU's subject; empty: none."""
    content: Any = None
    """The task's own data."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a model did on one problem."""

    problem: str
    """The problem's id."""
    group: str = ""
    score: float
    """Usually 0 or 1."""
    weight: float = 1.0
    """Weight in the mean, such as a document's bytes."""
    detail: Any = None
    """JSON-ready details, for people and for the task's `figures`."""


class Task(Protocol):
    """Has problems, and answers them with a model."""

    settings: TaskSettings

    @property
    def notes(self) -> Sequence[str]:
        """Remarks about the data that readers of a score must know; usually none."""

    def problems(self) -> Sequence[Problem]:
        """All problems, always in the same order.

        Raises:
            ConfigError: There is no data.
            RecordError: The data do not belong to this task.
        """

    def fingerprint(self) -> str:
        """Fingerprint of the data; see `fingerprint_of`."""

    def answer(self, subject: "Subject", problems: Sequence[Problem]) -> Iterator[Answer]:
        """One answer to each of these problems, in any order; they do not depend on each other."""

    def figures(self, answers: Sequence[Answer]) -> dict[str, tuple[float, float]]:
        """Figures besides the mean score: (value, standard error) by name, such as pass@10; usually
        none.
        """


def after_thoughts(reply: str) -> str:
    """A reply without what the model thought before it, up to the last `</think>`."""
    return reply.rpartition("</think>")[2]


def fingerprint_of(*parts: object) -> str:
    """16 hexadecimal digits that identify JSON-ready data."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(json.dumps(part, sort_keys=True).encode() + b"\0")
    return digest.hexdigest()


def check_name(name: str) -> None:
    """Refuse unknown names; names of lm-eval's tasks are not checked further.

    Raises:
        ConfigError: There is no task of that name.
    """
    if name not in TASKS and not (name.startswith(LM_EVAL) and name != LM_EVAL):
        raise ConfigError(
            f"no task {name!r}; known: {', '.join(TASKS)}, and {LM_EVAL}NAME for lm-eval's tasks"
        )


def make_task(settings: TaskSettings) -> Task:
    """Make a task by name; for lm-eval's, see `run_lm_eval`.

    Raises:
        ConfigError: There is no such task, or its data are missing.
    """
    if settings.name not in TASKS:
        check_name(settings.name)
        raise ConfigError(
            f"task {settings.name} belongs to lm-eval; run it with `penstock eval RUN --task "
            f"{settings.name}`"
        )
    module, name = TASKS[settings.name]
    made: Task = getattr(import_module(f"penstock.learn.evaluation.{module}"), name)(settings)
    return made


def write_replies(
    subject: "Subject",
    problems: Sequence[str],
    prompts: Sequence[Sequence[int]],
    settings: TaskSettings,
    *,
    stop: tuple[str, ...] = (),
) -> "list[list[Generated]]":
    """Write `settings.samples` replies to each prompt.

    Args:
        subject: The model.
        problems: The problems' ids, from which the seeds are derived.
        prompts: Ids of each problem's prompt.
        settings: Temperature, tokens, samples and seed.
        stop: Texts that end a reply.
    """
    count = settings.samples
    sampling = [
        Sampling(
            temperature=settings.temperature or 0.0,
            max_tokens=settings.reply_tokens,
            seed=int(key_for(settings.seed, "reply", settings.name, problem, sample)),
            stop=stop,
        )
        for problem in problems
        for sample in range(count)
    ]
    written = subject.write([prompt for prompt in prompts for _ in range(count)], sampling)
    return [written[begin : begin + count] for begin in range(0, len(written), count)]
