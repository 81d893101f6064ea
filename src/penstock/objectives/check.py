"""Does an objective keep its promises? The contract, tried on random documents; for your own objectives' tests.

Costs some hundred calls of `write`.
"""

from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.objectives.objective import Objective, Written

LENGTHS = (1, 2, 3, 5, 8, 21, 64, 300)


def check_objective(objective: Objective, *, sequence_length: int = 512, vocab_size: int = 1000, seed: int = 0) -> None:
    """Try the contract of `Objective` on an objective that is resolved (or needs no resolving).

    It must say itself in its repr; measure whole numbers from 1 on, the same for a document alone and among others;
    write just as many tokens, the same each time, without touching what it is given; keep every measured length
    of documents up to its `document_limit` within the row; and train nothing of a document whose weights are all 0.

    Args:
        objective: Yours.
        sequence_length: Token slots of a row.
        vocab_size: Ids of the random documents are below it.
        seed: Of the random documents and keys.

    Raises:
        ConfigError: The first promise that is broken, and by which document.
    """
    numbers = np.random.default_rng(seed)
    if " at 0x" in repr(objective):
        raise ConfigError(f"{objective.name}: repr must say its settings, found {objective!r}; use a frozen dataclass")
    limit = objective.document_limit(sequence_length)
    _due(limit >= 1, objective, f"document_limit({sequence_length}) is {limit}, so it can use no document")
    lengths = np.array([*(length for length in LENGTHS if length < limit), limit] * 8, np.int64)
    keys = numbers.integers(0, 2**64, len(lengths), np.uint64)
    measured = np.asarray(objective.measure(lengths.copy(), keys.copy()))
    _due(
        measured.shape == lengths.shape and measured.dtype.kind in "iu",
        objective,
        f"measure must give a whole number for each of {len(lengths)} documents, gave {measured.dtype} "
        f"{list(measured.shape)}",
    )
    for length, key, slots in zip(lengths.tolist(), keys, measured.tolist(), strict=True):
        what = f"a document of {length} tokens with key {key}"
        _due(1 <= slots <= sequence_length, objective, f"{what} is measured as {slots} in rows of {sequence_length}")
        alone = np.asarray(objective.measure(np.array([length]), np.array([key]))).tolist()
        _due(alone == [slots], objective, f"{what} is measured as {slots} among others and as {alone} alone")
        _check_writing(objective, numbers.integers(0, vocab_size, length, np.int32), int(key), slots, what)


def _check_writing(
    objective: Objective, tokens: np.ndarray[Any, np.dtype[np.int32]], key: int, slots: int, what: str
) -> None:
    before, ones, zeros = tokens.copy(), np.ones(len(tokens), np.float32), np.zeros(len(tokens), np.float32)
    written = objective.write(tokens, None, key)
    _check_written(objective, written, slots, what)
    again = objective.write(tokens, ones, key)
    _check_written(objective, again, slots, what)
    _due(np.array_equal(tokens, before), objective, f"write changed the tokens of {what}")
    same = np.array_equal(written.tokens, again.tokens) and np.array_equal(_weights(written), _weights(again))
    _due(same, objective, f"{what} is written otherwise the second time, or with weights that are all 1")
    untrained = _weights(objective.write(tokens, zeros, key))
    _due(
        not untrained[1:].any(),
        objective,
        f"{what} has weights 0, but {np.count_nonzero(untrained)} of its tokens count",
    )


def _check_written(objective: Objective, written: Written, slots: int, what: str) -> None:
    tokens, weights = np.asarray(written.tokens), _weights(written)
    _due(tokens.shape == (slots,), objective, f"{what} is measured as {slots} and written as {list(tokens.shape)}")
    _due(
        tokens.dtype.kind in "iu" and tokens.min() >= 0 and tokens.max() < 2**31,
        objective,
        f"{what} is written as {tokens.dtype} between {tokens.min()} and {tokens.max()}, due are ids",
    )
    _due(weights.shape == (slots,) and bool(np.isfinite(weights).all()), objective, f"{what} has weights {weights!r}")
    bidirectional = bool(getattr(objective, "bidirectional", False))
    _due(
        0 <= written.prefix <= slots and (bidirectional or not written.prefix),
        objective,
        f"{what} has a prefix of {written.prefix} in {slots} slots, with bidirectional = {bidirectional}",
    )


def _weights(written: Written) -> np.ndarray[Any, Any]:
    return np.ones(len(written.tokens), np.float32) if written.weights is None else np.asarray(written.weights)


def _due(holds: bool, objective: Objective, problem: str) -> None:
    if not holds:
        raise ConfigError(f"objective {objective.name!r}: {problem}")
