"""Arrays of a step that are made when they are asked for, and what the next steps are filled with.

Most consumers take the same few arrays of every step, in one dtype. So a loader starts with tokens
and targets in int32, derives what else is asked for from the plan, and fills it in the steps after
that. Values and dtypes never depend on this: only where and when the work is done.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import pairwise
from typing import Annotated, Any, final

import numpy as np

from penstock.core.arrays import Array, Int64, Records
from penstock.plan.inputs.model_input import StepFields
from penstock.plan.inputs.requirements import InputRequirements
from penstock.plan.loader._plan_kernels import PIECE

DERIVED = frozenset({"loss_weights", "positions", "document_ids"})
"""Fields that can follow from the plan alone."""

_LATER: Any = object()
"""Stands for a value that was not asked for yet."""
_UNMADE = dict.fromkeys(StepFields.__annotations__, _LATER)


@final
class StepArrays(MutableMapping[str, Any]):
    """The fields of `StepFields` by name, each made when it is first asked for; `dict(…)` of it has
    all.

    Args:
        fields: All of them; None: each is made by `make`.
        make: Makes a field by its name.
    """

    __slots__ = ("_make", "_values")

    def __init__(
        self,
        fields: Mapping[str, Any] | None = None,
        make: Callable[[str], Any] = lambda name: None,
    ) -> None:
        self._values, self._make = dict(_UNMADE if fields is None else fields), make

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        if value is _LATER:
            value = self._values[name] = self._make(name)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return StepArrays, (dict(self),)


@final
class Demand:
    """What was asked of a loader's steps so far. It only grows, so that a consumer that takes turns
    between two ways does not change it each time.

    Args:
        need: What rows must have. A dtype that it names is kept.
        derivable: Fields that need not be filled until they are asked for.
    """

    __slots__ = ("_fixed", "wanted")

    def __init__(self, need: InputRequirements, derivable: frozenset[str]) -> None:
        self._fixed = need.dtype is not None
        required = {name for name in DERIVED if getattr(need, name)}
        self.wanted: tuple[str, frozenset[str]] = (
            need.dtype or "int32",
            frozenset(required - derivable),
        )
        """The dtype of tokens, targets and positions, and the fields of `DERIVED` that the next
        steps are filled with; replaced as a whole, since other threads read it.
        """

    def add(self, field: str) -> None:
        """A field that was not filled was asked for."""
        integer, fields = self.wanted
        self.wanted = (integer, fields | {field})

    def widen(self) -> None:
        """A consumer takes int64."""
        integer, fields = self.wanted
        if integer != "int64" and not self._fixed:
            self.wanted = ("int64", fields)


def derived(
    name: str,
    pieces: Annotated[Records, PIECE, "pieces"],
    row_starts: Annotated[Int64, "rows+1"],
    shape: tuple[int, int],
) -> Array:
    """A field of `DERIVED` as the kernel fills it, where all of a document counts 1: loss weights,
    float32 [R, D, T]; positions or document ids, int32 [R, T].

    Args:
        name: Of the field.
        pieces: Of the step.
        row_starts: The pieces of each row, as in a window.
        shape: (target distances D, slots T).
    """
    distances, slots = shape
    rows, is_weights = len(row_starts) - 1, name == "loss_weights"
    out: Array = (
        np.zeros((rows, distances, slots), np.float32)
        if is_weights
        else np.empty((rows, slots), np.int32)
    )
    for row, (first, last) in enumerate(pairwise(row_starts.tolist())):
        of_row, slot = pieces[first:last], 0
        # The padding is one document more.
        lengths = [*of_row["length"].tolist(), slots - int(of_row["length"].sum())]
        ahead = (of_row["total"] - of_row["begin"]).tolist()
        for number, length in enumerate(lengths):
            if name == "positions":
                out[row, slot : slot + length] = np.arange(length)
            elif name == "document_ids":
                out[row, slot : slot + length] = number
            elif number < len(ahead):
                for distance in range(1, distances + 1):
                    known = max(min(length, ahead[number] - distance), 0)
                    out[row, distance - 1, slot : slot + known] = 1
            slot += length
    return out
