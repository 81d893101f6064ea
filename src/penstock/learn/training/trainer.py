"""The trainer: a run file's model, data and settings become a run's folder.

    for step in loader:                              the rows of one optimiser step, this rank's
        for row in step: loss(row).backward()        several joined in a pass; divided by the step's denominator
        sum gradients over ranks; one step of the optimizer; metrics, evaluators, a checkpoint at its interval

Guarantees: the loss is the weighted sum over targets divided by the sum of weights, over the whole step and all ranks,
so rows, packing and ranks do not change it. A run that is killed at any moment and resumed gives the losses of an
uninterrupted one, bit for bit on the same machine with the same settings. A checkpoint holds the loader's state after
its own step, regardless of prefetching. Random numbers of a step (dropout, if a model has it) are keyed by (seed, step,
rank); it is off where log-probabilities are compared: preferences, policies, teachers.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError, PenstockError, StateError
from penstock.core.randomness import key_for
from penstock.data.shards.format.images import PROCESSOR_FOLDER
from penstock.data.shards.format.layout import TOKENIZER_FOLDER
from penstock.learn.training.agreement import bits_notices, contents, weights_digest
from penstock.learn.training.checkpoints import (
    OPTIMIZER,
    SHARDED_OPTIMIZER,
    STATE,
    Checkpoint,
    begin,
    damage,
    finish,
    newest_complete,
    read_manifest,
    save_checkpoint,
)
from penstock.learn.training.checks import BitSettings, bit_settings, check_fit, rows_per_pass, trial_row
from penstock.learn.training.continued import CONTINUED, Continued
from penstock.learn.training.continuing import checkpoint_of
from penstock.learn.training.distributed import (
    Ranks,
    load_whole_weights,
    shard,
    sharded_again,
    share_out,
    whole_weights,
    with_gradients,
)
from penstock.learn.training.evaluators import Evaluator, evaluate, scheduled
from penstock.learn.training.held_out_preference import HeldOutPreference
from penstock.learn.training.loss_groups import LossGroups, LossSums, inner_of, means
from penstock.learn.training.losses import hidden_loss, row_loss
from penstock.learn.training.metrics import METRICS, read_metrics
from penstock.learn.training.optimizers import Optimizers
from penstock.learn.training.own import LossOfOwn, OwnState, load_on_step, whole_gradients
from penstock.learn.training.path_training import PathTraining, dropout_notice, require_token_targets
from penstock.learn.training.processes import Interruption
from penstock.learn.training.restoring import matching_weights, take_optimizer
from penstock.learn.training.run_folder import BASE, CHECKPOINTS, MODEL, RUN_FILE
from penstock.learn.training.settings import TrainSettings
from penstock.learn.training.tensor_logs import TensorLogs
from penstock.models import LanguageModel, RowTensors, save_model
from penstock.models.facts import FACTS
from penstock.models.language_model import require_packed_rows
from penstock.models.lora.lora import is_adapter_weight
from penstock.models.ours.experts import Experts
from penstock.models.ours.micro_sequences import backward_in_parts
from penstock.models.own_model import OwnModel
from penstock.models.saving import Base, base_checksum, base_written
from penstock.models.without_dropout import without_dropout
from penstock.plan.inputs import RowSlice
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.loader import Step
from penstock.plan.loader.agreement import check_ranks, check_values
from penstock.plan.loader.loader import Loader
from penstock.plan.loader.standing import what_becomes

if TYPE_CHECKING:
    from penstock.learn.distillation.distiller import Distiller

OWN = "own.safetensors"
"""State tensors of the user's own loss and `on_step`."""
KEPT = (RUN_FILE, CONTINUED, FACTS, TOKENIZER_FOLDER, PROCESSOR_FOLDER)
"""Files and folders of a run that its checkpoints copy."""
PROJECTIONS = "projections.safetensors"
"""Weights of the learned projections between vocabularies."""

Record = dict[str, Any]


