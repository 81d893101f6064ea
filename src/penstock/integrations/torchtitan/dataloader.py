"""Steps of a loader as the microbatches that torchtitan's trainer takes, with a state between its
optimiser steps.

torchtitan asks for one microbatch at a time, gradient accumulation steps times pipeline
microbatches of them a step, and saves the dataloader between steps. So the state after the last
microbatch of a step is that after the step; in the middle of a step there is none, and asking for
it is an error.

torchtitan finds documents by positions of 0. Positions of padding rise from 0, so the padding of a
row is one document. It divides by the number of labels of all ranks, which is the step's
denominator where all weights are 0 or 1; others are refused, like everything that labels do not
express (`penstock.integrations.plain_targets`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from penstock.core.errors import ConfigError, MissingExtraError, StateError
from penstock.core.json_values import JsonObject

try:
    import tyro
    from torchtitan.components.dataloader import BaseDataLoader
except ModuleNotFoundError as error:
    raise MissingExtraError("torchtitan") from error

import numpy as np
import torch

from penstock.integrations.plain_targets import PlainTargets
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.requirements import InputRequirements
from penstock.plan.inputs.torch_tensors import as_tensors
from penstock.plan.loader import Step
from penstock.plan.loader.agreement import check_ranks
from penstock.plan.loader.loader import Loader
from penstock.plan.packing import Packing

REQUIREMENTS = InputRequirements(
    asked_by="torchtitan",
    target_distances=1,
    positions=True,
    prefix=False,
    trees=False,
    images=False,
    dtype="int64",
)
"""Loss weights of 0 and 1 are in the targets."""
_TARGETS = PlainTargets("torchtitan")
_STATE = "penstock"


class DataLoader(BaseDataLoader):  # type: ignore[misc]
    """A dataloader of torchtitan that a `penstock.Loader` feeds; torchtitan builds it from its
    `Config`.

    Yields ({"input", "positions"}, labels), each int64 [local_batch_size, seq_len]; labels are
    shifted, −100 = none. A state is the same on all ranks, so a checkpoint resumes on any number of
    them.

    Args:
        config: Which data, and how they are packed.
        dp_world_size: Ranks that get different rows.
        dp_rank: This one.
        seq_len: Slots of a row.
        local_batch_size: Rows of a microbatch.
        **_: What torchtitan passes besides (tokenizer, snapshots); not used.

    Raises:
        ConfigError: The rows of a step do not divide among ranks and microbatches, or labels do not
            express the data.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """What torchtitan's own configuration holds: `config.dataloader`. All else is as for
        `penstock.Loader`.
        """

        dataset: str = "penstock"
        """Not used; it is in torchtitan's logs."""
        rows_per_step: int = 0
        """Rows of an optimiser step over all ranks: torchtitan's `training.global_batch_size`."""
        mixture: Annotated[Any, tyro.conf.Suppress] = None
        """A `penstock.Mixture`, `Source` or mapping of folder → share; None: the dataset at
        `dataset_path`.
        """
        seed: int = 0
        """Seed of orders and keys."""
        packing: Literal["best_fit", "best_fit_decreasing", "next_fit", "concat", "none"] = (
            "best_fit"
        )
        """How documents are put into rows."""
        threads: int = 1
        """Filling threads."""
        prefetch: int = 2
        """Steps that are prepared ahead."""
        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """More arguments of `penstock.Loader`, such as window_rows or pad_id."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: object,
    ) -> None:
        self._size = local_batch_size
        rows, each = config.rows_per_step, dp_world_size * local_batch_size
        if not isinstance(rows, int):
            raise ConfigError(
                "torchtitan: takes as many rows in every step, and dataloader.rows_per_step "
                f"is {rows!r}; give one number"
            )
        if rows < 1 or rows % each:
            raise ConfigError(
                f"torchtitan: dataloader.rows_per_step is {rows}, but {dp_world_size} ranks "
                f"take microbatches of {local_batch_size} rows; set it to "
                f"training.global_batch_size, a multiple of {each}"
            )
        packing: Packing = config.packing
        self.loader = Loader(
            _sources(config),
            sequence_length=seq_len,
            rows_per_step=rows,
            seed=config.seed,
            packing=packing,
            data_parallel=(dp_rank, dp_world_size),
            requirements=REQUIREMENTS,
            threads=config.threads,
            prefetch=config.prefetch,
            **config.options,
        )
        _TARGETS.check(self.loader)
        # Ranks of the other axes read the same rows, so they take part.
        check_ranks(self.loader)
        self._rows = rows // dp_world_size
        self._state: JsonObject = self.loader.state_dict()
        self._left = 0
        """Microbatches of the current step that are not taken yet."""

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Microbatches from the current state on; they end with the loader."""
        for step in self.loader:
            batches = self._microbatches(step)
            for number, batch in enumerate(batches):
                self._left = len(batches) - 1 - number
                if not self._left:
                    self._state = step.resume_state
                yield batch

    def state_dict(self) -> JsonObject:
        """State after the last step; the same on all ranks.

        Raises:
            StateError: Only a part of the step's microbatches was taken.
        """
        if self._left:
            raise StateError(
                "torchtitan saves in the middle of a step of "
                f"{self.loader.settings.rows_per_step} rows: {self._left} microbatches of it "
                "are not trained; set dataloader.rows_per_step to "
                "training.global_batch_size, so that both have the same steps"
            )
        # One text: torchtitan's checkpoints store it as it is, and ask for no keys inside.
        return {_STATE: json.dumps(self._state)}

    def load_state_dict(self, state_dict: JsonObject) -> None:
        """Go on after the step that the state was saved from, on any number of ranks. An empty one
        is the beginning.

        Raises:
            StateError: The state is of other data or settings, or of another dataloader.
        """
        if not state_dict:
            return
        if _STATE not in state_dict:
            raise StateError(
                f"the checkpoint's dataloader state has {', '.join(map(str, state_dict))}, "
                "and is not of penstock's dataloader; exclude it from loading "
                "(checkpoint.exclude_from_loading) to begin with new data"
            )
        self._state, self._left = json.loads(state_dict[_STATE]), 0
        self.loader.load_state_dict(self._state)

    def _microbatches(self, step: Step) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """The step's rows, `local_batch_size` at a time; a short last step is filled up with rows
        without targets.
        """
        arrays = step.arrays()
        lacking = self._rows - len(step)
        fields = {name: arrays[name] for name in ("tokens", "positions")} | {
            "targets": arrays["targets"][:, 0]
        }
        if lacking:
            fields = {name: _filled(name, value, lacking) for name, value in fields.items()}
        tensors = as_tensors(fields, None, False)
        parts = [tensors[name].split(self._size) for name in ("tokens", "positions", "targets")]
        return [
            ({"input": tokens, "positions": places}, labels)
            for tokens, places, labels in zip(*parts, strict=True)
        ]


def _filled(name: str, value: Any, rows: int) -> Any:
    slots = value.shape[1]
    line = {
        "tokens": np.zeros(slots),
        "positions": np.arange(slots),
        "targets": np.full(slots, IGNORE),
    }[name]
    return np.concatenate([value, np.broadcast_to(line.astype(value.dtype), (rows, slots))])


def _sources(config: Any) -> Any:
    if (config.mixture is None) == (config.dataset_path is None):
        raise ConfigError(
            "torchtitan: give dataloader.dataset_path, a prepared dataset, or "
            "dataloader.mixture, not both and not none"
        )
    return config.dataset_path if config.mixture is None else config.mixture
