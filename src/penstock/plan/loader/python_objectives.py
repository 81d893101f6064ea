"""Rewrites the pieces of a step in Python, where an objective has no compiled form."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Bool, Float32, Float64, Int32, Int64, Records, UInt64
from penstock.core.compiled import address_of
from penstock.plan.loader._fill_kernels import PYTHON_ARRAYS
from penstock.plan.loader._plan_kernels import PIECE
from penstock.plan.loader.rewriting import Rewriting


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PythonOutput:
    """What Python objectives wrote for the P pieces of a step, concatenated; other pieces take no
    space.
    """

    starts: Annotated[Int64, "pieces"]
    """[P] first slot of each piece in `tokens` and `weights`; [0] where no source has a Python
    objective.
    """
    tokens: Annotated[Int32, "slots"]
    weights: Annotated[Float32, "slots"]
    targets: Annotated[Int32, "own_slots"]
    """[slots], or [0] where no objective writes targets of its own."""
    denominators: Annotated[Float64, "pieces"]
    """[P] what each piece of such an objective adds to the denominator; as `starts`."""
    prefixes: Annotated[Int32, "pieces"]
    """[P] prefix of each piece; as `starts`."""
    addresses: Annotated[UInt64, "5"] = field(init=False)
    """Where each array of `PYTHON_ARRAYS` begins: the bytes of one."""

    def __post_init__(self) -> None:
        arrays = [getattr(self, name) for name in PYTHON_ARRAYS.names or ()]
        object.__setattr__(
            self, "addresses", np.array([address_of(array) for array in arrays], np.uint64)
        )


NO_OUTPUT = PythonOutput(
    starts=np.empty(0, np.int64),
    tokens=np.empty(0, np.int32),
    weights=np.empty(0, np.float32),
    targets=np.empty(0, np.int32),
    denominators=np.empty(0),
    prefixes=np.empty(0, np.int32),
)
"""What is written where no source has such an objective."""


def run_python(
    rewritings: Sequence[Rewriting],
    of_sources: Annotated[Bool, "sources"],
    pieces: Annotated[Records, PIECE, "pieces"],
) -> PythonOutput:
    """Rewrite the pieces of sources with an objective that has no compiled form (`program()` is
    absent or None); `of_sources` says which sources have one.
    """
    prefixes = np.zeros(len(pieces), np.int32)
    in_python = of_sources[pieces["source"]]
    lengths = np.where(in_python, pieces["length"], 0)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    total = int(ends[-1]) if len(ends) else 0
    tokens, weights = np.empty(total, np.int32), np.empty(total, np.float32)
    own = any(rewriting.runs_in_python and rewriting.writes_targets for rewriting in rewritings)
    targets, denominators = np.empty(total if own else 0, np.int32), np.zeros(len(pieces))
    for p in np.flatnonzero(in_python).tolist():
        written = rewritings[pieces["source"][p]].write(pieces[p])
        tokens[starts[p] : ends[p]], weights[starts[p] : ends[p]] = written.tokens, written.weights
        prefixes[p] = written.prefix
        if written.targets is not None:
            targets[starts[p] : ends[p]], denominators[p] = written.targets, written.denominator
    return PythonOutput(
        starts=starts,
        tokens=tokens,
        weights=weights,
        targets=targets,
        denominators=denominators,
        prefixes=prefixes,
    )
