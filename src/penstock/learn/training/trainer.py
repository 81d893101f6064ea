"""The trainer: a run file's model, data and settings become a run's folder.

    for step in loader:                              the rows of one optimiser step, this rank's
        for row in step: loss(row).backward()        several joined in a pass; divided by the step's denominator
        sum gradients over ranks; one step of the optimizer; metrics, evaluators, a checkpoint at
        its interval

Guarantees: the loss is the weighted sum over targets divided by the sum of weights, over the whole
step and all ranks, so rows, packing and ranks do not change it. A run that is killed at any moment
and resumed gives the losses of an uninterrupted one, bit for bit on the same machine with the same
settings. A checkpoint holds the loader's state after its own step, regardless of prefetching.
Random numbers of a step (dropout, if a model has it) are keyed by (seed, step, rank); it is off
where log-probabilities are compared: preferences, policies, teachers.
"""  # noqa: E501

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from penstock.core.errors import ConfigError, PenstockError, StateError
from penstock.core.json_values import JsonObject
from penstock.core.randomness import key_for
from penstock.learn.training.agreement import bits_notices, contents
from penstock.learn.training.checks import check_fit, trial_row
from penstock.learn.training.computing import numbers_of
from penstock.learn.training.continued import Continued
from penstock.learn.training.determinism import bit_settings
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.early_stopping import EarlyStopping
from penstock.learn.training.evaluators import Evaluator, evaluate, scheduled
from penstock.learn.training.gradient_sums import GradientSums
from penstock.learn.training.held_out_preference import HeldOutPreference
from penstock.learn.training.loss_groups import LossGroups, LossSums, inner_of
from penstock.learn.training.memory import check_room, no_room, rows_per_pass
from penstock.learn.training.metrics import METRICS, read_metrics
from penstock.learn.training.optimizers import Optimizers
from penstock.learn.training.own import LossOfOwn, OwnState, load_on_step, own_figures
from penstock.learn.training.path_checks import require_token_targets
from penstock.learn.training.path_training import PathTraining, dropout_notice
from penstock.learn.training.preparing import prepare
from penstock.learn.training.processes import Interruption, settled_objects
from penstock.learn.training.row_gradients import RowGradients
from penstock.learn.training.run_state import (
    RunState,
    Totals,
    module_of,
    reports_dropped,
)
from penstock.learn.training.saving import Saving, copy_size
from penstock.learn.training.settings import TrainSettings
from penstock.learn.training.sharding import GradientSync, sharded_again
from penstock.learn.training.step_sums import StepSums
from penstock.learn.training.tensor_logs import TensorLogs
from penstock.learn.training.utilisation import Utilisation
from penstock.models import LanguageModel
from penstock.models.language_model import require_packed_rows
from penstock.models.later_weights import LaterWeights
from penstock.plan.loader import Step
from penstock.plan.loader.agreement import check_ranks, check_values
from penstock.plan.loader.loader import Loader

if TYPE_CHECKING:
    from penstock.learn.distillation.distiller import Distiller

