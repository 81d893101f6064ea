"""Denoising: read a damaged document and predict what was taken out (T5, UL2, UL2R).

A denoised document is written as

    [mode] kept words, sentinel i in place of span i [input end] | sentinel 0, span 0, sentinel 1,
    span 1, … [final]

Before the bar are the inputs: they see each other in both directions and are not predicted. After
it are the targets, predicted one by one. `encoder_decoder` returns the two separately. The
document's BOS and EOS are not among its words: the loader keeps them out of the noise and puts them
around the result.

Guarantees: lengths and masks are integer arithmetic on (length, key), so they are the same on every
machine, and JAX draws the same ones; `restore` gets the document back from inputs and targets,
whatever ids it holds; there is a sentinel for every span of the longest document, or an error at
set-up. Cost: a few times that of copying the tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import lru_cache
from numbers import Integral
from typing import Annotated, Any, TypedDict, Unpack, final

import numpy as np

from penstock.core.arrays import Float32, Int32, Int64, UInt64
from penstock.core.compiled import from_python
from penstock.core.errors import ConfigError
from penstock.core.suggestions import suggests
from penstock.plan.objectives import _denoise_kernels as kernels
from penstock.plan.objectives.control_tokens import look_up, refuse_shared, spare_ids, tokenizer_of
from penstock.plan.objectives.denoise_tasks import (
    CausalLM,
    PrefixLM,
    SpanCorruption,
    Task,
    Token,
    cumulative,
    longest_that,
    plain_token,
)
from penstock.plan.objectives.objective import Facts, Written
from penstock.tokenizers import Tokenizer

_memory_size = from_python(kernels.memory_size)

MODES: Mapping[str, Token] = {"R": "[NLU]", "X": "[NLG]", "S": "[S2S]"}
"""Mode tokens of UL2 and UL2R by denoiser."""
_NO_WEIGHTS = np.empty(0, np.float32)


class Options(TypedDict, total=False):
    """The settings of `Denoise` that its presets take too."""

    sentinels: Sequence[Token] | None
    final_sentinel: bool
    roll: bool
    input_end: Token | None
    bidirectional: bool
    train_on_inputs: bool
    max_length: int | None
    tokenizer: str | None
    name: str


@suggests
@final
@dataclass(frozen=True, slots=True)
class Denoise:
    """A mixture of denoising tasks; each document gets one, by its key."""

    tasks: Sequence[Task]
    """The possible tasks, each with its weight."""
    _: KW_ONLY
    sentinels: Sequence[Token] | None = None
    """Ids or names of the tokens that stand for spans, in order; None: the tokenizer's own
    sentinels (`<extra_id_0>`…), or its reserved tokens. Text never becomes such an id; only a
    dataset that was made to hold it does.
    """
    final_sentinel: bool = False
    """End the targets with the sentinel after the last one used."""
    roll: bool = True
    """Turn the mask by a random offset. Without it, as in T5, the first token is never noise and
    the last always is.
    """
    input_end: Token | None = None
    """A token that ends the inputs."""
    bidirectional: bool = True
    """Whether inputs see each other in both directions; False: causal attention throughout."""
    train_on_inputs: bool = False
    """Predict the inputs too, except the mode token; needs `bidirectional=False`, or they would see
    themselves.
    """
    max_length: int | None = None
    """Split documents at this many tokens, unless rows split them earlier; bounds the number of
    sentinels.
    """
    tokenizer: str | None = field(default=None, repr=False)
    """A tokenizer with more control entries than the dataset's, in which names are looked up; see
    `penstock tokenizer add`. None: the dataset's. It is not in the repr, and so not in states: the
    ids found count, not the path.
    """
    name: str = "denoise"
    """Its name in plans and states."""

    def __post_init__(self) -> None:
        for name in ("tasks", "sentinels"):
            listed = getattr(self, name)
            if isinstance(listed, str) or not isinstance(listed, Iterable | None):
                raise ConfigError(f"Denoise: {name} is {listed!r}; expected a list")
        object.__setattr__(self, "tasks", tuple(self.tasks))
        if self.sentinels is not None:
            tokens = (
                plain_token(token, f"sentinel {number}")
                for number, token in enumerate(self.sentinels)
            )
            object.__setattr__(self, "sentinels", tuple(tokens))
        if self.input_end is not None:
            object.__setattr__(self, "input_end", plain_token(self.input_end, "input_end"))
        _check_settings(self)

    @classmethod
    def ul2(
        cls, *, modes: Mapping[str, Token] | None = MODES, **options: Unpack[Options]
    ) -> "Denoise":
        """The seven denoisers of UL2, equally often (Tay et al. 2022, arXiv:2205.05131, table 1).

        As in that table, S predicts the last quarter; the paper's code draws the pivot, as
        `PrefixLM()` does.

        Args:
            modes: Mode token of "R", "X" and "S", an id or a name; None: no mode tokens.
            options: Settings of `Denoise`.
        """
        mode = _mode_of(modes)
        spans = [
            ("R", 3, 0.15),
            ("R", 8, 0.15),
            ("X", 3, 0.5),
            ("X", 8, 0.5),
            ("X", 64, 0.15),
            ("X", 64, 0.5),
        ]
        tasks = [
            SpanCorruption(rate, mean, mode=mode(name), name=name) for name, mean, rate in spans
        ]
        return cls([*tasks, PrefixLM(mode=mode("S"), rate=0.25)], **options)

    @classmethod
    def ul2r(
        cls, *, modes: Mapping[str, Token] | None = MODES, **options: Unpack[Options]
    ) -> "Denoise":
        """The mixture that UL2R goes on training with: 25 % R, 25 % X in two halves, 50 % S.

        Source: Tay et al. 2022, Transcending Scaling Laws with 0.1% Extra Compute,
        arXiv:2210.11399.

        Args:
            modes: Mode token of "R", "X" and "S", an id or a name; None: no mode tokens.
            options: Settings of `Denoise`.
        """
        mode = _mode_of(modes)
        return cls(
            [
                SpanCorruption(0.15, 3, mode=mode("R"), weight=0.25, name="R"),
                SpanCorruption(0.15, 32, mode=mode("X"), weight=0.125, name="X"),
                SpanCorruption(0.5, 3, mode=mode("X"), weight=0.125, name="X"),
                PrefixLM(mode=mode("S"), weight=0.5),
            ],
            **options,
        )

    @classmethod
    def t5(cls, **options: Unpack[Options]) -> "Denoise":
        """T5's span corruption: rate 0.15, mean length 3, not rolled (Raffel et al. 2020,
        arXiv:1910.10683).
        """
        options.setdefault("roll", False)
        return cls([SpanCorruption(0.15, 3)], **options)

    def resolve(self, facts: Facts) -> "Denoise":
        """The same objective with ids for names, after checking that sentinels suffice for the
        longest document.

        Raises:
            ConfigError: A name is unknown, two roles have one id, or there are too few sentinels.
        """
        where = f"{facts.where}: {self.name}"
        longest = min(facts.longest, self.document_limit(facts.sequence_length))
        spare, resolved = self.sentinels is None, self
        if any(isinstance(token, str) for token in self._tokens) or (
            spare and self.worst(longest)[1]
        ):
            resolved = _look_up_all(self, tokenizer_of(facts, self.tokenizer, where), where)
        elif spare:
            resolved = replace(self, sentinels=())
        check_capacity(resolved, longest, where)
        return resolved

    def document_limit(self, sequence_length: int) -> int:
        """The longest document that fits for every task and key, at most `max_length`; 0 if none
        does.
        """
        limit = longest_that(
            lambda length: self.worst(length)[0] <= sequence_length, sequence_length
        )
        return limit if self.max_length is None else min(limit, self.max_length)

    def worst(self, length: int) -> tuple[int, int, str]:
        """Maximum (slots, sentinels) of a document of `length`, and the task that needs these
        sentinels.
        """
        program = _program(self)
        needs = [
            kernels.worst_of_task(program, number, length) for number in range(len(self.tasks))
        ]
        sentinels, hungriest = max(
            (sentinels, -number) for number, (_, sentinels) in enumerate(needs)
        )
        return max(slots for slots, _ in needs), sentinels, self.tasks[-hungriest].name

    def measure(
        self, lengths: Annotated[Int64, "documents"], keys: Annotated[UInt64, "documents"]
    ) -> Annotated[Int64, "documents"]:
        """Slots of each document, in constant time each."""
        slots = np.empty(len(lengths), np.int64)
        lengths, keys = (
            np.ascontiguousarray(lengths, np.int64),
            np.ascontiguousarray(keys, np.uint64),
        )
        kernels.measure_documents(_program(self), lengths, keys, slots)
        return slots

    def write(
        self,
        tokens: Annotated[Int32, "length"],
        weights: Annotated[Float32, "length"] | None,
        key: int,
    ) -> Written:
        """Denoise one document.

        Args:
            tokens: [n] words of the document, any ids.
            weights: [n] weight of each token as a target; None = 1. A sentinel gets the largest
                weight in its span, the final sentinel the largest of all spans.
            key: uint64; decides task and noise.

        Raises:
            ConfigError: Names were not looked up yet, the document has more spans than there are
                sentinels, or there are not as many weights as tokens.
        """
        if weights is not None and len(weights) != len(tokens):
            raise ConfigError(
                f"{self.name}: a document of {len(tokens)} tokens has {len(weights)} weights; "
                "expected one each"
            )
        program, length = self.program(), len(tokens)
        check_capacity(self, length, self.name)
        slots, prefix, reads = kernels.measure_document(program, length, np.uint64(key))
        out_tokens = np.empty(slots, np.int32)
        out_weights = np.ones(slots, np.float32)
        out_weights[:reads] = 0
        given = _NO_WEIGHTS if weights is None else np.ascontiguousarray(weights, np.float32)
        words = np.ascontiguousarray(tokens, np.int32)
        kernels.write_denoise(
            program,
            words,
            given,
            np.uint64(key),
            out_tokens,
            out_weights[: slots * (len(given) > 0)],
            np.empty(_memory_size(length), np.uint64),
        )
        return Written(tokens=out_tokens, weights=out_weights, prefix=prefix)

    def encoder_decoder(
        self, tokens: Annotated[Int32, "length"], key: int
    ) -> tuple[Annotated[Int32, "inputs"], Annotated[Int32, "targets"]]:
        """(inputs of an encoder, targets of a decoder) of one document, without BOS and EOS."""
        written = self.write(tokens, None, key).tokens
        bar = kernels.bar_of(_program(self), len(tokens), np.uint64(key))
        return written[:bar], written[bar:]

    def restore(
        self, written: Annotated[Int32, "slots"], length: int, key: int
    ) -> Annotated[Int32, "length"]:
        """Restore the document from its written form, by positions, not ids.

        Raises:
            ConfigError: The number of slots differs from that of a document of this length and key.
        """
        program = _program(self)
        slots = kernels.measure_document(program, length, np.uint64(key))[0]
        if len(written) != slots:
            raise ConfigError(
                f"{self.name}: {len(written)} slots cannot be what was written of a document "
                f"of {length} tokens with key {key}, which takes {slots}; give its words "
                "without BOS and EOS, and its own length and key"
            )
        begins, ends, in_place, marked = self._layout(length, key)
        mode = int(
            program[kernels.HEADER + kernels.TASK_FIELDS * self._task(length, key) + kernels.MODE]
            >= 0
        )
        document = np.empty(length, np.int32)
        at, behind = mode, 0
        target = kernels.bar_of(program, length, np.uint64(key))
        for begin, end in zip([*begins, length], [*ends, length], strict=True):
            document[behind:begin] = written[at : at + begin - behind]
            at += begin - behind + in_place
            target += marked
            document[begin:end] = written[target : target + end - begin]
            target += end - begin
            behind = end
        return document

    def spans(self, length: int, key: int) -> list[tuple[int, int]]:
        """(begin, end) of the spans taken out of a document, ascending; for a prefix task, its
        continuation.
        """
        begins, ends, _, _ = self._layout(length, key)
        return list(zip(begins, ends, strict=True))

    @property
    def task_names(self) -> tuple[str, ...]:
        """All names that `task` may return."""
        return tuple(dict.fromkeys(task.name for task in self.tasks))

    @property
    def added_tokens(self) -> tuple[int, ...]:
        """Ids that it inserts into documents, as far as they are known."""
        return tuple(token for token in self._tokens if isinstance(token, int))

    @property
    def _tokens(self) -> list[Token | None]:
        return [*(self.sentinels or ()), self.input_end, *(task.mode for task in self.tasks)]

    def task(self, length: int, key: int) -> str:
        """The name of the task that a document gets."""
        return self.tasks[self._task(length, key)].name

    def program(self) -> Annotated[Int64, "numbers"]:
        """The objective as numbers, for the compiled writer; see `_denoise_kernels`.

        Raises:
            ConfigError: Names were not looked up yet.
        """
        named = [token for token in self._tokens if isinstance(token, str)]
        if named or self.sentinels is None:
            raise ConfigError(
                f"{self.name}: {', '.join(map(repr, named[:4])) or 'the sentinels'} must be "
                "looked up in a tokenizer first, which a Loader does; outside of one: "
                "objective.resolve(facts), or give ids"
            )
        return _program(self)

    def _task(self, length: int, key: int) -> int:
        number: int = kernels.task_number(_program(self), length, np.uint64(key))
        return number

    def _layout(self, length: int, key: int) -> tuple[list[int], list[int], int, int]:
        """Begins and ends of the spans; whether sentinels stand among the inputs, and among the
        targets, 0 or 1.
        """
        task = self.tasks[self._task(length, key)]
        begins, ends = np.empty((2, length + 1), np.uint32)
        found = kernels.find_spans(_program(self), length, np.uint64(key), begins, ends)
        in_place = int(isinstance(task, SpanCorruption))
        marked = in_place or int(isinstance(task, PrefixLM) and task.sentinel)
        return begins[:found].tolist(), ends[:found].tolist(), in_place, marked


def _mode_of(modes: Mapping[str, Token] | None) -> Callable[[str], Token | None]:
    """Mode token of a denoiser, or None if `modes` omits it."""
    given = {} if modes is None else dict(modes)
    if unknown := set(given) - set(MODES):
        raise ConfigError(
            f"Denoise: modes names {', '.join(sorted(map(repr, unknown)))}; expected "
            f"denoisers among {', '.join(MODES)}"
        )
    return given.get


@lru_cache(maxsize=64)
def _program(denoise: Denoise) -> Int64:
    """The program; names that are not looked up yet count as id 0, which changes no length."""

    def number(token: Token | None) -> int:
        return -1 if token is None else 0 if isinstance(token, str) else token

    sentinels = [number(token) for token in denoise.sentinels or ()]
    flags = [denoise.roll, denoise.final_sentinel, number(denoise.input_end), denoise.bidirectional]
    numbers = [kernels.KIND, len(denoise.tasks), *flags, denoise.train_on_inputs, len(sentinels)]
    for task, end in zip(denoise.tasks, cumulative(denoise.tasks), strict=True):
        kind, *rest = task.numbers()
        numbers += [end, kind, number(task.mode), *rest]
    program = np.array(numbers + sentinels, np.int64)
    program.flags.writeable = False
    return program


def _check_settings(denoise: Denoise) -> None:
    """Raise a ConfigError if settings contradict each other or have a wrong type, or roles share
    ids.
    """
    for task in denoise.tasks:
        if not isinstance(task, SpanCorruption | PrefixLM | CausalLM):
            raise ConfigError(
                f"Denoise: a task is {task!r}; expected SpanCorruption, PrefixLM or CausalLM"
            )
        if task.mode is not None:
            plain_token(task.mode, f"the mode token of task {task.name!r}")
    for name in ("roll", "final_sentinel", "bidirectional", "train_on_inputs"):
        # They are counted as slots, so 2 cannot stand for True.
        if not isinstance(getattr(denoise, name), bool):
            raise ConfigError(
                f"Denoise: {name} is {getattr(denoise, name)!r}; expected True or False"
            )
    if not denoise.tasks:
        raise ConfigError(
            "Denoise: tasks is empty; name at least one, such as SpanCorruption(0.15, 3)"
        )
    cumulative(denoise.tasks)
    if denoise.train_on_inputs and denoise.bidirectional:
        raise ConfigError(
            "Denoise: train_on_inputs=True needs bidirectional=False: inputs that see each "
            "other in both directions would be predicted from themselves"
        )
    length: Any = denoise.max_length
    if length is not None and (not isinstance(length, Integral) or length < 1):
        raise ConfigError(
            f"Denoise: max_length is {length!r}; expected a whole number of 1 or more, or None"
        )
    refuse_shared(_roles(denoise))


def _roles(denoise: Denoise) -> list[tuple[str, int]]:
    """(role, id) of all tokens that are ids; tasks may share a mode token."""
    modes = {task.mode: task.name for task in denoise.tasks if isinstance(task.mode, int)}
    roles = [(f"Denoise: the mode token of task {name!r}", mode) for mode, name in modes.items()]
    if isinstance(denoise.input_end, int):
        roles.append(("Denoise: input_end", denoise.input_end))
    sentinels = enumerate(denoise.sentinels or ())
    return roles + [
        (f"Denoise: sentinel {number}", token)
        for number, token in sentinels
        if isinstance(token, int)
    ]


def check_capacity(denoise: Denoise, length: int, where: str) -> None:
    """Raise a ConfigError if a document of `length` may need more sentinels than there are."""
    have = len(denoise.sentinels or ())
    _, needed, task = denoise.worst(length)
    if needed <= have:
        return
    enough = longest_that(lambda shorter: denoise.worst(shorter)[1] <= have, length)
    cure = f"split documents at max_length={enough:,}, or " if enough > 1 else ""
    raise ConfigError(
        f"{where}: a document of {length:,} tokens needs up to {needed:,} sentinels in task "
        f"{task!r}, and there are {have:,}; {cure}name more sentinels, or add some: penstock "
        f"tokenizer add TOKENIZER --sentinels {needed} --output DIR"
    )


def _look_up_all(denoise: Denoise, tokenizer: Tokenizer, where: str) -> Denoise:
    add = (
        f"or add it: penstock tokenizer add {tokenizer.name} --token NAME --output DIR, and "
        "tokenizer=DIR here"
    )

    def find(token: Token, role: str, cure: str) -> int:
        if isinstance(token, int):
            return token
        return look_up(tokenizer, token, role=role, where=where, cure=f"{cure}, {add}")

    tasks = []
    for task in denoise.tasks:
        cure = "name another (modes=… of a preset, mode= of a task), have none (None)"
        role = f"the mode token of task {task.name!r}"
        tasks.append(task if task.mode is None else replace(task, mode=find(task.mode, role, cure)))
    input_end = (
        None if denoise.input_end is None else find(denoise.input_end, "input_end", "name another")
    )
    if denoise.sentinels is not None:
        sentinels = [find(token, "a sentinel", "name others") for token in denoise.sentinels]
    else:
        others = [
            tokenizer.bos_id,
            tokenizer.eos_id,
            tokenizer.pad_id,
            input_end,
            *(task.mode for task in tasks),
        ]
        sentinels = spare_ids(
            tokenizer.special_tokens, taken={token for token in others if isinstance(token, int)}
        )
    return replace(denoise, tasks=tasks, input_end=input_end, sentinels=sentinels)
