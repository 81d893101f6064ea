"""The user's own code in the trainer: a loss, a function called after each step, an evaluator.

Each is a function or a callable object, given as it is in Python, or by name (`module:function`,
`path/to/file.py:function`) in a run file or in Python. Names and arguments are checked before a run
begins.

    loss(model, row, denominators)      instead of the cross entropy, for each row of this rank
    on_step(model, step, record)        after each step of the optimizer, on every rank
    evaluate(model, ranks)              at its interval of steps, on every rank

A loss or an `on_step` that keeps state between steps has `state_dict()` and
`load_state_dict(state)`, with a flat mapping of names to tensors or JSON values. Each checkpoint
holds rank 0's state; on resume all ranks get it, so the run continues exactly.
"""

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError, StateError
from penstock.core.json_values import JsonMapping, JsonObject, JsonValue
from penstock.learn.training.distributed import Ranks
from penstock.models import LanguageModel, RowTensors
from penstock.models.head import no_loss
from penstock.models.own_code import check_signature, load_own_code
from penstock.plan.loader import Step


class OwnLoss(Protocol):
    """A loss. T slots, D target distances."""

    def __call__(
        self, model: LanguageModel, row: RowTensors, denominators: Sequence[float]
    ) -> Tensor | tuple[Tensor, Mapping[str, float | Tensor]]:
        """One row's share of the step's loss, a scalar with gradient.

        The shares of all rows, over all ranks, add up to the step's loss, so divide by a number of
        the whole step. `denominators` holds, for each target distance, the sum of the loss weights
        of all targets of the step, over all rows and ranks, and 1 where the step has no target.
        `row.targets` [D, T] is −100 at slots without a target; a row may have no target at all, and
        its share may then be a plain 0.

        Args:
            model: `hidden = model(row)` gives [D, T, width], `model.logits(hidden)` [..., vocab].
            row: The row on the model's device; `row.source` is the loader's row.
            denominators: D numbers.

        Returns:
            The share; or (share, figures by name), where each figure is this row's share of the
            step's figure. Figures are summed over rows and ranks and reported as `loss.NAME`; every
            row must give the same names.
        """


class OnStep(Protocol):
    """A function called after each step of the optimizer."""

    def __call__(self, model: LanguageModel, step: Step, record: JsonMapping) -> JsonMapping | None:
        """Look at a step, or change the model.

        Args:
            model: The model after the step.
            step: The step with this rank's rows.
            record: The step's figures, with those of evaluators that ran.

        Returns:
            Figures to add to the record, the same on every rank: numbers, texts, and lists and
            mappings of these; or None.
        """


class OwnEvaluator(Protocol):
    """An evaluation of the model."""

    def __call__(self, model: LanguageModel, ranks: Ranks) -> JsonMapping:
        """Figures by name, the same on every rank: numbers, and texts for people.

        Called without gradients, with the model in evaluation mode. Each rank can do its share,
        `ranks.place.rank` of `ranks.place.size`; `ranks.sum([…])` adds numbers over all ranks,
        which must call it together.
        """


@final
class LossOfOwn:
    """Calls an `OwnLoss` for each row of a step, and sums its figures.

    Raises:
        ConfigError: It does not take these arguments, or has its own weights.
    """

    def __init__(self, loss: Any) -> None:
        self.function = load_own_function(loss, "training.loss", ("model", "row", "denominators"))
        if isinstance(loss, torch.nn.Module) and next(loss.parameters(), None) is not None:
            raise ConfigError(
                "training.loss: has its own weights, which are not trained; put them into the model"
            )
        self._sums: dict[str, Tensor | float] | None = None
        self._names: list[str] = []

    def __call__(
        self, model: LanguageModel, row: RowTensors, denominators: Sequence[float]
    ) -> Tensor:
        """A row's share.

        Raises:
            ConfigError: The function does not return a share, or rows have different figures.
        """
        found = self.function(model, row, denominators)
        share, figures = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if not isinstance(share, Tensor) or share.ndim or not isinstance(figures, Mapping):
            what = (
                f"a tensor of shape {list(share.shape)}"
                if isinstance(share, Tensor)
                else repr(share)
            )
            raise ConfigError(
                f"training.loss: gave {what}; expected a scalar tensor, the row's share of "
                "the step's loss, or (scalar, figures by name)"
            )
        new = {
            name: value.detach().double() if isinstance(value, Tensor) else float(value)
            for name, value in figures.items()
        }
        if self._sums is not None and self._sums.keys() != new.keys():
            raise ConfigError(
                f"training.loss: gave figures {sorted(new)} for one row and "
                f"{sorted(self._sums)} for another; give the same names for each row"
            )
        self._sums = {
            name: value + (self._sums or {}).get(name, 0.0) for name, value in new.items()
        }
        return share

    def try_on(self, model: LanguageModel, row: RowTensors) -> None:
        """Call it once, without changing its state or its sums.

        Raises:
            ConfigError: It does not return a share of a loss.
        """
        before = (
            copy.deepcopy(self.function.state_dict())
            if isinstance(self.function, Stateful)
            else None
        )
        with torch.no_grad():
            self(model, row, (1.0,) * len(model.prediction_weights))
        self._sums = None
        if before is not None and isinstance(self.function, Stateful):
            self.function.load_state_dict(before)

    def pending(self) -> dict[str, Tensor | float]:
        """The step's figures of this rank, as `loss.NAME`; then reset the sums to 0."""
        found, self._sums = self._sums or {}, None
        self._names = [f"loss.{name}" for name in sorted(found)]
        return {f"loss.{name}": found[name] for name in sorted(found)}

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The step's figures, from what `pending` gave, over all ranks."""
        return {name: sums[name] for name in self._names}


