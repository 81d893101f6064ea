"""Pieces that an objective in Python rewrites, laid end to end for the compiled fill to copy.

The weights of a whole step's targets are its loss denominator, so every rank rewrites the pieces of all ranks: an
objective that is to run on many ranks deserves to be compiled, as the built-in ones are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from penstock.compiled import address_of
from penstock.loader._kernels import SOURCE
from penstock.loader.rewriting import Rewriting
from penstock.sampling import LENGTH


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staged:
    """What Python wrote. P pieces of a step."""

    starts: np.ndarray[Any, np.dtype[np.int64]]
    """[P] first place of each piece in the arrays below; [0] where no source of the mixture is staged."""
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    weights: np.ndarray[Any, np.dtype[np.float32]]
    prefixes: np.ndarray[Any, np.dtype[np.int32]]
    """[P] prefix of each piece; as `starts`."""
    addresses: np.ndarray[Any, np.dtype[np.uint64]] = field(init=False)
    """[4] where each of the arrays above begins."""

    def __post_init__(self) -> None:
        arrays = (self.starts, self.tokens, self.weights, self.prefixes)
        object.__setattr__(self, "addresses", np.array([address_of(array) for array in arrays], np.uint64))


_NOTHING = Staged(
    starts=np.empty(0, np.int64),
    tokens=np.empty(0, np.int32),
    weights=np.empty(0, np.float32),
    prefixes=np.empty(0, np.int32),
)


def stage(rewritings: Sequence[Rewriting], pieces: np.ndarray[Any, np.dtype[np.int64]]) -> Staged:
    """Rewrite the pieces of sources whose objective has no program."""
    if not any(rewriting.is_staged for rewriting in rewritings):
        return _NOTHING
    prefixes = np.zeros(len(pieces), np.int32)
    staged = np.array([rewriting.is_staged for rewriting in rewritings])[pieces[:, SOURCE]]
    ends = np.cumsum(np.where(staged, pieces[:, LENGTH], 0))
    starts = ends - np.where(staged, pieces[:, LENGTH], 0)
    total = int(ends[-1]) if len(ends) else 0
    tokens, weights = np.empty(total, np.int32), np.empty(total, np.float32)
    for p in np.flatnonzero(staged).tolist():
        written = rewritings[pieces[p, SOURCE]].write(pieces[p])
        tokens[starts[p] : ends[p]], weights[starts[p] : ends[p]] = written.tokens, written.weights
        prefixes[p] = written.prefix
    return Staged(starts=starts, tokens=tokens, weights=weights, prefixes=prefixes)
