"""transformers' Trainer, fed by a loader: its data, its loss and its resuming are penstock's, the rest is untouched.

Guarantees: every rank trains its own rows of each step, and the loss is that of the whole step whatever the number of
ranks and microbatches; a checkpoint holds the state after its own optimiser step, so a resumed run sees exactly the
batches that the uninterrupted one saw, with no batch skipped over at start.

Inheritance is how transformers wants to be extended; the overridden methods are the documented ones, except
`_save_checkpoint`, because the state must be in the folder before the checkpoint counts as complete.
"""

import copy
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint, speed_metrics

from penstock.errors import ConfigError, DistributedError, StateError
from penstock.integrations.huggingface.batches import (
    DENOMINATOR,
    TARGETS,
    WEIGHTS,
    Microbatches,
    batch,
    count_steps,
    is_finite,
)
from penstock.integrations.huggingface.losses import weighted_loss
from penstock.integrations.isolation import check_isolation as run_isolation_check
from penstock.loader import Loader, Step

LOADER_FILE = "penstock_loader.json"
"""In every checkpoint, beside `trainer_state.json`: the loader's state after the checkpoint's last step."""

_DEFAULT_BATCH_SIZE = 8
"""What `TrainingArguments` says when nobody has said anything."""

_NOT_OURS = {
    "train_dataset": "pass loader=",
    "data_collator": "the loader packs rows by itself",
    "compute_loss_func": "the loss is weighted and divided by the step's denominator; override compute_loss instead",
}
_UNFIT = {
    "label_smoothing_factor": "the loss has no label smoothing",
    "auto_find_batch_size": "the batch is the loader's; set rows_per_microbatch by hand",
}


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` with `loader=` instead of `train_dataset=`.

    ```python
    loader = ps.Loader(mixture, sequence_length=4096, rows_per_step=64, data_parallel=ps.DataParallel.from_env())
    trainer = ps.huggingface.Trainer(model, TrainingArguments("run", max_steps=1000), loader=loader)
    trainer.train(resume_from_checkpoint=True)
    ```

    Gradient accumulation follows from the loader: rows of a step on this rank, divided by `rows_per_microbatch`.
    `max_steps` must be given when the loader never ends; when it ends and `max_steps` is not given, its steps are
    counted. Passes over the data are the mixture's `max_epochs`; `num_train_epochs` is not used. Settings of
    `TrainingArguments` about datasets, columns, samplers and data loaders have no effect.

    Args:
        model: A causal language model of transformers.
        args: Is copied, not changed.
        loader: What is trained on; made for this rank.
        eval_loader: What `evaluate` measures: a loader that ends, or several by name.
        rows_per_microbatch: Rows of one forward pass.
        check_isolation: Refuse a model that lets documents of one row see each other.
        **kwargs: As for `transformers.Trainer`.

    Raises:
        ConfigError: Settings contradict each other; the message says what is used.
        DistributedError: The loader's rank or number of ranks is not that of this process.
        IsolationError: The model lets documents of one row see each other.
    """

    control: Any

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        loader: Loader,
        eval_loader: Loader | dict[str, Loader] | None = None,
        rows_per_microbatch: int = 1,
        check_isolation: bool = True,
        **kwargs: Any,
    ) -> None:
        args = transformers.TrainingArguments() if args is None else copy.copy(args)
        _refuse_arguments(args, kwargs)
        self.loader = loader
        self._asked_max_steps: int = args.max_steps
        _refuse_endless(args, loader, eval_loader)
        _fit_batches(args, loader, rows_per_microbatch)
        args.ignore_data_skip = True
        self._states: dict[int, dict[str, Any]] = {}
        kwargs["callbacks"] = [*(kwargs.get("callbacks") or ()), _ProgressOfTheRun()]
        super().__init__(
            model, args, eval_dataset=kwargs.pop("eval_dataset", None) if eval_loader is None else eval_loader, **kwargs
        )
        _check_ranks(self, [loader, *_loaders(eval_loader).values()])
        _refuse_model(self.model)
        self._eval_states = {id(each): each.state_dict() for each in _loaders(eval_loader).values()}
        # Alone at the beginning of its row, a document has nothing before it that it could see.
        if check_isolation and any(
            each.settings.packing != "none" for each in (loader, *_loaders(eval_loader).values())
        ):
            run_isolation_check(self.model)

    # -- training ----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As `transformers.Trainer.train`; when resuming, the loader goes on after the checkpoint's last step.

        Raises:
            StateError: The checkpoint holds no loader state, or one of other data or settings.
        """
        trained = 0
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        if isinstance(resume_from_checkpoint, (str, Path)):
            trained = _restore(self.loader, Path(resume_from_checkpoint))
            resume_from_checkpoint = str(resume_from_checkpoint)
        if self._asked_max_steps <= 0:
            self.args.max_steps = count_steps(self.loader) - self.loader.step + trained
            if not self.args.max_steps:
                raise ConfigError(
                    "Trainer: the loader is at its end; make a new one, or give its sources more max_epochs"
                )
        self._states = {trained: self.loader.state_dict()}
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Microbatches of the loader, from where it stands; Accelerate has nothing to shard."""
        rows = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return Microbatches(self._steps, rows, self.args.per_device_train_batch_size, self.args.device)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one microbatch."""
        # The loss is divided by the denominator of the whole step already, not to be divided by microbatches again.
        self.current_gradient_accumulation_steps = 1
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This microbatch's part of the step's loss, times the ranks over which gradients will be averaged."""
        if TARGETS not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        targets, weights, denominator = (inputs.pop(name) for name in (TARGETS, WEIGHTS, DENOMINATOR))
        outputs = model(**inputs)
        loss = weighted_loss(outputs.logits, targets, weights, denominator) * self.loader.data_parallel.size
        return (loss, outputs) if return_outputs else loss

    def _steps(self) -> Iterator[Step]:
        """The loader's steps; transformers is told when there are no more, and none come once max_steps are done."""
        for step in self.loader if self.state.global_step < self.state.max_steps else ():
            # A checkpoint may be written before or after this step's update: keep the state of either.
            done = self.state.global_step
            self._states = {done: self._states[done], done + 1: step.resume_state}
            yield step
        self.control.should_training_stop = True

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / LOADER_FILE).write_text(json.dumps(self._states[self.state.global_step]))
        super()._save_checkpoint(model, trial, *args, **kwargs)

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss per token (weighted) over one pass of `eval_loader`: exact, over all ranks, the same every time."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]
        if not isinstance(chosen, Loader):
            metrics: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            return metrics
        start = time.time()
        losses, tokens, rows, steps = self._evaluate_loader(chosen)
        metrics = {f"{metric_key_prefix}_loss": losses / max(tokens, 1e-30), f"{metric_key_prefix}_tokens": tokens}
        metrics.update(speed_metrics(metric_key_prefix, start, num_samples=rows, num_steps=steps))
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
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
                    inputs = batch(step[begin : begin + size], 1.0, self.args.device)
                    targets, weights, _ = (inputs.pop(name) for name in (TARGETS, WEIGHTS, DENOMINATOR))
                    total += weighted_loss(model(**inputs).logits, targets, weights, 1.0)
                tokens, rows, steps = tokens + step.loss_denominator, rows + len(step), steps + 1
        losses = float(self.accelerator.gather(total).sum())
        return losses, tokens, rows * loader.data_parallel.size, steps


class _ProgressOfTheRun(transformers.TrainerCallback):  # type: ignore[misc]
    """`epoch` in the logs: the part of max_steps that is done, which after resuming would start from 0 again."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by transformers after each optimiser step."""
        state.epoch = state.global_step / state.max_steps


def _loaders(eval_loader: Loader | dict[str, Loader] | None) -> Mapping[str, Loader]:
    if eval_loader is None:
        return {}
    return eval_loader if isinstance(eval_loader, dict) else {"eval_loader": eval_loader}


def _restore(loader: Loader, folder: Path) -> int:
    """Load a checkpoint's loader state; returns the optimiser steps done by then."""
    file = folder / LOADER_FILE
    if not file.is_file():
        raise StateError(
            f"{folder} has no {LOADER_FILE}: it was not saved by penstock's Trainer, or its writing was cut short; "
            "resume from another checkpoint, or train() anew with a model loaded from it"
        )
    loader.load_state_dict(json.loads(file.read_text()))
    return int(json.loads((folder / "trainer_state.json").read_text())["global_step"])


def _refuse_arguments(args: Any, kwargs: dict[str, Any]) -> None:
    for name, cure in _NOT_OURS.items():
        if kwargs.get(name) is not None:
            raise ConfigError(f"Trainer: {name} does not go with a loader: {cure}")
    for name, cure in _UNFIT.items():
        if getattr(args, name, None):
            raise ConfigError(f"Trainer: {name}={getattr(args, name)!r} does not go with a loader: {cure}")


def _refuse_endless(args: Any, loader: Loader, eval_loader: Loader | dict[str, Loader] | None) -> None:
    if args.max_steps <= 0 and not is_finite(loader):
        raise ConfigError(
            "Trainer: the loader never ends (a source has no max_epochs) and max_steps is not given; set "
            "TrainingArguments(max_steps=…), or Source(max_epochs=…) for every source"
        )
    for name, each in _loaders(eval_loader).items():
        if each is loader:
            raise ConfigError(f"Trainer: {name} is the loader that is trained on; make another of it")
        if not is_finite(each):
            raise ConfigError(f"Trainer: {name} never ends; set max_epochs=1 for every source of it")


def _fit_batches(args: Any, loader: Loader, rows_per_microbatch: int) -> None:
    """Derive batch size and gradient accumulation from the loader; refuse what says otherwise."""
    begin, end = loader.data_parallel.rows(loader.settings.rows_per_step)
    rows = end - begin
    if rows_per_microbatch < 1 or rows % rows_per_microbatch:
        raise ConfigError(
            f"Trainer: rows_per_microbatch={rows_per_microbatch} does not divide this rank's {rows} rows of a step"
        )
    for name, default, used, why in (
        ("per_device_train_batch_size", _DEFAULT_BATCH_SIZE, rows_per_microbatch, "rows_per_microbatch"),
        ("gradient_accumulation_steps", 1, rows // rows_per_microbatch, f"{rows} rows a step / rows_per_microbatch"),
    ):
        asked = getattr(args, name)
        if asked not in (default, used):
            raise ConfigError(
                f"Trainer: {name} is {asked}, but {used} is used ({why}); leave it out, or make the loader's "
                "rows_per_step and rows_per_microbatch fit"
            )
        setattr(args, name, used)


def _check_ranks(trainer: Any, loaders: list[Loader]) -> None:
    args = trainer.args
    if args.n_gpu > 1:
        raise DistributedError(
            f"one process sees {args.n_gpu} GPUs, and the Trainer would split each row among them; start one process "
            "a GPU with torchrun, or show it one with CUDA_VISIBLE_DEVICES"
        )
    for name in ("get_cp_size", "get_sp_size"):
        if getattr(trainer, name, lambda: 1)() > 1:
            raise DistributedError(
                "context and sequence parallelism cut rows, which penstock's Trainer does not support"
            )
    tensor_ranks = getattr(trainer.model, "tp_size", None) or 1
    size, rank = args.world_size // tensor_ranks, args.process_index // tensor_ranks
    for loader in loaders:
        found = loader.data_parallel
        if (found.rank, found.size) != (rank, size):
            raise DistributedError(
                f"the loader was made for rank {found.rank} of {found.size}, this process is data-parallel rank {rank} "
                f"of {size}; make it with data_parallel=({rank}, {size}) or, under torchrun, DataParallel.from_env()"
            )


def _refuse_model(model: Any) -> None:
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ConfigError(
            "Trainer: the model wants an auxiliary loss for its routers (config.output_router_logits), which the loss "
            "of a step does not include; set it to False"
        )
