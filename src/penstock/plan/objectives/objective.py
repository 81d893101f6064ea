"""The protocol of objectives, the causal objective, and `check_objective`, which tests the
contract.

An objective rewrites a document, and knows beforehand how many tokens that gives. The plan sees
only lengths, so `measure` answers from (length, key) alone; `write` must then give exactly that
many tokens, or the loader reports the bug. Documents are split before they are measured. Everything
after the rewriting is the same for every objective: targets at all distances, loss weights,
positions, packing.

All randomness comes from the key, which depends on (seed, source, epoch, document, part). So a
document is rewritten in the same way wherever it is packed, on any number of ranks, and differently
in each epoch.

What a slot predicts is the token behind it, unless the objective writes `targets`: then it may be
any id, such as the one that a mask stands for. So a model's input may differ from what it learns.

`Causal` is next-token prediction: a document is its own input, and each token is the target of the
one before it. `check_objective` tries the contract on random documents, in a few hundred calls of
`write`; use it in tests of your own objectives.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, final, runtime_checkable

import numpy as np

from penstock.core.arrays import Array, Float32, Int32, Int64, UInt64
from penstock.core.errors import ConfigError
from penstock.core.suggestions import suggests

MEMBERS = ("name", "document_limit", "measure", "write")
"""Common part of all objectives."""
NO_TARGET = -100
"""In `Written.targets`: the slot predicts nothing."""
LENGTHS = (1, 2, 3, 5, 8, 21, 64, 300)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Written:
    """A document as the model sees it. n slots."""

    tokens: Annotated[Int32, "slots"]
    """[n] token ids. Without `targets`, each is what the slot before it predicts, if it has a
    weight.
    """
    weights: Annotated[Float32, "slots"] | None = None
    """[n] weight of each token as a target, 0 = input only; None = each counts 1. The first token
    is never a target, because nothing comes before it. With `targets`: the weight of each slot's
    target.
    """
    targets: Annotated[Int32, "slots"] | None = None
    """[n] the id that each slot must predict, −100 for none; None: the token behind it. Such an
    objective says so by `writes_targets` (`WritingTargets`).
    """
    denominator: float | None = None
    """With `targets`: what the document adds to the number that the loss of a step is divided by;
    None: the sum of its targets' weights. An estimate whose weights are drawn, such as 1 / t,
    gives their expectation here.
    """
    prefix: int = 0
    """Number of leading tokens that see each other in both directions; all others see only what is
    before them.
    """
    padding: int = 0
    """Number of trailing tokens that only fill the measured slots; a document's EOS goes before
    them.
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of the data that an objective gets before the first document, in `resolve`."""

    where: str
    """The source with the objective, for errors: "source 'web'"."""
    tokenizer: Callable[[], Any]
    """Returns the tokenizer of the dataset; raises a ConfigError if it cannot be loaded."""
    sequence_length: int
    """Token slots per row."""
    longest: int
    """Tokens of the longest document; longer than a row if documents will be split."""


@runtime_checkable
class Objective(Protocol):
    """The protocol of objectives. Your own needs these four members; make it a frozen dataclass.

    An objective may also have: `resolve(facts: Facts) -> Objective`, called once at set-up
    (`Resolving`); `task(length: int, key: int) -> str`, the name of the task that a document gets
    (`WithTasks`), and `task_names: tuple[str, ...]` (`NamingTasks`); `added_tokens: tuple[int,
    ...]`, the ids it inserts (`AddingTokens`); `bidirectional: bool`, True if a `prefix` may be
    above 0 (`Bidirectional`); `writes_targets: bool`, True if it writes targets of its own
    (`WritingTargets`); `rewrites_eos: bool`, True if an EOS is rewritten like any other token
    (`RewritingEos`); `nodes(slots)`, if it cuts what it writes into parts that see each other by a
    tree (`WritingNodes`).

    `check_objective` tests whether an objective meets the contract. Its `repr` goes into a state's
    digest, so that no run is resumed with another objective; it must contain all settings, and be
    the same in every process.
    """

    @property
    def name(self) -> str:
        """A short name, shown in plans and kept in states."""

    def document_limit(self, sequence_length: int) -> int:
        """The longest document, in tokens, that fits a row of `sequence_length` for every key, as
        measured.
        """

    def measure(
        self, lengths: Annotated[Int64, "documents"], keys: Annotated[UInt64, "documents"]
    ) -> Annotated[Int64, "documents"]:
        """Row slots that each document takes, from its length and its key alone."""

    def write(
        self,
        tokens: Annotated[Int32, "length"],
        weights: Annotated[Float32, "length"] | None,
        key: int,
    ) -> Written:
        """Rewrite one document.

        Args:
            tokens: [length] ids of the document, without BOS and EOS if all documents of the
                dataset have them; the loader puts these around the result.
            weights: [length] loss weights, if the dataset has any; None = all 1.
            key: As given to `measure`.
        """


@runtime_checkable
class WritingTargets(Protocol):
    """An objective whose targets are its own."""

    writes_targets: bool
    """Whether `Written.targets` may be given. Such rows have one target a slot."""


@runtime_checkable
class RewritingEos(Protocol):
    """An objective that learns where a document ends, too."""

    rewrites_eos: bool
    """Whether it gets the EOS that all documents of a dataset have; else the loader puts it behind
    the result, and it is read only if the objective writes targets. A BOS is always kept outside.
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nodes:
    """Parts of a written document: a slot sees all of its own part, and the parts above it in a
    tree. Parts stand depth first. n parts.
    """

    begins: Annotated[Int64, "nodes"]
    """[n] first slot of each."""
    reach: Annotated[Int64, "nodes"]
    """[n] one after the last slot of its subtree."""
    positions: Annotated[Int64, "slots"]
    """[slots] position of each slot on the path from the root to it."""

    @classmethod
    def whole(cls, slots: int) -> "Nodes":
        """One part."""
        return cls(
            begins=np.zeros(1, np.int64), reach=np.array([slots]), positions=np.arange(slots)
        )

    def behind_one(self) -> "Nodes":
        """These below a root of one slot, such as a BOS."""
        return Nodes(
            begins=np.append(0, self.begins + 1),
            reach=np.append(len(self.positions) + 1, self.reach + 1),
            positions=np.append(0, self.positions + 1),
        )


