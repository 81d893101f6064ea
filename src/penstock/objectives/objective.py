"""What an objective is: it rewrites a document, and says beforehand how many tokens that makes.

The plan sees only lengths, so `measure` answers from (length, key) alone; `write` then makes exactly that many tokens,
or it is a bug that the loader names. Documents are split before they are measured. What follows from the rewritten
tokens is the same for every objective and not its business: targets at all distances, loss weights, positions, packing.

Everything random is drawn from the key, which is of (seed, source, epoch, document, part): so a document is treated in
the same way wherever it is packed, on any number of ranks, and differently in each epoch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import numpy as np

Int64 = np.ndarray[Any, np.dtype[np.int64]]
Keys = np.ndarray[Any, np.dtype[np.uint64]]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Written:
    """A document as the model sees it. n slots."""

    tokens: np.ndarray[Any, np.dtype[np.int32]]
    """[n] token ids. Each is what the position before it predicts, if it has a weight."""
    weights: np.ndarray[Any, np.dtype[np.float32]] | None = None
    """[n] how much each token counts as a target, 0 = it is only read; None = each counts 1. The first token is no
    target whatever its weight: nothing comes before it."""
    prefix: int = 0
    """So many tokens at the beginning see each other in both directions; all others see only what is before them."""
    padding: int = 0
    """So many tokens at the end only fill up what was measured; a document's EOS goes before them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What an objective may know of the data before the first document, for `resolve`."""

    where: str
    """Whose objective it is, for errors: "source 'web'"."""
    tokenizer: Callable[[], Any]
    """Gives the tokenizer of the dataset; raises a ConfigError when it cannot be loaded."""
    sequence_length: int
    """Token slots of a row."""
    longest: int
    """Tokens of the longest document there is; longer than a row where documents will be split."""


@runtime_checkable
class Objective(Protocol):
    """The protocol of objectives. Your own needs these four; make it a frozen dataclass.

    More are used where an objective has them: `resolve(facts: Facts) -> Objective`, called once at set-up, to look up
    token ids and refuse what cannot work; `task(length: int, key: int) -> str`, the name of what is done to a document,
    for inspection, and `task_names: tuple[str, ...]`, all such names, so that metrics can tell tasks apart;
    `added_tokens: tuple[int, ...]`, ids that are put among a document's own, held against the model's vocabulary;
    `bidirectional: bool`, True when a `prefix` may be above 0. (The built-in ones have `program() -> int64 array |
    None` too, which makes the compiled writer do what `write` does.)

    `check_objective` tries whether an objective keeps the promises. Its `repr` goes into a state's digest, so that a
    run is not resumed with another objective: it must say all settings, and be the same in every process.
    """

    @property
    def name(self) -> str:
        """A short name, shown in plans and kept in states."""

    def document_limit(self, sequence_length: int) -> int:
        """The longest document, in tokens, whose measured length fits a row of `sequence_length` for every key."""

    def measure(self, lengths: Int64, keys: Keys) -> Int64:
        """Row slots that each document takes, int64 [documents], from its length and its key alone."""

    def write(
        self,
        tokens: np.ndarray[Any, np.dtype[np.int32]],
        weights: np.ndarray[Any, np.dtype[np.float32]] | None,
        key: int,
    ) -> Written:
        """Rewrite one document.

        Args:
            tokens: [length] its ids, BOS and EOS not among them where all documents of the dataset have those: they
                are put around what is written.
            weights: [length] how much each counts, where its dataset has loss weights; None = all 1.
            key: As given to `measure`.
        """
