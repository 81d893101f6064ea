"""transformers' Trainer fed by a loader: data, loss and resuming are penstock's, everything else is
unchanged.

Guarantees: every rank trains its own rows of each step, and the loss is that of the whole step,
whatever the number of ranks and microbatches. A checkpoint holds the state after its own optimiser
step, so a resumed run sees exactly the batches of an uninterrupted run, without skipping through
batches at the start.

transformers is extended by inheritance. The overridden methods are the documented ones, except
`_save_checkpoint`: the state must be in the folder before the checkpoint counts as complete.
"""

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint, speed_metrics

from penstock.core.errors import ConfigError, StateError
from penstock.core.json_values import JsonObject
from penstock.integrations.huggingface.batches import (
    DENOMINATOR,
    TARGETS,
    WEIGHTS,
    Microbatches,
    batch,
)
from penstock.integrations.huggingface.checks import (
    check_ranks,
    fit_batches,
    loaders,
    refuse_arguments,
    refuse_endless,
    refuse_model,
    refuse_prefixes,
    refuse_small_vocabulary,
    refuse_wrong_kinds,
    require_loaders,
    warn_if_documents_mix,
)
from penstock.integrations.huggingface.losses import known_ids, weighted_loss
from penstock.models.isolation.check import check_isolation as run_isolation_check
from penstock.models.theirs.image_rows import has_vision
from penstock.plan.loader import Step
from penstock.plan.loader.loader import Loader

LOADER_FILE = "penstock_loader.json"
"""File next to `trainer_state.json` in every checkpoint: the loader's state after the checkpoint's
last step.
"""