@runtime_checkable
class WritingNodes(Protocol):
    """An objective that cuts what it writes into parts; its `prefix` is the whole document."""

    def nodes(self, slots: int) -> Nodes:
        """The parts of a document that takes `slots` slots."""


@runtime_checkable
class Resolving(Objective, Protocol):
    """An objective that is prepared for its data, once at set-up."""

    def resolve(self, facts: Facts) -> Objective:
        """The objective with token ids looked up; refuses what cannot work."""


@runtime_checkable
class WithTasks(Protocol):
    """An objective that says what it does to a document, for inspection."""

    def task(self, length: int, key: int) -> str:
        """The name of the task that a document gets."""


@runtime_checkable
class NamingTasks(Protocol):
    """An objective with `task` that knows all such names, so that metrics can separate tasks."""

    task_names: tuple[str, ...]


@runtime_checkable
class AddingTokens(Protocol):
    """An objective that inserts tokens into documents."""

    added_tokens: tuple[int, ...]
    """Their ids, checked against the model's vocabulary."""


@runtime_checkable
class Bidirectional(Protocol):
    """An objective that may write a `prefix` above 0."""

    bidirectional: bool
    """Whether it does."""


@runtime_checkable
class OwnVocabulary(Protocol):
    """An objective with tokens that may be of a longer tokenizer than the dataset's."""

    tokenizer: str | None
    """That tokenizer; None: the dataset's."""


@runtime_checkable
class Compiled(Protocol):
    """A built-in objective that a compiled writer may execute in place of `write`."""

    def program(self) -> Int64 | None:
        """Its program; None: it has none, so `write` is called."""