def whole_gradients(
    loss: LossOfOwn, model: LanguageModel, row: RowTensors, denominators: Sequence[float]
) -> Tensor:
    """A row's share of a sharded model's loss, whose backward pass reaches every weight.

    Ranks gather and reduce sharded weights together. A loss that does without the model or its head
    on a row without targets would leave the other ranks waiting, or reduce other parameters than
    they (see `no_loss`).
    """
    assert isinstance(model, torch.nn.Module)
    outputs: list[Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            outputs.append(output)

    handle = model.register_forward_hook(keep)
    try:
        share = loss(model, row, denominators)
        hidden = outputs[-1] if outputs else model(row)
    finally:
        handle.remove()
    return share + no_loss(model.narrow_logits, hidden[:, :1]).to(share.dtype)


def load_own_function(given: Any, where: str, parameters: Sequence[str]) -> Any:
    """Load and check the given or named function; a class becomes an instance.

    Raises:
        ConfigError: There is no such code, or it takes other arguments.
    """
    found = load_own_code(given, where)
    if inspect.isclass(found):
        check_signature(found, where, ())
        found = found()
    return check_signature(found, where, parameters)


def load_on_step(given: Any) -> OnStep:
    """Load the function that is called after each step.

    Raises:
        ConfigError: It does not take these arguments.
    """
    found: OnStep = load_own_function(given, "training.on_step", ("model", "step", "record"))
    return found


@final
class EvaluatorOfOwn:
    """An `OwnEvaluator` as the trainer runs it.

    Raises:
        ConfigError: It does not take these arguments.
    """

    def __init__(self, name: str, function: Any, ranks: Ranks) -> None:
        self._where, self._ranks = f"training.evaluators.{name}", ranks
        self._function = load_own_function(function, self._where, ("model", "ranks"))

    def __call__(self, model: LanguageModel, stop: Any = None) -> JsonObject:
        """See `OwnEvaluator`."""
        with torch.no_grad():
            found = self._function(model, self._ranks)
        return own_figures(found, self._where)


def own_figures(found: object, where: str) -> JsonObject:
    """Figures of the user's code as values of JSON: a number of NumPy, or a tensor of one element,
    becomes a number of Python.

    Raises:
        ConfigError: These are no figures by name, or one is no value of JSON; begins with `where`.
    """
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where}: gave {found!r:.80}, expected figures by name")
    return {
        _name_of(name, where): _plain(value, f"{where}: figure {name!r:.40}")
        for name, value in found.items()
    }


def _name_of(name: object, where: str) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"{where}: gave a figure the name {name!r:.40}, expected a text")
    return str(name)


def _plain(value: object, where: str) -> JsonValue:
    if isinstance(value, Mapping):
        return {_name_of(name, where): _plain(one, where) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, where) for one in value]
    if isinstance(value, np.generic | np.ndarray | Tensor) and math.prod(value.shape) == 1:
        return _plain(value.item(), where)
    if value is None or isinstance(value, int | float | str):
        return value
    raise ConfigError(
        f"{where}: is {value!r:.80}, expected a number, a text, or lists and mappings of these"
    )


@runtime_checkable
class Stateful(Protocol):
    """A user's object that changes while it trains, as torch's modules do."""

    def state_dict(self) -> Mapping[str, object]:
        """What is saved: tensors, and values of JSON."""

    def load_state_dict(self, state: Mapping[str, object], /) -> object:
        """Take what was saved."""


class OwnState:
    """State of a loss and of `on_step`, as checkpoints hold it.

    Args:
        parts: Name → object or None.
    """

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = {name: part for name, part in parts.items() if isinstance(part, Stateful)}

    def save(self) -> tuple[dict[str, JsonObject], dict[str, Tensor]]:
        """(JSON values by part, tensors by `part.name`)."""
        values: dict[str, JsonObject] = {}
        tensors: dict[str, Tensor] = {}
        for part, own in self._parts.items():
            state = own.state_dict()
            values[part] = {
                name: value for name, value in state.items() if not isinstance(value, Tensor)
            }
            found = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            tensors |= {
                f"{part}.{name}": value.detach().clone().contiguous()
                for name, value in found.items()
            }
        return values, tensors

    def load(self, values: Mapping[str, JsonMapping], tensors: Mapping[str, Tensor]) -> None:
        """Load into each part the state that `save` returned.

        Raises:
            StateError: The parts with a state are not those that were saved.
        """
        if values.keys() != self._parts.keys():
            then, now = (
                ", ".join(names) or "nothing" for names in (sorted(values), sorted(self._parts))
            )
            raise StateError(
                f"the checkpoint has a state of your own code for {then}, and now {now} has "
                "one; resume with the same loss and on_step"
            )
        for part, own in self._parts.items():
            mine = {
                name.removeprefix(f"{part}."): value
                for name, value in tensors.items()
                if name.startswith(part)
            }
            own.load_state_dict({**values[part], **mine})