Record = dict[str, Any]


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
        distiller: The teachers; the loader was made with the distiller's companion. None: plain
            cross entropy.
        groups: The companion that the loader was made with, if the loss is to be reported by source
            and task.
        evaluators: (interval, evaluator) by name; see `make_evaluators`.
        say: Called with each message for the user, one sentence.
        later: Where the weights of a model come from that has none yet; None: it has them.

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
        later: LaterWeights | None = None,
    ) -> None:
        self.run, self.model, self.loader = run, model, loader
        self.settings, self.ranks, self.say = settings, ranks, say
        self.distiller = distiller
        self._trained: Step | None = None
        self._to_stop = False
        self._told_empty = False
        if ranks.several:
            check_ranks(loader, more={"steps": steps})
        # A part of a document is processed as a document with a past, so parts need the same
        # isolation as rows.
        if loader.needs_isolation or settings.micro_sequences > 1:
            require_packed_rows(model, loader.settings.sequence_length)
        self._paths: PathTraining | None = None
        notices = [] if distiller is None else dropout_notice(model, "teacher")
        if settings.preference is not None or settings.policy is not None:
            if distiller is not None:
                raise ConfigError(
                    "teacher and training.preference or training.policy cannot be combined; "
                    "choose one"
                )
            # Before the model is sharded or compiled: the reference may be a copy of it.
            self._paths = PathTraining(model, loader, settings, ranks.device)
            notices = self._paths.notices
        elif settings.loss is None:
            require_token_targets(loader, "cross entropy")
        for notice in notices:
            say(notice)
        if ranks.several:
            check_values(contents(model, distiller, self._paths, evaluators, later))
        length = loader.settings.sequence_length
        check_room(model, settings, ranks.device, ranks.place.size, length)
        self.rows_per_pass = ranks.least(
            rows_per_pass(model, loader, settings, taught=distiller is not None)
        )
        base = prepare(model, self._references(), settings, ranks, later)
        self._own_loss = None if settings.loss is None else LossOfOwn(settings.loss)
        self._on_step = None if settings.on_step is None else load_on_step(settings.on_step)
        own_loss = None if self._own_loss is None else self._own_loss.function
        own_state = OwnState({"loss": own_loss, "on_step": self._on_step})
        model.begin_step(seed=settings.seed, number=0, tokens=1)
        check_fit(model, loader, settings, distiller, self._own_loss)
        # A loss of the user's own was tried, which runs the model.
        sharded_again(model)
        projections = {} if distiller is None else dict(distiller.named_parameters())
        optimizers = Optimizers(
            module_of(model), settings.optimizer, beside=projections, together=ranks.several
        )
        bits = bit_settings(
            settings,
            ranks.device,
            ranks.place.size,
            self.rows_per_pass,
            numbers_of(model),
            optimizers.fused,
        )
        self.state = RunState(
            folder=run,
            model=model,
            loader=loader,
            settings=settings,
            ranks=ranks,
            say=say,
            steps=steps,
            distiller=distiller,
            projections=projections,
            paths=self._paths,
            optimizers=optimizers,
            own_state=own_state,
            bits=bits,
            base=base,
            waiting=EarlyStopping(settings.evaluators),
            saving=Saving.of(
                settings.checkpoints,
                ranks.device,
                say,
                copies=copy_size(
                    model,
                    sharded=bool(settings.shard),
                    only_trained=base is not None and not settings.shard,
                ),
                group=ranks.saving_group,
            ),
        )
        for notice in bits_notices(ranks.gather(self.bits)):
            say(notice)
        self.evaluators = dict(evaluators)
        for _, evaluator in self.evaluators.values():
            if isinstance(evaluator, HeldOutPreference):
                evaluator.begin(model, settings, self._paths)
        names = () if groups is None else groups.names
        self._utilisation = Utilisation(model, ranks.device, share=ranks.context.size)
        # Parts of a row, or a loss of the user's own, may run backward several times; ranks that
        # share rows speak to each other during the backward pass.
        early = settings.micro_sequences * ranks.context.size == 1 and self._own_loss is None
        trained = [*model.parameters(), *projections.values()]
        self._sync = GradientSync(model, GradientSums(trained, several=ranks.several, early=early))
        self._gradients = RowGradients(
            model,
            settings,
            ranks,
            sums=LossSums(names, len(model.prediction_weights), ranks.device),
            distiller=distiller,
            paths=self._paths,
            own_loss=self._own_loss,
        )
        if ranks.context.size > 1:
            # The model, or the backend of its attention, may refuse it.
            self._gradients.part_of(trial_row(loader))

    def _references(self) -> list[LanguageModel]:
        """Models that run next to the one that is trained, and are compared with it."""
        reference = None if self._paths is None else self._paths.reference
        return [] if reference is None or reference.frozen is None else [reference.frozen]

    @property
    def bits(self) -> JsonObject:
        """The settings that change bits."""
        return asdict(self.state.bits)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.state.steps

    @property
    def totals(self) -> Totals:
        """Totals of the run so far, over all ranks."""
        return self.state.totals

    def resume(self, *, writes: bool = True) -> bool:
        """Load the newest complete checkpoint; False if there is none. See `RunState.resume`."""
        return self.state.resume(writes=writes)

    def take(self, continued: Continued) -> None:
        """Begin with parts of another run's checkpoint. See `RunState.take`."""
        self.state.take(continued)

    @property
    def reference_parameters(self) -> int:
        """Weights of a frozen reference model that is held besides the model."""
        return (
            0
            if self._paths is None or self._paths.reference is None
            else self._paths.reference.parameters
        )

    def train(self) -> Iterator[Record]:
        """Train to the end, yielding a record of figures after each step; SIGTERM saves and stops.

        A record has `step` (steps done), `loss` (nats per target at distance 1), `learning_rate`,
        `gradient_norm`, `tokens`, `targets`, `seconds`, `wait_seconds` (for data). With several
        prediction heads it also has `loss.distance.2` and so on, with several sources
        `loss.source.NAME`, with several tasks `loss.task.NAME` (see `loss_groups`); after an
        evaluation, its figures as `name/figure`.
        """
        if self.state.owed:
            with Interruption() as interruption:
                yield from self._make_up(interruption)
            if self.state.owed:
                self.say("stopped again; resume=True (--resume) goes on")
                return
        if (over := self.state.waiting.over) is not None:
            self.say(over)
        if self.loader.step >= self.steps or over is not None:
            return
        logs = TensorLogs(
            self.run,
            module_of(self.model),
            self.settings.tensor_logs,
            done=self.loader.step,
            writes=self.ranks.is_first,
        )
        taught = nullcontext() if self.distiller is None else closing(self.distiller)
        with (
            Interruption() as interruption,
            settled_objects(wanted=self.ranks.several or self.ranks.device.type != "cpu"),
            self.state.saving,
            closing(logs),
            taught,
            reports_dropped(self.loader, self.say),
        ):
            self.state.saved = self.loader.step
            for step, record in self._records(interruption, logs):
                done = step.index + 1
                last = done == self.steps
                yield record
                stop = self._to_stop
                if not self.ranks.several:
                    stop = self._wants_to_stop(interruption)
                over = self.state.waiting.over
                ends = last or stop or over is not None
                if ends or done % self.settings.checkpoints.every == 0:
                    self.state.save(step)
                if ends:
                    self.state.saving.wait()
                if stop and (not last or self.state.owed):
                    by = interruption.name or "another rank"
                    self.say(f"stopped by {by} after step {done}; resume=True (--resume) goes on")
                    return
                if over is not None:
                    self.say(over)
                if last or over is not None:
                    return
            if self.loader.step < self.steps:
                if self.state.saved < self.loader.step:
                    self.state.save(step)
                self.state.saving.wait()
                raise ConfigError(
                    f"the sources ended after {self.loader.step} steps, before {self.steps}; "
                    "lower steps. All that was trained is saved"
                )

    def _records(
        self, interruption: Interruption, logs: TensorLogs
    ) -> Iterator[tuple[Step, Record]]:
        """The trained steps with their records. On an error, the steps trained so far are saved
        first.

        With several ranks they are not saved: only the rank that reads damaged bytes notices, and
        saving needs all.
        """
        waited = time.monotonic()
        try:
            steps = iter(self.loader)
            while True:
                with interruption.waiting():
                    step = next(steps, None)
                if step is None:
                    return
                record = self._step(step, time.monotonic() - waited, logs, interruption)
                done = step.index + 1
                last = done == self.steps
                if names := scheduled(self.evaluators, done, last):
                    record |= self._evaluate(names, interruption)
                    self._to_stop = self._asked(interruption)
                if self._on_step is not None:
                    found = self._on_step(self.model, step, MappingProxyType(record))
                    record |= {} if found is None else own_figures(found, "training.on_step")
                if self.state.owed:
                    self.state.owed["record"] = record
                yield step, record
                waited = time.monotonic()
        except torch.OutOfMemoryError as error:
            raise no_room(error, self.settings, self.rows_per_pass) from error
        except PenstockError:
            trained = self._trained
            if trained is not None and self.state.saved <= trained.index and not self.ranks.several:
                self.state.save(trained)
                self.state.saving.wait()
                self.say(f"saved after step {trained.index + 1}, before the error")
            raise

    def _evaluate(self, names: Sequence[str], interruption: Interruption) -> Record:
        """Figures of some evaluators; those that a signal stops are owed: saved, and done when the
        run is resumed.
        """
        with interruption.waiting():
            asked = partial(self._asked, interruption)
            figures, stopped = evaluate(self.evaluators, names, self.model, asked, self.say)
        self.state.waiting.see(self.loader.step, figures)
        self.state.owed = {"evaluators": stopped} if stopped else {}
        if stopped:
            self.say(f"evaluation stopped, to be done when the run goes on: {', '.join(stopped)}")
        return figures

    def _make_up(self, interruption: Interruption) -> Iterator[Record]:
        """The record of the last step once more, with the evaluations that a signal had stopped."""
        names = [name for name in self.state.owed.get("evaluators", ()) if name in self.evaluators]
        record = self.state.owed.get("record")
        if not names or record is None or self._is_made_up(names):
            self.state.owed = {}
            return
        self.say(f"evaluation of step {self.loader.step} that was stopped: {', '.join(names)}")
        yield record | self._evaluate(names, interruption)

    def _is_made_up(self, names: Sequence[str]) -> bool:
        """Whether the metrics have these evaluations: nothing is saved again after the end of a
        run.
        """
        written = self.run / METRICS
        records = read_metrics(written) if self.ranks.is_first and written.exists() else []
        last = records[-1] if records and records[-1]["step"] == self.loader.step else {}
        return self.ranks.agree(bool(last) and all(f"{name}/seconds" in last for name in names))

    def _asked(self, interruption: Interruption) -> bool:
        """Whether any rank was asked to stop, or could not write a checkpoint."""
        return self.ranks.agree(self._wants_to_stop(interruption))

    def _wants_to_stop(self, interruption: Interruption) -> bool:
        """Whether this rank was asked to stop, or could not write a checkpoint."""
        return interruption.name is not None or self.state.saving.failed

    def _step(
        self, step: Step, waited: float, logs: TensorLogs, interruption: Interruption
    ) -> Record:
        began = time.monotonic()
        torch.manual_seed(
            key_for(self.settings.seed, "step", step.index, self.ranks.place.rank) >> 1
        )
        self.model.begin_step(seed=self.settings.seed, number=step.index, tokens=step.num_tokens)
        nats = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        rows = list(step.joined(self.rows_per_pass))
        if self.distiller is not None:
            self.distiller.begin([inner_of(row) for row in rows], self.ranks.sum)
        if self._paths is not None:
            self._paths.begin(rows, step, self.ranks)
        with logs.watch(step.index + 1):
            for row in self._sync.over(rows):
                nats = nats + self._gradients.add(row, step.loss_denominators)
            self._sync.finish()
        rate = self.settings.optimizer.peak * self.settings.schedule.share(step.index, self.steps)
        # Nothing may be saved until this step's loss and gradients are known to be finite.
        self._trained = None
        norm = self.state.optimizers.step(rate)
        read = self._read(nats, norm, interruption)
        seconds = time.monotonic() - began
        self.totals.tokens += step.num_tokens
        self.totals.targets += step.loss_denominator
        self.totals.seconds += seconds + waited
        # Shares of other losses are already divided.
        by_token = self._own_loss is None and self._paths is None
        loss = read["nats"] / max(step.loss_denominator, 1e-12) if by_token else read["nats"]
        if not (math.isfinite(loss) and math.isfinite(read["gradient_norm"])):
            raise StateError(
                f"step {step.index}: loss {loss}, gradient norm {read['gradient_norm']}: not "
                "finite. Nothing "
                "of this step is saved; lower the learning rate, or look at `loader.explain` "
                "of the step, then resume (--resume, resume=True)"
            )
        taught = {} if self.distiller is None else self.distiller.end(read, loss)
        own = {} if self._own_loss is None else self._own_loss.figures(read)
        if self._paths is not None:
            own |= self._paths.end(read, step)
        self._trained = step
        if not any(step.loss_denominators) and not self._told_empty:
            self._told_empty = True
            self.say(
                f"step {step.index + 1} has no target on any rank: its loss is 0, and only "
                "momentum and weight decay change the weights; `penstock plan` counts such "
                "rows, and this is not said again"
            )
        return {
            "step": step.index + 1,
            "loss": loss,
            **self._gradients.sums.means(read),
            **taught,
            **own,
            **self.model.end_step(read),
            "learning_rate": rate,
            "gradient_norm": read["gradient_norm"],
            "tokens": self.totals.tokens,
            "targets": self.totals.targets,
            "seconds": seconds,
            "wait_seconds": waited,
            **self._utilisation.figures(step, seconds + waited),
        }

    def _read(self, nats: Tensor, norm: Tensor, interruption: Interruption) -> dict[str, float]:
        """Everything that a step's record needs from the device, over all ranks."""
        sums = StepSums(self.ranks)
        sums.add({"nats": nats, "stop": float(self._wants_to_stop(interruption))})
        sums.add(self._gradients.sums.pending())
        sums.add(self.model.pending_sums())
        for part in (self.distiller, self._own_loss, self._paths):
            if part is not None:
                sums.add(part.pending())
        sums.same({"gradient_norm": norm})
        if self._paths is not None:
            sums.same(self._paths.pending_same())
        read = sums.take()
        self._to_stop = read["stop"] > 0
        return read