def is_bidirectional(objective: Objective) -> bool:
    """Whether an objective may write a `prefix` above 0."""
    return isinstance(objective, Bidirectional) and objective.bidirectional


def writes_targets(objective: Objective) -> bool:
    """Whether an objective may write targets of its own."""
    return isinstance(objective, WritingTargets) and objective.writes_targets


def fault_of(objective: Objective, written: Written, slots: int) -> str | None:
    """What is wrong with what an objective wrote for a document that it measured as `slots`; None:
    nothing.
    """
    tokens, weights = np.asarray(written.tokens), written.weights
    bidirectional = is_bidirectional(objective)
    if tokens.shape != (slots,) or tokens.dtype.kind not in "iu":
        return f"wrote {tokens.dtype} {list(tokens.shape)} tokens where it had measured {slots}"
    if weights is not None and (np.shape(weights) != (slots,) or not np.isfinite(weights).all()):
        return (
            f"wrote weights of shape {list(np.shape(weights))} that are not {slots} finite numbers"
        )
    if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= 2**31:
        return f"wrote ids outside 0 … 2^31 − 1, {tokens.min()} to {tokens.max()}"
    if not 0 <= written.prefix <= slots or (written.prefix and not bidirectional):
        return (
            f"wrote a prefix of {written.prefix} in {slots} tokens, with bidirectional = "
            f"{bidirectional}"
        )
    if not 0 <= written.padding < slots or (written.padding and weights is None):
        return f"wrote {written.padding} slots of padding in {slots}, which need weights of 0"
    if weights is not None and np.any(weights[slots - written.padding :]):
        return f"wrote {written.padding} slots of padding with weights other than 0"
    return _fault_of_targets(objective, written, slots)


def _fault_of_targets(objective: Objective, written: Written, slots: int) -> str | None:
    denominator = written.denominator
    if written.targets is None:
        return None if denominator is None else "wrote a denominator without targets"
    if not writes_targets(objective):
        return "wrote targets, but its writes_targets is not True"
    targets = np.asarray(written.targets)
    if targets.shape != (slots,) or targets.dtype.kind not in "iu":
        return f"wrote {targets.dtype} {list(targets.shape)} targets for {slots} slots"
    known = targets[targets != NO_TARGET]
    if known.min(initial=0) < 0 or known.max(initial=0) >= 2**31:
        return (
            f"wrote targets outside 0 … 2^31 − 1 that are not {NO_TARGET}, {targets.min()} to "
            f"{targets.max()}"
        )
    if denominator is not None and not (math.isfinite(denominator) and denominator >= 0):
        return f"wrote the denominator {denominator}; expected a number of 0 or more"
    return None


@suggests
@final
@dataclass(frozen=True, slots=True)
class Causal:
    """Predict the token at distance 1, 2, … (multi-token prediction) inside the document, under
    causal attention.
    """

    name: str = "causal"

    def document_limit(self, sequence_length: int) -> int:
        """A document takes as many slots as it has tokens."""
        return sequence_length

    def measure(
        self, lengths: Annotated[Int64, "documents"], keys: Annotated[UInt64, "documents"]
    ) -> Annotated[Int64, "documents"]:
        """The lengths themselves; nothing is drawn."""
        return lengths

    def write(
        self,
        tokens: Annotated[Int32, "length"],
        weights: Annotated[Float32, "length"] | None,
        key: int,
    ) -> Written:
        """The document, unchanged."""
        return Written(tokens=tokens, weights=weights)


def missing_members(objective: object) -> tuple[str, ...]:
    """Those of `MEMBERS` that it does not have."""
    return tuple(member for member in MEMBERS if not hasattr(objective, member))