@final
@dataclass(slots=True, kw_only=True)
class Totals:
    """Totals of the run so far, over all ranks; saved in checkpoints."""

    tokens: int = 0
    """Tokens without padding."""
    targets: float = 0.0
    """Sum of the loss weights at distance 1."""
    seconds: float = 0.0
    """Seconds of training, without evaluations and checkpoints."""


@final
class Trainer:
    """One run.

    Args:
        run: The run's folder, made by `begin_run`.
        model: The model on this rank's device, with its initial weights.
        loader: This rank's loader, made with the model's requirements.
        settings: How to train.
        steps: Optimizer steps of the whole run.
        ranks: The processes that train together.
        distiller: The teachers; the loader was made with the distiller's companion. None: plain cross entropy.
        groups: The companion that the loader was made with, if the loss is to be reported by source and task.
        evaluators: (interval, evaluator) by name; see `make_evaluators`.
        say: Called with each message for the user, one sentence.

    Raises:
        ConfigError: Model, data and settings do not fit together; see `check_fit`.
        IsolationError: Rows hold several documents, and the model would let them see each other.
    """

    def __init__(
        self,
        *,
        run: Path,
        model: LanguageModel,
        loader: Loader,
        settings: TrainSettings,
        steps: int,
        ranks: Ranks,
        distiller: "Distiller | None" = None,
        groups: LossGroups | None = None,
        evaluators: Mapping[str, tuple[int, Evaluator]] = MappingProxyType({}),
        say: Callable[[str], None] = print,
    ) -> None:
        self.run, self.model, self.loader = run, model, loader
        self.settings, self.steps, self.ranks, self.say = settings, steps, ranks, say
        self.distiller = distiller
        self.totals = Totals()
        self._saved = 0
        self._trained: Step | None = None
        self._told_empty = False
        if ranks.several:
            check_ranks(loader, more={"steps": steps})
        # A part of a document is processed as a document with a past, so parts need the same isolation as rows.
        if loader.needs_isolation or settings.micro_sequences > 1:
            require_packed_rows(model, loader.settings.sequence_length)
        self._paths: PathTraining | None = None
        notices = [] if distiller is None else dropout_notice(model, "teacher")
        if settings.preference is not None or settings.policy is not None:
            if distiller is not None:
                raise ConfigError("teacher and training.preference or training.policy cannot be combined; choose one")
            # Before the model is sharded or compiled: the reference may be a copy of it.
            self._paths = PathTraining(model, loader, settings, ranks.device)
            notices = self._paths.notices
        elif settings.loss is None:
            require_token_targets(loader, "cross entropy")
        for notice in notices:
            say(notice)
        if ranks.several:
            check_values(contents(model, distiller, self._paths, evaluators))
        # Before the model is sharded: the checksum is of whole weights.
        self._base = base_checksum(_module(model).state_dict()) if _base_is_fixed(_module(model)) else None
        if settings.shard:
            shard(model, ranks)
        if settings.compile:
            _compile(model)
        self._own_loss = None if settings.loss is None else LossOfOwn(settings.loss)
        self._on_step = None if settings.on_step is None else load_on_step(settings.on_step)
        own_loss = None if self._own_loss is None else self._own_loss.function
        self._own_state = OwnState({"loss": own_loss, "on_step": self._on_step})
        model.begin_step(seed=settings.seed, number=0, tokens=1)
        check_fit(model, loader, settings, distiller, self._own_loss)
        # A loss of the user's own was tried, which runs the model.
        sharded_again(_module(model))
        self.rows_per_pass = ranks.least(rows_per_pass(model, loader, settings, taught=distiller is not None))
        self._projections = {} if distiller is None else dict(distiller.named_parameters())
        self._optimizers = Optimizers(_module(model), settings.optimizer, beside=self._projections)
        self._bits: BitSettings = bit_settings(
            settings,
            ranks.device,
            ranks.place.size,
            self.rows_per_pass,
            str(model.compute_dtype),
            getattr(self._optimizers, "fused", None),
        )
        for notice in bits_notices(ranks.gather(self.bits)):
            say(notice)
        self._evaluators = dict(evaluators)
        self._owed: dict[str, Any] = {}
        """Evaluators that a signal stopped, and the record of their step without them."""
        for _, evaluator in self._evaluators.values():
            if isinstance(evaluator, HeldOutPreference):
                evaluator.begin(model, settings, self._paths)
        names = () if groups is None else groups.names
        self._parts = LossSums(names, len(model.prediction_weights), ranks.device)
        if ranks.context.size > 1:
            # The model, or the backend of its attention, may refuse it.
            self._part_of(trial_row(loader))

    @property
    def bits(self) -> dict[str, Any]:
        """The settings that change bits."""
        return asdict(self._bits)

    @property
    def reference_parameters(self) -> int:
        """Weights of a frozen reference model that is held besides the model."""
        return 0 if self._paths is None or self._paths.reference is None else self._paths.reference.parameters

    def resume(self, *, writes: bool = True) -> bool:
        """Load the newest complete checkpoint; False if there is none.

        Changed settings that affect only rounding are reported; the run still resumes.

        Args:
            writes: Whether to restore a missing tokenizer of the run; a dry run does not.

        Raises:
            StateError: The data, the plan, the model or the optimizer differ from the checkpoint's, no checkpoint is
                complete although there are some, or ranks find different ones.
        """
        checkpoint = newest_complete(self.run / CHECKPOINTS, say=self.say)
        self._check_found(checkpoint)
        if checkpoint is None:
            self.say(f"there is no checkpoint to go on from; begins at step {self.loader.step + 1}")
            return False
        state = checkpoint.value(STATE)
        raised: list[str] = []
        self.loader.load_state_dict(state["loader"], say=raised.append)
        for sentence in raised:
            self.say(sentence)
        if self.settings.steps is None and (raised or self.loader.known_from):
            # The steps up to an end that is no longer one are not those of the plan.
            self.steps = count_steps(self.loader, self.settings)
        if checkpoint.step > self.steps:
            raise StateError(
                f"{self.run}: the run is already at step {checkpoint.step}, and steps is {self.steps}; steps counts "
                f"from the beginning of the run: to train longer, give more than {checkpoint.step}"
            )
        if (kind := self.settings.optimizer.kind) != state["optimizer"]:
            raise StateError(
                f"{checkpoint.folder}: the optimizer is {kind} now, {state['optimizer']} then; resume with that, or "
                "begin another run with model: from:RUN"
            )
        self._load_distiller(checkpoint, state.get("distillation"))
        kept = checkpoint.tensors(OWN) if (checkpoint.folder / OWN).exists() else {}
        self._own_state.load(state.get("own", {}), kept)
        self._load(checkpoint)
        if self._paths is not None:
            self._paths.check_state(state.get("paths") or {})
        if writes:
            self._restore_tokenizer(checkpoint)
        self.totals = Totals(**state["totals"])
        self._owed = state.get("owed", {})
        for difference in self._bits.differences(state["bits"]):
            self.say(f"resumed with another setting that changes the last bits: {difference}")
        self._report_rate(checkpoint.step, state.get("steps", self.steps))
        complete = f"the run is complete at step {self.steps}; to train longer, give more steps"
        self.say(complete if checkpoint.step == self.steps else f"goes on after step {checkpoint.step}")
        return True

    def take(self, continued: Continued) -> None:
        """Begin with parts of another run's checkpoint. Weights were taken with the model, places with the loader.

        Raises:
            StateError: The checkpoint is gone, or its optimizer is another one.
            ConfigError: Its steps are already as many as this run is to have.
        """
        checkpoint = checkpoint_of(continued)
        for sentence in [*continued.report(), *what_becomes(self.loader.new_plan())]:
            self.say(sentence)
        if "optimizer" in continued.take:
            kind = self.settings.optimizer.kind
            take_optimizer(checkpoint, self._optimizers, kind, [*self._projections], self.say)
        if "schedule" in continued.take:
            self.totals = Totals(**continued.totals)
            self._report_schedule(checkpoint)
        state = checkpoint.value(STATE)
        anew = {"own": "loss and on_step", "distillation": "teachers"}
        if left := [what for name, what in anew.items() if state.get(name)]:
            self.say(f"not taken, so started fresh: the state of {' and of '.join(left)}")

    def _report_schedule(self, checkpoint: Checkpoint) -> None:
        done = checkpoint.step
        if done >= self.steps:
            raise ConfigError(
                f"training.steps is {self.steps}, and the schedule of {checkpoint.folder} goes on after step {done}: "
                f"steps counts from the beginning of that run: give more than {done}, or leave schedule out of "
                "continue_from.take"
            )
        rate = self.settings.optimizer.peak * self.settings.schedule.share(done, self.steps)
        self.say(
            f"schedule: step {done + 1:,} of {self.steps:,} comes next, with learning rate {rate:.3g} "
            f"({self.settings.schedule.shape})"
        )

    def _report_rate(self, done: int, steps_before: int) -> None:
        """Say so if another number of steps changes the learning rate of the next step."""
        share, peak = self.settings.schedule.share, self.settings.optimizer.peak
        if done == self.steps or share(done, self.steps) == share(done, steps_before):
            return
        before, now = peak * share(done - 1, steps_before), peak * share(done, self.steps)
        self.say(
            f"steps was {steps_before}, is {self.steps}: with schedule.shape {self.settings.schedule.shape} the "
            f"learning rate changes from {before:.3g} at step {done} to {now:.3g} at step {done + 1}"
        )

    def _restore_tokenizer(self, checkpoint: Checkpoint) -> None:
        """Restore the run's tokenizer, because later checkpoints copy it from there."""
        kept, restored = checkpoint.folder / TOKENIZER_FOLDER, self.run / TOKENIZER_FOLDER
        if self.ranks.is_first and kept.is_dir() and not restored.exists():
            self.say(f"{restored}: is missing, taken from {checkpoint.folder}")
            shutil.copytree(kept, restored)

    def _check_found(self, checkpoint: Checkpoint | None) -> None:
        """Refuse to start over if there are checkpoints, and ranks that would resume from different steps."""
        step = 0 if checkpoint is None else checkpoint.step
        if self.ranks.differ(step):
            raise StateError(
                f"{self.run}: the ranks find different checkpoints, this one step {step}; the run's folder must be "
                "the same on all of them"
            )
        if checkpoint is None and (there := sorted(p.name for p in (self.run / CHECKPOINTS).glob("step-*"))):
            raise StateError(
                f"{self.run / CHECKPOINTS}: none of {', '.join(there)} is complete; restore one, or take another "
                "folder to begin again"
            )

    def _load(self, checkpoint: Checkpoint) -> None:
        if not isinstance(self.model, OwnModel):
            self._refuse_other_base(checkpoint)
        cure = "resume with the settings it began with, or begin another run with continue_from or model: from:RUN"
        weights = matching_weights(checkpoint, self.model, cure)
        if self.ranks.several:
            check_values({"the weights of the checkpoint": weights_digest(weights)})
        if self.settings.shard:
            load_whole_weights(_module(self.model), weights)
        else:
            _module(self.model).load_state_dict(weights)
        # The saved state and the present one may each be sharded or whole.
        if (checkpoint.folder / SHARDED_OPTIMIZER).exists():
            self._optimizers.fill_state()
            checkpoint.read_into(SHARDED_OPTIMIZER, self._optimizers.state_tensors())
        elif self.settings.shard:
            self._optimizers.fill_state()
            share_out(checkpoint.tensors(OPTIMIZER), self._optimizers.state_tensors())
        else:
            self._optimizers.load_state_tensors(checkpoint.tensors(OPTIMIZER))

    def _refuse_other_base(self, checkpoint: Checkpoint) -> None:
        written = base_written(checkpoint.part(MODEL))
        if written is not None and self._base is not None and written != self._base:
            raise StateError(
                f"{checkpoint.folder}: its LoRA was trained on another model: the weights of the base have changed "
                "since; resume with the model that the run began with, or begin another run with model: from:RUN"
            )

    def _load_distiller(self, checkpoint: Checkpoint, state: dict[str, Any] | None) -> None:
        if (self.distiller is None) != (state is None):
            now, then = ("with a teacher" if one is not None else "without one" for one in (self.distiller, state))
            raise StateError(
                f"{checkpoint.folder}: the run trains {now} now, {then} then; resume with the same section `teacher`, "
                "or begin another run with model: from:RUN"
            )
        if self.distiller is None or state is None:
            return
        for number in self.distiller.others(state):
            self.say(f"resumed with another teacher: the model of teacher.teachers.{number} changed")
        self.distiller.load_state(state)
        if self._projections:
            self.distiller.load_state_dict(checkpoint.tensors(PROJECTIONS), strict=False)

    def train(self) -> Iterator[Record]:
        """Train to the end, yielding a record of figures after each step; SIGTERM saves and stops.

        A record has `step` (steps done), `loss` (nats per target at distance 1), `learning_rate`, `gradient_norm`,
        `tokens`, `targets`, `seconds`, `wait_seconds` (for data). With several prediction heads it also has
        `loss.distance.2` and so on, with several sources `loss.source.NAME`, with several tasks `loss.task.NAME` (see
        `loss_groups`); after an evaluation, its figures as `name/figure`.
        """
        if self._owed:
            with Interruption() as interruption:
                yield from self._make_up(interruption)
            if self._owed:
                self.say("stopped again; resume=True (--resume) goes on")
                return
        if self.loader.step >= self.steps:
            return
        logs = TensorLogs(
            self.run,
            _module(self.model),
            self.settings.tensor_logs,
            done=self.loader.step,
            writes=self.ranks.is_first,
        )
        taught = nullcontext() if self.distiller is None else closing(self.distiller)
        with Interruption() as interruption, closing(logs), taught, self._reports_dropped():
            self._saved = self.loader.step
            for step, record in self._records(interruption, logs):
                done = step.index + 1
                last = done == self.steps
                yield record
                stop = self._asked(interruption)
                if last or stop or done % self.settings.checkpoints.every == 0:
                    self._save(step)
                if stop and (not last or self._owed):
                    by = interruption.name or "another rank"
                    self.say(f"stopped by {by} after step {done}; resume=True (--resume) goes on")
                    return
                if last:
                    return
            if self.loader.step < self.steps:
                if self._saved < self.loader.step:
                    self._save(step)
                raise ConfigError(
                    f"the sources ended after {self.loader.step} steps, before {self.steps}; lower steps. All that was "
                    "trained is saved"
                )

    @contextmanager
    def _reports_dropped(self) -> Iterator[None]:
        """At the end, a line each for the documents that the loader dropped and the parts that it left out, if any."""
        yield
        for what, found, why in (
            ("documents dropped", self.loader.dropped, "empty, or longer than a row with too_long: drop"),
            ("parts left out", self.loader.untrained, "of documents longer than a row, without a target after the cut"),
        ):
            if found:
                counts = ", ".join(f"{count:,} of source {name}" for name, count in found.items())
                self.say(f"{what}: {counts} ({why})")

    def _records(self, interruption: Interruption, logs: TensorLogs) -> Iterator[tuple[Step, Record]]:
        """The trained steps with their records. On an error, the steps trained so far are saved first.

        With several ranks they are not saved: only the rank that reads damaged bytes notices, and saving needs all.
        """
        waited = time.monotonic()
        try:
            steps = iter(self.loader)
            while True:
                with interruption.waiting():
                    step = next(steps, None)
                if step is None:
                    return
                record = self._step(step, time.monotonic() - waited, logs)
                done = step.index + 1
                last = done == self.steps
                record |= self._evaluate(scheduled(self._evaluators, done, last), interruption)
                if self._on_step is not None:
                    record |= self._on_step(self.model, step, MappingProxyType(record)) or {}
                if self._owed:
                    self._owed["record"] = record
                yield step, record
                waited = time.monotonic()
        except PenstockError:
            trained = self._trained
            if trained is not None and self._saved <= trained.index and not self.ranks.several:
                self._save(trained)
                self.say(f"saved after step {trained.index + 1}, before the error")
            raise

    def _evaluate(self, names: Sequence[str], interruption: Interruption) -> Record:
        """Figures of some evaluators; those that a signal stops are owed: saved, and done when the run is resumed."""
        with interruption.waiting():
            asked = partial(self._asked, interruption)
            figures, stopped = evaluate(self._evaluators, names, self.model, asked, self.say)
        self._owed = {"evaluators": stopped} if stopped else {}
        if stopped:
            self.say(f"evaluation stopped, to be done when the run goes on: {', '.join(stopped)}")
        return figures

    def _make_up(self, interruption: Interruption) -> Iterator[Record]:
        """The record of the last step once more, with the evaluations that a signal had stopped."""
        names = [name for name in self._owed.get("evaluators", ()) if name in self._evaluators]
        record = self._owed.get("record")
        if not names or record is None or self._is_made_up(names):
            self._owed = {}
            return
        self.say(f"evaluation of step {self.loader.step} that was stopped: {', '.join(names)}")
        yield record | self._evaluate(names, interruption)

    def _is_made_up(self, names: Sequence[str]) -> bool:
        """Whether the metrics have these evaluations: nothing is saved again after the end of a run."""
        written = self.run / METRICS
        records = read_metrics(written) if self.ranks.is_first and written.exists() else []
        last = records[-1] if records and records[-1]["step"] == self.loader.step else {}
        return self.ranks.agree(bool(last) and all(f"{name}/seconds" in last for name in names))

    def _asked(self, interruption: Interruption) -> bool:
        """Whether any rank was asked to stop."""
        return self.ranks.agree(interruption.name is not None)

    def _step(self, step: Step, waited: float, logs: TensorLogs) -> Record:
        began = time.monotonic()
        torch.manual_seed(key_for(self.settings.seed, "step", step.index, self.ranks.place.rank) >> 1)
        self.model.begin_step(seed=self.settings.seed, number=step.index, tokens=step.num_tokens)
        nats = 0.0
        rows = list(step.joined(self.rows_per_pass))
        if self.distiller is not None:
            self.distiller.begin([inner_of(row) for row in rows], self.ranks.sum)
        if self._paths is not None:
            self._paths.begin(rows, step, self.ranks)
        with logs.watch(step.index + 1):
            for row in rows:
                nats += self._backward(row, step.loss_denominators)
            if self.settings.shard:
                # A block that drew another mixer leaves some without, and an optimizer steps those with zeros.
                list(with_gradients(self.model.parameters()))
            else:
                self.ranks.sum_gradients([*self.model.parameters(), *self._projections.values()])
        rate = self.settings.optimizer.peak * self.settings.schedule.share(step.index, self.steps)
        # Nothing may be saved until this step's loss and gradients are known to be finite.
        self._trained = None
        norm = float(self._optimizers.step(rate))
        [nats] = self.ranks.sum([nats])
        seconds = time.monotonic() - began
        self.totals.tokens += step.num_tokens
        self.totals.targets += step.loss_denominator
        self.totals.seconds += seconds + waited
        # Shares of other losses are already divided.
        by_token = self._own_loss is None and self._paths is None
        loss = nats / max(step.loss_denominator, 1e-12) if by_token else nats
        if not (loss - loss == 0 and norm - norm == 0):
            raise StateError(
                f"step {step.index}: loss {loss}, gradient norm {norm}: not finite. Nothing of this step is saved; "
                "lower the learning rate, or look at `loader.explain` of the step, then resume (--resume, resume=True)"
            )
        taught = {} if self.distiller is None else self.distiller.end(self.ranks.sum, loss)
        own = {} if self._own_loss is None else self._own_loss.take(self.ranks)
        if self._paths is not None:
            own |= self._paths.end(self.ranks, step)
        self._trained = step
        if not any(step.loss_denominators) and not self._told_empty:
            self._told_empty = True
            self.say(
                f"step {step.index + 1} has no target on any rank: its loss is 0, and only momentum and weight decay "
                "change the weights; `penstock plan` counts such rows, and this is not said again"
            )
        return {
            "step": step.index + 1,
            "loss": loss,
            **means(self._parts.take(self.ranks.sum)),
            **taught,
            **own,
            **self.model.end_step(self.ranks.sum),
            "learning_rate": rate,
            "gradient_norm": norm,
            "tokens": self.totals.tokens,
            "targets": self.totals.targets,
            "seconds": seconds,
            "wait_seconds": waited,
        }

    def _backward(self, row: ModelInput, denominators: Sequence[float]) -> float:
        """Add a row's gradients; return its sum of weight × nats at distance 1, or its share of the user's loss."""
        if self._own_loss is not None:
            return self._backward_own(self._own_loss, row, denominators)
        if self._paths is not None:
            return self._paths.backward(row)
        z_loss, parts = self.settings.z_loss, self.settings.micro_sequences
        tensors, groups = self._part_of(row) if self.ranks.context.size > 1 else self._whole(row)
        count = self._parts.num_groups
        if self.distiller is not None:
            # The student is compared with its teachers, which have no dropout.
            with without_dropout(self.model):
                return self._backward_taught(self.distiller, tensors, inner_of(row), denominators, groups)
        if parts == 1:
            found = row_loss(self.model, tensors, denominators, z_loss=z_loss, groups=groups, num_groups=count)
            found.loss.backward()
            self._parts.add(found)
            return float(found.cross_entropy[0])
        sums: list[float] = []
        size = row.sequence_length // parts
        begins = iter(range(row.sequence_length - size, -1, -size))

        def loss_of(hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
            # Parts run from last to first.
            begin = next(begins)
            found = hidden_loss(
                self.model.logits, hidden, targets, weights, denominators,
                z_loss=z_loss, distance_weights=self.model.prediction_weights,
                groups=None if groups is None else groups[:, begin : begin + size], num_groups=count,
            )  # fmt: skip
            self._parts.add(found)
            sums.append(float(found.cross_entropy[0]))
            return found.loss

        backward_in_parts(self.model, tensors, parts, loss_of)
        return sum(sums)

    def _whole(self, row: ModelInput) -> tuple[RowTensors, Tensor | None]:
        """A row, and the groups of its slots."""
        return self.model.tensors(row, self.settings.attention), self._parts.groups(row)

    def _part_of(self, row: ModelInput) -> tuple[RowTensors, Tensor | None]:
        """This rank's part of a row that several share, and the groups of its slots."""
        context, groups = self.ranks.context, self._parts.groups(row)
        part = RowSlice.of(replace(row, distillation=None), context.rank, context.size)
        if groups is not None:
            # Slots past the end of the row have no targets, so any group does.
            groups = groups[:, np.minimum(part.index, row.sequence_length - 1)]
        return self.model.slice_tensors(part, self.ranks.context_group, self.settings.attention), groups

    def _backward_own(self, loss: LossOfOwn, row: ModelInput, denominators: Sequence[float]) -> float:
        given = row if row.distillation is None else replace(row, distillation=inner_of(row))
        tensors = self.model.tensors(given, self.settings.attention)
        # A step without a target has denominators of 0, by which a loss must be able to divide.
        denominators = [one or 1.0 for one in denominators]
        if self.settings.shard:
            share = whole_gradients(loss, self.model, tensors, denominators)
        else:
            share = loss(self.model, tensors, denominators)
        if share.requires_grad:
            share.backward()
        return float(share.detach())

    def _backward_taught(
        self,
        distiller: "Distiller",
        tensors: RowTensors,
        seen: Any,
        denominators: Sequence[float],
        groups: Tensor | None,
    ) -> float:
        """Like `_backward`, with the teachers' part of the loss; the model runs once."""
        hidden = self.model(tensors)
        factor = distiller.settings.cross_entropy
        # With factor 0 the cross entropy is only reported.
        with nullcontext() if factor else torch.no_grad():
            found = hidden_loss(
                self.model.logits, hidden, tensors.targets, tensors.loss_weights, denominators,
                z_loss=self.settings.z_loss, distance_weights=self.model.prediction_weights,
                groups=groups, num_groups=self._parts.num_groups,
            )  # fmt: skip
        self._parts.add(found)
        taught = distiller.row_loss(self.model.logits, hidden[0], tensors.targets[0], seen)
        (taught + factor * found.loss if factor else taught).backward()
        return float(found.cross_entropy[0])

    def _save(self, step: Step) -> None:
        own, own_tensors = self._own_state.save()
        state = {
            "loader": step.resume_state,
            "place": step.place,
            "totals": asdict(self.totals),
            "bits": asdict(self._bits),
            "steps": self.steps,
            "optimizer": self.settings.optimizer.kind,
            "distillation": None if self.distiller is None else self.distiller.state(),
            **({} if self._paths is None else {"paths": self._paths.state()}),
            **({"own": own} if own else {}),
            **({"owed": self._owed} if self._owed else {}),
        }
        name = SHARDED_OPTIMIZER if self.settings.shard else OPTIMIZER
        weights = whole_weights(_module(self.model)) if self.settings.shard else None
        parts = {
            MODEL: lambda path: self._save_model(path, weights),
            name: self._optimizers.state_tensors(),
            STATE: state,
            **({PROJECTIONS: self._projections} if self._projections else {}),
            **({OWN: own_tensors} if own_tensors else {}),
            # So that a copied checkpoint still carries its run file, tokenizer and processor.
            **{kept: partial(_copy, self.run / kept) for kept in KEPT},
        }
        save_checkpoint(self.run / CHECKPOINTS, step.index + 1, parts, keep=self.settings.checkpoints.keep)
        self._saved = step.index + 1

    def _save_model(self, path: Path, weights: dict[str, Tensor] | None) -> None:
        """Write the model of a checkpoint; of LoRA only LoRA, next to a base that all checkpoints of the run share."""
        if self._base is None:
            save_model(self.model, path, weights)
            return
        base = self.run / BASE
        if (read_manifest(base) or {}).get("checksum") != self._base or damage(base, contents=False) is not None:
            partial_base = begin(base)
            save_model(self.model, partial_base, weights, with_lora=False)
            finish(partial_base, base, {"checksum": self._base})
        save_model(self.model, path, weights, base=Base(folder=f"../../../{BASE}", checksum=self._base))


def _base_is_fixed(model: torch.nn.Module) -> bool:
    """Whether a model has LoRA, and nothing else of it is trained or changes."""
    if getattr(model, "lora", None) is None:
        return False
    weights = {weight.data_ptr() for weight in model.parameters()}
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    # A buffer that is saved may change in training, such as a running mean; a tied weight has two names.
    kept = [name for name, value in model.state_dict().items() if value.data_ptr() not in weights]
    return all(is_adapter_weight(name) for name in trained) and not kept


def _copy(source: Path, target: Path) -> None:
    """Copy a file or folder if it exists. Only rank 0 checks that, because all ranks must pass the same parts."""
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copyfile(source, target)


def _compile(model: LanguageModel) -> None:
    """Compile each block.

    Attention is a single operation in it. What differs from row to row, the number of documents, becomes dynamic when
    it first changes: with `dynamic=False`, torch would compile a block again for each number. How many tokens an expert
    gets differs too much to be foreseen: experts stay as they are.
    """
    blocks = getattr(model, "blocks", None)
    if blocks is None:
        raise ConfigError("training.compile: this model has no `blocks`; train it without compile")
    for block in blocks:
        for module in block.modules():
            if isinstance(module, Experts):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        block.compile()


def _module(model: LanguageModel) -> torch.nn.Module:
    assert isinstance(model, torch.nn.Module)
    return model


def count_steps(loader: Loader, settings: TrainSettings) -> int:
    """Steps of the run: those of the settings, or until the sources end.

    Raises:
        ConfigError: Steps are not set and a source never ends, or the warm-up is longer than the run.
    """
    if settings.steps is not None:
        return settings.steps
    endless = [source.name for source in loader.mixture.sources if source.max_epochs is None]
    if endless:
        raise ConfigError(
            f"training.steps is missing, and source {endless[0]!r} never ends; give steps, or max_epochs of each source"
        )
    steps = loader.count_steps()
    settings.schedule.check_length(steps)
    return steps