if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class LoaderTraining(_Trainer):  # type: ignore[misc]
    """What a trainer does with a loader: set-up, state, checkpoints, evaluation. Stands before one
    of transformers' or TRL's among the bases.
    """

    control: Any
    loader: Loader

    def _take(
        self,
        model: Any,
        args: Any,
        kwargs: dict[str, Any],
        loaders_given: tuple[Any, Any],
        rows_per_microbatch: int,
        trainer: type,
    ) -> None:
        """Check what was given, and fit `args` (a copy of the user's) and `kwargs` to the loader.

        Args:
            model: As given.
            args: Is changed.
            kwargs: Is changed.
            loaders_given: The loader, and the loader or loaders for evaluation.
            rows_per_microbatch: Rows of one forward pass.
            trainer: The class of transformers or TRL whose arguments `kwargs` are.
        """
        loader, eval_loader = loaders_given
        refuse_wrong_kinds(model, args)
        refuse_arguments(args, kwargs, eval_loader is not None, trainer)
        self.loader = loader = require_loaders(loader, eval_loader)
        refuse_prefixes({"loader": loader, **loaders(eval_loader)})
        self._asked_max_steps: int = args.max_steps
        refuse_endless(args, loader, eval_loader)
        fit_batches(args, loader, rows_per_microbatch, eval_loader is not None)
        args.ignore_data_skip = True
        self._states: dict[int, JsonObject] = {}
        kwargs["callbacks"] = [*(kwargs.get("callbacks") or ()), _RunProgress()]
        kwargs["eval_dataset"] = (
            kwargs.pop("eval_dataset", None) if eval_loader is None else eval_loader
        )

    def _check_model(self, eval_loader: Any, check_isolation: bool) -> None:
        """Check loaders and model against each other, once the trainer has its model."""
        every = {"loader": self.loader, **loaders(eval_loader)}
        check_ranks(self, [*every.values()])
        refuse_small_vocabulary(self.model, [*every.values()])
        self._known_ids = known_ids(self.model)
        self._eval_states = {id(each): each.state_dict() for each in loaders(eval_loader).values()}
        if self.args.process_index == 0:
            warn_if_documents_mix(every)
        blanks = [each.blank_image for each in every.values() if each.blank_image is not None]
        if blanks and not has_vision(self.model):
            raise ConfigError(
                "Trainer: documents of the loader have images, which this model does not "
                "read; take a model with vision (AutoModelForImageTextToText), or prepare "
                "without them (media: drop)"
            )
        packed = [each.settings.sequence_length for each in every.values() if each.needs_isolation]
        if check_isolation and packed:
            run_isolation_check(
                self.model, sequence_length=max(packed), images=blanks[0] if blanks else None
            )

    # -- training
    # ----------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: object = None, *args: object, **kwargs: object) -> Any:
        """Like `transformers.Trainer.train`; when resuming, the loader continues after the
        checkpoint's last step.

        Raises:
            StateError: The checkpoint holds no loader state, or one for other data or settings.
        """
        trained = 0
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        if isinstance(resume_from_checkpoint, (str, Path)):
            trained = _restore(self.loader, Path(resume_from_checkpoint))
            resume_from_checkpoint = str(resume_from_checkpoint)
        if self._asked_max_steps <= 0:
            self.args.max_steps = self.loader.count_steps() - self.loader.step + trained
            if not self.args.max_steps:
                raise ConfigError(
                    "Trainer: the loader is at its end; make a new one, or give its sources "
                    "more max_epochs"
                )
        self._states = {trained: self.loader.state_dict()}
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _steps(self) -> Iterator[Step]:
        """The loader's steps up to max_steps; stops the training of transformers when there are no
        more.
        """
        for step in self.loader if self.state.global_step < self.state.max_steps else ():
            # A checkpoint may be written before or after this step's update: keep the state of
            # either.
            done = self.state.global_step
            self._states = {done: self._states[done], done + 1: step.resume_state}
            yield step
        self.control.should_training_stop = True

    def _save_checkpoint(
        self, model: object, trial: object, *args: object, **kwargs: object
    ) -> None:
        if self.args.should_save:
            folder = (
                Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            )
            folder.mkdir(parents=True, exist_ok=True)
            (folder / LOADER_FILE).write_text(json.dumps(self._states[self.state.global_step]))
        super()._save_checkpoint(model, trial, *args, **kwargs)

    # -- evaluation
    # ----------------------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: object = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Weighted loss per token over one pass of `eval_loader`: exact, over all ranks,
        reproducible.
        """
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]
        if not isinstance(chosen, Loader):
            metrics: dict[str, float] = super().evaluate(
                eval_dataset, ignore_keys, metric_key_prefix
            )
            return metrics
        start = time.time()
        losses, tokens, rows, steps = self._evaluate_loader(chosen)
        metrics = {
            f"{metric_key_prefix}_loss": losses / max(tokens, 1e-30),
            f"{metric_key_prefix}_tokens": tokens,
        }
        metrics.update(speed_metrics(metric_key_prefix, start, num_samples=rows, num_steps=steps))
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _evaluate_loader(self, loader: Loader) -> tuple[float, float, int, int]:
        """(sum of weighted losses, sum of weights, rows, steps) of a pass, over all ranks."""
        state = self._eval_states.setdefault(id(loader), loader.state_dict())
        loader.load_state_dict(state)
        model = self._wrap_model(self.model, training=False)
        if not self.accelerator._models and model is self.model:
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
        model.eval()
        total = torch.zeros(1, dtype=torch.float64, device=self.args.device)
        tokens, rows, steps, size = 0.0, 0, 0, self.args.per_device_train_batch_size
        with torch.no_grad(), self.compute_loss_context_manager():
            for step in loader:
                for begin in range(0, len(step), size):
                    inputs = batch(
                        step[begin : begin + size], 1.0, self.args.device, self._known_ids
                    )
                    targets, weights, _ = (
                        inputs.pop(name) for name in (TARGETS, WEIGHTS, DENOMINATOR)
                    )
                    total += weighted_loss(model(**inputs).logits, targets, weights, 1.0)
                tokens, rows, steps = tokens + step.loss_denominator, rows + len(step), steps + 1
        losses = float(self.accelerator.gather(total).sum())
        return losses, tokens, rows * loader.data_parallel.size, steps


class Trainer(LoaderTraining, transformers.Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` with `loader=` instead of `train_dataset=`.

    ```python
    loader = ps.Loader(mixture, sequence_length=4096, rows_per_step=64, data_parallel=ps.DataParallel.from_env())
    trainer = ps.huggingface.Trainer(model, TrainingArguments("run", max_steps=1000), loader=loader)
    trainer.train(resume_from_checkpoint=True)
    ```

    Gradient accumulation follows from the loader: rows of a step on this rank, divided by
    `rows_per_microbatch`. `max_steps` is required if the loader never ends; otherwise its steps are
    counted by default. The mixture's `max_epochs` sets the passes over the data; `num_train_epochs`
    is not used. Settings of `TrainingArguments` about datasets, columns, samplers and data loaders
    have no effect.

    Args:
        model: A causal language model of transformers.
        args: Is copied, not changed.
        loader: The training data, made for this rank.
        eval_loader: The data for `evaluate`: a loader that ends, or several by name.
        rows_per_microbatch: Rows of one forward pass.
        check_isolation: Refuse a model that lets documents of one row see each other. Skipped for a
            loader with attention="row", where they are meant to.
        **kwargs: As for `transformers.Trainer`.

    Raises:
        ConfigError: Settings contradict each other; the message says what is used.
        DistributedError: The loader's rank or number of ranks is not that of this process.
        IsolationError: The model lets documents of one row see each other.
    """  # noqa: E501

    def __init__(
        self,
        model: object = None,
        args: object = None,
        *,
        loader: Loader | None = None,
        eval_loader: Loader | dict[str, Loader] | None = None,
        rows_per_microbatch: int = 1,
        check_isolation: bool = True,
        **kwargs: object,
    ) -> None:
        args = transformers.TrainingArguments() if args is None else copy.copy(args)
        self._take(
            model, args, kwargs, (loader, eval_loader), rows_per_microbatch, transformers.Trainer
        )
        super().__init__(model, args, **kwargs)
        refuse_model(self.model)
        self._check_model(eval_loader, check_isolation)

    def get_train_dataloader(self) -> Any:
        """Microbatches of the loader from its current place; Accelerate has nothing to shard."""
        rows = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return Microbatches(
            self._steps,
            rows,
            self.args.per_device_train_batch_size,
            self.args.device,
            self._known_ids,
        )

    def training_step(
        self, model: object, inputs: dict[str, object], num_items_in_batch: object = None
    ) -> torch.Tensor:
        """Forward and backward of one microbatch."""
        # The loss is already divided by the denominator of the whole step; do not divide by
        # microbatches again.
        self.current_gradient_accumulation_steps = 1
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """This microbatch's part of the step's loss, times the ranks over which gradients will be
        averaged.
        """
        if TARGETS not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        targets, weights, denominator = (
            inputs.pop(name) for name in (TARGETS, WEIGHTS, DENOMINATOR)
        )
        outputs = model(**inputs)
        loss = (
            weighted_loss(outputs.logits, targets, weights, denominator)
            * self.loader.data_parallel.size
        )
        return (loss, outputs) if return_outputs else loss


class _RunProgress(transformers.TrainerCallback):  # type: ignore[misc]
    """Sets `epoch` in the logs to the fraction of max_steps done; it would restart from 0 on
    resuming otherwise.
    """

    def on_step_end(self, args: object, state: Any, control: Any, **kwargs: object) -> None:
        """Called by transformers after each optimiser step."""
        state.epoch = state.global_step / state.max_steps


def _restore(loader: Loader, folder: Path) -> int:
    """Load a checkpoint's loader state; returns its number of optimiser steps."""
    try:
        state = json.loads((folder / LOADER_FILE).read_text())
        trained = int(json.loads((folder / "trainer_state.json").read_text())["global_step"])
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise StateError(
            f"{folder} cannot be resumed ({error}): it was not saved by penstock's Trainer, "
            "or saving was interrupted; resume from another checkpoint, or start a new run "
            "with a model loaded from this one"
        ) from error
    loader.load_state_dict(state)
    return trained