def check_objective(
    objective: Objective, *, sequence_length: int = 512, vocab_size: int = 1000, seed: int = 0
) -> None:
    """Test the contract of `Objective` on an objective that is resolved (or needs no resolving).

    Its repr must contain its settings. It must measure whole numbers from 1 on, the same for a
    document alone and among others; write exactly that many tokens, the same each time, without
    changing its arguments; fit documents of up to `document_limit` tokens into the row; and give no
    weight to a document with weights that are all 0.

    Args:
        objective: The objective to test.
        sequence_length: Token slots per row.
        vocab_size: Ids of the random documents are below this.
        seed: Seed of the random documents and keys.

    Raises:
        ConfigError: A rule is broken; the message names the first one and the document.
    """
    if isinstance(objective, type):
        raise ConfigError(
            f"objective {objective.__name__}: it is a class; give an object of it, "
            f"{objective.__name__}(…)"
        )
    if missing := missing_members(objective):
        raise ConfigError(
            f"objective {objective!r}: it has no {', '.join(missing)}; needed are "
            f"{', '.join(MEMBERS)}"
        )
    numbers = np.random.default_rng(seed)
    if " at 0x" in repr(objective):
        raise ConfigError(
            f"{objective.name}: repr must say its settings, found {objective!r}; use a frozen "
            "dataclass"
        )
    limit = objective.document_limit(sequence_length)
    _require(
        limit >= 1,
        objective,
        f"document_limit({sequence_length}) is {limit}, so it can use no document",
    )
    lengths = np.array([*(length for length in LENGTHS if length < limit), limit] * 8, np.int64)
    keys = numbers.integers(0, 2**64, len(lengths), np.uint64)
    measured = np.asarray(objective.measure(lengths.copy(), keys.copy()))
    _require(
        measured.shape == lengths.shape and measured.dtype.kind in "iu",
        objective,
        f"measure must give a whole number for each of {len(lengths)} documents, gave "
        f"{measured.dtype} {list(measured.shape)}",
    )
    for length, key, slots in zip(lengths.tolist(), keys, measured.tolist(), strict=True):
        what = f"a document of {length} tokens with key {key}"
        fits = 1 <= slots <= sequence_length
        _require(fits, objective, f"{what} is measured as {slots} in rows of {sequence_length}")
        alone = np.asarray(objective.measure(np.array([length]), np.array([key]))).tolist()
        _require(
            alone == [slots],
            objective,
            f"{what} is measured as {slots} among others and as {alone} alone",
        )
        _check_writing(
            objective, numbers.integers(0, vocab_size, length, np.int32), int(key), slots, what
        )


def _check_writing(objective: Objective, tokens: Int32, key: int, slots: int, what: str) -> None:
    before, ones, zeros = (
        tokens.copy(),
        np.ones(len(tokens), np.float32),
        np.zeros(len(tokens), np.float32),
    )
    written = objective.write(tokens, None, key)
    again = objective.write(tokens, ones, key)
    for one in (written, again):
        fault = fault_of(objective, one, slots)
        _require(fault is None, objective, f"{what}: it {fault}")
    _require(np.array_equal(tokens, before), objective, f"write changed the tokens of {what}")
    same = all(
        np.array_equal(part(written), part(again))
        for part in (lambda one: one.tokens, _targets, _weights)
    )
    _require(
        same,
        objective,
        f"{what} is written otherwise the second time, or with weights that are all 1",
    )
    nothing = objective.write(tokens, zeros, key)
    untrained = _weights(nothing)
    if nothing.targets is None:
        untrained = untrained[1:]
    _require(
        not untrained.any(),
        objective,
        f"{what} has weights 0, but {np.count_nonzero(untrained)} of its tokens count",
    )


def _targets(written: Written) -> Array:
    return np.asarray(written.tokens if written.targets is None else written.targets)


def _weights(written: Written) -> Array:
    """[slots] weight of each target, 0 where there is none."""
    weights = np.ones(len(written.tokens), np.float32)
    if written.weights is not None:
        weights = np.asarray(written.weights)
    return weights if written.targets is None else weights * (_targets(written) != NO_TARGET)


def _require(holds: bool, objective: Objective, problem: str) -> None:
    if not holds:
        raise ConfigError(f"objective {objective.name!r}: {problem}")
