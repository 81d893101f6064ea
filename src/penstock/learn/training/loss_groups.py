"""The parts of a step's loss: by source, by task of the objective, and by target distance.

    loss.source.web     loss.task.R     loss.distance.2

Each is the sum of loss weight × nats over its targets, divided by the sum of their weights, over
all rows, microbatches and ranks of the step. Sources and tasks are measured at distance 1, like
`loss`. A group without targets in a step has no figure for it. With one group only, there are no
group figures.

Cost: one number per slot, computed in the loader's threads, and one small all-reduce per step. The
model does not run a second time, and the loss itself is the same, bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.arrays import Int64, Records
from penstock.learn.training.figure_names import DISTANCE, SOURCE, TASK
from penstock.learn.training.losses import RowLoss
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.torch_tensors import on_device
from penstock.plan.loader import Accompany, Companion, CompanionSource


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedRow:
    """What `LossGroups` makes of a row."""

    groups: Int64
    """[K, T]: group of each slot; one line for sources and one for tasks, each only if there are
    several.
    """
    inner: Any
    """The result of the other companion."""


@final
class LossGroups:
    """A companion of a loader that adds the groups of each row's slots; it may wrap another
    companion.

    With one source and one task, rows carry only the result of the other companion.

    Attributes:
        names: Names of the groups' figures; known once a loader was made with it.
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

        def accompany(row: ModelInput, pieces: Records) -> GroupedRow:
            lines = []
            if by_source:
                lines.append(pieces["source"])
            if by_task:
                lines.append(_tasks(sources, pieces, numbers))
            groups = np.zeros((len(lines), row.sequence_length), np.int64)
            for line, of_documents in zip(groups, lines, strict=True):
                line[: row.num_tokens] = np.repeat(of_documents, pieces["length"])
            return GroupedRow(groups=groups, inner=None if inner is None else inner(row, pieces))

        return accompany


def _tasks(sources: Sequence[CompanionSource], pieces: Records, numbers: dict[str, int]) -> Int64:
    """The group of each piece by its task."""
    found = np.zeros(len(pieces), np.int64)
    for number in np.unique(pieces["source"]).tolist():
        mine = pieces["source"] == number
        found[mine] = [numbers[name] for name in sources[number].tasks(pieces[mine])]
    return found


@final
class LossSums:
    """Sums the loss parts of a step's rows, then gives the step's figures.

    Args:
        names: Names of the groups.
        distances: D, number of target distances.
        device: Device of the model.
    """

    def __init__(self, names: Sequence[str], distances: int, device: torch.device) -> None:
        self._names, self._distances = tuple(names), distances
        self._nats, self._weights = torch.zeros(
            2, distances + len(names), dtype=torch.float64, device=device
        )

    @property
    def num_groups(self) -> int:
        """G, number of groups."""
        return len(self._names)

    def groups(self, row: ModelInput, slots: Int64 | None = None) -> Tensor | None:
        """[K, T] groups of a row, or of joined rows, of a loader with `LossGroups`, on the device;
        None: no groups. `slots`: [t], those that are wanted; None: all.
        """
        made = row.distillation if isinstance(row.distillation, tuple) else (row.distillation,)
        lines = [one.groups for one in made if isinstance(one, GroupedRow)]
        if not self._names or not lines:
            return None
        whole = np.concatenate(lines, axis=1)
        return on_device(whole if slots is None else whole[:, slots], self._nats.device)

    def add(self, found: RowLoss) -> None:
        """Add a row, or a part of a row."""
        if len(self._nats) == 1:
            return
        self._nats[: self._distances] += found.cross_entropy
        self._weights[: self._distances] += found.weights
        if found.groups is not None:
            self._nats[self._distances :] += found.groups[0]
            self._weights[self._distances :] += found.groups[1]

    def pending(self) -> dict[str, Tensor]:
        """Nats and weights of each part as they are on the device, for `StepSums`; then reset the
        sums to 0.
        """
        if len(self._nats) == 1:
            return {}
        # Distance 1 is the loss itself.
        kept = (("nats", self._nats[1:].clone()), ("weights", self._weights[1:].clone()))
        self._nats.zero_()
        self._weights.zero_()
        return {
            f"{name} {what}": value
            for what, values in kept
            for name, value in zip(self._parts, values.unbind(), strict=True)
        }

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Nats over weights of each part that has any weight, of what `pending` gave, summed over
        ranks.
        """
        if len(self._nats) == 1:
            return {}
        return {
            name: sums[f"{name} nats"] / sums[f"{name} weights"]
            for name in self._parts
            if sums[f"{name} weights"] > 0
        }

    @property
    def _parts(self) -> list[str]:
        distances = range(2, self._distances + 1)
        return [*(f"{DISTANCE}{distance}" for distance in distances), *self._names]


def inner_of(row: ModelInput) -> Any:
    """The result of the other companion for a row."""
    return row.distillation.inner if isinstance(row.distillation, GroupedRow) else row.distillation
