"""What a step's loss is made of: by source, by what the objective did to a document, and by target distance.

    loss.source.web     loss.task.R     loss.distance.2

Each is the sum of loss weight × nats over its targets in the whole step, divided by the sum of their weights, over all
rows, microbatches and ranks. Sources and tasks are kept apart at distance 1, as `loss` is. A group without targets in a
step has no figure there, and there are none where there is one group only.

Costs: a number a slot, made in the loader's threads, and one small all-reduce a step. The model runs no second time,
and the loss itself is computed as without them, bit for bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.inputs import ModelInput
from penstock.loader import SOURCE as SOURCE_COLUMN
from penstock.loader import Accompany, Companion, CompanionSource
from penstock.sampling import LENGTH
from penstock.training.figure_names import DISTANCE, SOURCE, TASK
from penstock.training.losses import RowLoss

Int64 = np.ndarray[Any, np.dtype[np.int64]]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedRow:
    """What `LossGroups` makes of a row."""

    groups: Int64
    """[K, T]: group of each slot, a line for sources and one for tasks, of those that there are several of."""
    inner: Any
    """What the other companion made of it."""


@final
class LossGroups:
    """A companion of a loader that tells the groups of each row's slots, around another companion or none.

    Where there is nothing to tell apart, rows have what the other companion makes, as without this one.

    Attributes:
        names: Of the groups, as figures are called; known once a loader was made with it.
    """

    def __init__(self, inner: Companion | None = None) -> None:
        self._inner = inner
        self.names: tuple[str, ...] = ()

    def begin(self, sources: Sequence[CompanionSource]) -> Accompany:
        """See `Companion`."""
        inner = None if self._inner is None else self._inner.begin(sources)
        by_source = [f"{SOURCE}{source.name}" for source in sources] if len(sources) > 1 else []
        tasks = list(dict.fromkeys(name for source in sources for name in source.task_names))
        by_task = [f"{TASK}{name}" for name in tasks] if len(tasks) > 1 else []
        self.names = (*by_source, *by_task)
        numbers = {name: len(by_source) + number for number, name in enumerate(tasks)}
        if not self.names:
            return inner or (lambda row, pieces: None)

        def accompany(row: ModelInput, pieces: Int64) -> GroupedRow:
            lines = []
            if by_source:
                lines.append(pieces[:, SOURCE_COLUMN])
            if by_task:
                lines.append(_tasks(sources, pieces, numbers))
            groups = np.zeros((len(lines), row.sequence_length), np.int64)
            for line, of_documents in zip(groups, lines, strict=True):
                line[: row.num_tokens] = np.repeat(of_documents, pieces[:, LENGTH])
            return GroupedRow(groups=groups, inner=None if inner is None else inner(row, pieces))

        return accompany


def _tasks(sources: Sequence[CompanionSource], pieces: Int64, numbers: dict[str, int]) -> Int64:
    """The group of each piece by its task."""
    found = np.zeros(len(pieces), np.int64)
    for number in np.unique(pieces[:, SOURCE_COLUMN]).tolist():
        mine = pieces[:, SOURCE_COLUMN] == number
        found[mine] = [numbers[name] for name in sources[number].tasks(pieces[mine])]
    return found


@final
class LossSums:
    """Adds up a step's rows, then gives its figures.

    Args:
        names: Of the groups.
        distances: D, target distances.
        device: The model's.
    """

    def __init__(self, names: Sequence[str], distances: int, device: torch.device) -> None:
        self._names, self._distances = tuple(names), distances
        self._nats, self._weights = torch.zeros(2, distances + len(names), dtype=torch.float64, device=device)

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self._names)

    def groups(self, row: ModelInput) -> Tensor | None:
        """[K, T] of a row that a loader with `LossGroups` made, on the device; None where there are none."""
        if not self._names or not isinstance(row.distillation, GroupedRow):
            return None
        return torch.from_numpy(row.distillation.groups).to(self._nats.device)

    def add(self, found: RowLoss) -> None:
        """Add a row, or a part of one."""
        if len(self._nats) == 1:
            return
        self._nats[: self._distances] += found.cross_entropy
        self._weights[: self._distances] += found.weights
        if found.groups is not None:
            self._nats[self._distances :] += found.groups[0]
            self._weights[self._distances :] += found.groups[1]

    def take(self, total: Callable[[Sequence[float]], list[float]]) -> dict[str, tuple[float, float]]:
        """(nats, weights) by name, over all ranks, of those that have weights; the sums begin again at 0.

        Args:
            total: Sums over ranks; called on all of them or none.
        """
        if len(self._nats) == 1:
            return {}
        # Distance 1 is the loss itself.
        numbers = total([*self._nats[1:].tolist(), *self._weights[1:].tolist()])
        self._nats.zero_()
        self._weights.zero_()
        names = [*(f"{DISTANCE}{distance}" for distance in range(2, self._distances + 1)), *self._names]
        pairs = zip(numbers[: len(names)], numbers[len(names) :], strict=True)
        return {name: pair for name, pair in zip(names, pairs, strict=True) if pair[1] > 0}


def inner_of(row: ModelInput) -> Any:
    """What the other companion made of a row."""
    return row.distillation.inner if isinstance(row.distillation, GroupedRow) else row.distillation


def means(sums: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Nats over weights."""
    return {name: nats / weights for name, (nats, weights) in sums.items()}
