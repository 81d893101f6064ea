"""The state of a run: what a checkpoint saves of it, and how it is loaded again."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from penstock.core.errors import ConfigError, StateError
from penstock.core.json_values import JsonObject
from penstock.data.shards.format.images import PROCESSOR_FOLDER
from penstock.data.shards.format.manifest import TOKENIZER_FOLDER
from penstock.learn.training.agreement import weights_digest
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
from penstock.learn.training.continued import CONTINUED, Continued
from penstock.learn.training.continuing import checkpoint_of
from penstock.learn.training.determinism import BitSettings
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.early_stopping import EarlyStopping
from penstock.learn.training.optimizers import Optimizers
from penstock.learn.training.own import OwnState
from penstock.learn.training.path_training import PathTraining
from penstock.learn.training.processes import in_step
from penstock.learn.training.restoring import load_optimizer, load_weights, take_optimizer
from penstock.learn.training.run_folder import BASE, CHECKPOINTS, MODEL, RUN_FILE
from penstock.learn.training.saving import Saving
from penstock.learn.training.settings import TrainSettings
from penstock.models import LanguageModel, save_model
from penstock.models.facts import FACTS
from penstock.models.four_bits import stored_names
from penstock.models.lora.lora import is_adapter_weight, lora_weights
from penstock.models.own_model import OwnModel
from penstock.models.saving import WEIGHT_SHARDS, Base, base_checksum, base_written
from penstock.plan.loader import Step
from penstock.plan.loader.agreement import check_values
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
@dataclass(slots=True, kw_only=True)
class RunState:
    """Everything of a run that its checkpoints hold, and where it stands."""

    folder: Path
    """The run's."""
    model: LanguageModel
    loader: Loader
    settings: TrainSettings
    ranks: Ranks
    say: Callable[[str], None]
    """Called with each message for the user, one sentence."""
    steps: int
    """Optimizer steps of the whole run."""
    distiller: "Distiller | None"
    """The teachers; None: there are none."""
    projections: Mapping[str, torch.nn.Parameter]
    """Weights of the teachers' learned projections, which are trained too."""
    paths: PathTraining | None
    """Training on paths; None: on tokens."""
    optimizers: Optimizers
    own_state: OwnState
    """That of the user's own loss and `on_step`."""
    bits: BitSettings
    """The settings that change bits."""
    base: str | None
    """Checksum of a base that stays fixed and is written once; None: checkpoints hold all
    weights.
    """
    saving: Saving
    """The checkpoint that is being written."""
    totals: Totals = field(default_factory=Totals)
    waiting: EarlyStopping = field(default_factory=lambda: EarlyStopping({}))
    """The evaluators that may end the run."""
    owed: JsonObject = field(default_factory=dict)
    """Evaluators that a signal stopped, and the record of their step without them."""
    saved: int = 0
    """Steps of the newest checkpoint of this process, complete or being written."""

    def resume(self, *, writes: bool = True) -> bool:
        """Load the newest complete checkpoint; False if there is none.

        Changed settings that affect only rounding are reported; the run still resumes.

        Args:
            writes: Whether to restore a missing tokenizer of the run; a dry run does not.

        Raises:
            StateError: The data, the plan, the model or the optimizer differ from the checkpoint's,
                no checkpoint is complete although there are some, or ranks find different ones.
        """
        checkpoint = newest_complete(
            self.folder / CHECKPOINTS,
            say=self.say,
            together=self.ranks.several,
            group=self.ranks.saving_group,
        )
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
                f"{self.folder}: the run is already at step {checkpoint.step}, and steps is "
                f"{self.steps}; steps counts from the beginning of the run: to train longer, "
                f"give more than {checkpoint.step}"
            )
        if (kind := self.settings.optimizer.kind) != state["optimizer"]:
            raise StateError(
                f"{checkpoint.folder}: the optimizer is {kind} now, {state['optimizer']} "
                "then; resume with that, or begin another run with model: from:RUN"
            )
        self._load_distiller(checkpoint, state.get("distillation"))
        kept = checkpoint.tensors(OWN) if (checkpoint.folder / OWN).exists() else {}
        self.own_state.load(state.get("own", {}), kept)
        self._load(checkpoint)
        if self.paths is not None:
            self.paths.check_state(state.get("paths") or {})
        if writes:
            self._restore_tokenizer(checkpoint)
        self.totals = Totals(**state["totals"])
        self.owed = state.get("owed", {})
        self.waiting.seen = state.get("waiting", {})
        for difference in self.bits.differences(state["bits"]):
            self.say(f"resumed with another setting that changes the last bits: {difference}")
        self._report_rate(checkpoint.step, state.get("steps", self.steps))
        complete = f"the run is complete at step {self.steps}; to train longer, give more steps"
        self.say(
            complete if checkpoint.step == self.steps else f"goes on after step {checkpoint.step}"
        )
        return True

    def take(self, continued: Continued) -> None:
        """Begin with parts of another run's checkpoint. Weights were taken with the model, places
        with the loader.

        Raises:
            StateError: The checkpoint is gone, or its optimizer is another one.
            ConfigError: Its steps are already as many as this run is to have.
        """
        checkpoint = checkpoint_of(continued)
        for sentence in [*continued.report(), *what_becomes(self.loader.new_plan())]:
            self.say(sentence)
        if "optimizer" in continued.take:
            kind = self.settings.optimizer.kind
            take_optimizer(checkpoint, self.optimizers, kind, [*self.projections], self.say)
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
                f"training.steps is {self.steps}, and the schedule of {checkpoint.folder} "
                f"goes on after step {done}: steps counts from the beginning of that run: "
                f"give more than {done}, or leave schedule out of continue_from.take"
            )
        rate = self.settings.optimizer.peak * self.settings.schedule.share(done, self.steps)
        self.say(
            f"schedule: step {done + 1:,} of {self.steps:,} comes next, with learning rate "
            f"{rate:.3g} ({self.settings.schedule.shape})"
        )

    def _report_rate(self, done: int, steps_before: int) -> None:
        """Say so if another number of steps changes the learning rate of the next step."""
        share, peak = self.settings.schedule.share, self.settings.optimizer.peak
        if done == self.steps or share(done, self.steps) == share(done, steps_before):
            return
        before, now = peak * share(done - 1, steps_before), peak * share(done, self.steps)
        self.say(
            f"steps was {steps_before}, is {self.steps}: with schedule.shape "
            f"{self.settings.schedule.shape} the learning rate changes from {before:.3g} at "
            f"step {done} to {now:.3g} at step {done + 1}"
        )

    def _restore_tokenizer(self, checkpoint: Checkpoint) -> None:
        """Restore the run's tokenizer, because later checkpoints copy it from there."""
        kept, restored = checkpoint.folder / TOKENIZER_FOLDER, self.folder / TOKENIZER_FOLDER
        if self.ranks.is_first and kept.is_dir() and not restored.exists():
            self.say(f"{restored}: is missing, taken from {checkpoint.folder}")
            shutil.copytree(kept, restored)

    def _check_found(self, checkpoint: Checkpoint | None) -> None:
        """Refuse to start over if there are checkpoints."""
        if checkpoint is None and (
            there := sorted(p.name for p in (self.folder / CHECKPOINTS).glob("step-*"))
        ):
            raise StateError(
                f"{self.folder / CHECKPOINTS}: none of {', '.join(there)} is complete; "
                "restore one, or take another folder to begin again"
            )

    def _load(self, checkpoint: Checkpoint) -> None:
        if not isinstance(self.model, OwnModel):
            self._refuse_other_base(checkpoint)
        cure = (
            "resume with the settings it began with, or begin another run with continue_from or "
            "model: from:RUN"
        )
        with in_step(self.ranks.saving_group):
            load_weights(checkpoint, self.model, cure)
            load_optimizer(checkpoint, self.optimizers, sharded=bool(self.settings.shard))
        if self.ranks.several and not self.settings.shard:
            # A copy of the folder may be damaged on the machine of one rank.
            read = {"the weights": self.model.state_dict()}
            read["the optimizer's state"] = self.optimizers.state_tensors()
            check_values(
                {f"{what} of the checkpoint": weights_digest(one) for what, one in read.items()}
            )

    def _refuse_other_base(self, checkpoint: Checkpoint) -> None:
        written = base_written(checkpoint.part(MODEL))
        if written is not None and self.base is not None and written != self.base:
            raise StateError(
                f"{checkpoint.folder}: its LoRA was trained on another model: the weights of "
                "the base have changed since; resume with the model that the run began with, "
                "or begin another run with model: from:RUN"
            )

    def _load_distiller(self, checkpoint: Checkpoint, state: dict[str, object] | None) -> None:
        if (self.distiller is None) != (state is None):
            now, then = (
                "with a teacher" if one is not None else "without one"
                for one in (self.distiller, state)
            )
            raise StateError(
                f"{checkpoint.folder}: the run trains {now} now, {then} then; resume with the "
                "same section `teacher`, or begin another run with model: from:RUN"
            )
        if self.distiller is None or state is None:
            return
        for number in self.distiller.others(state):
            self.say(
                f"resumed with another teacher: the model of teacher.teachers.{number} changed"
            )
        self.distiller.load_state(state)
        if self.projections:
            self.distiller.load_state_dict(checkpoint.tensors(PROJECTIONS), strict=False)

    def save(self, step: Step) -> None:
        """Write a checkpoint after a step, and remove old ones; while the training goes on, if that
        is set.

        Raises:
            OutputError: It cannot be written, or the one before could not.
        """
        self.saving.wait()
        parts = self._tensor_parts()
        own, own_tensors = self.own_state.save()
        state = {
            "loader": step.resume_state,
            "place": step.place,
            "totals": asdict(self.totals),
            "bits": asdict(self.bits),
            "steps": self.steps,
            "optimizer": self.settings.optimizer.kind,
            "distillation": None if self.distiller is None else self.distiller.state(),
            **({} if self.paths is None else {"paths": self.paths.state()}),
            **({"own": own} if own else {}),
            **({"owed": self.owed} if self.owed else {}),
            **({"waiting": self.waiting.seen} if self.waiting.seen else {}),
        }
        parts |= {
            # The training changes what it refers to.
            STATE: deepcopy(state),
            **({OWN: own_tensors} if own_tensors else {}),
            # So that a copied checkpoint still carries its run file, tokenizer and processor.
            **{kept: partial(_copy, self.folder / kept) for kept in KEPT},
        }
        done, keep = step.index + 1, self.settings.checkpoints.keep
        write = partial(save_checkpoint, keep=keep, group=self.ranks.saving_group)
        self.saving.start(partial(write, self.folder / CHECKPOINTS, done, parts))
        self.saved = done

    def _tensor_parts(self) -> dict[str, object]:
        """Weights and optimizer state as they are now, for `save_checkpoint`."""
        weights, states = self.model.state_dict(), self.optimizers.state_tensors()
        if self.settings.shard:
            cut, shards = self.saving.copied_pieces, f"{MODEL}/{WEIGHT_SHARDS}"
            return {
                MODEL: partial(save_model, self.model, with_weights=False),
                shards: cut(shards, weights),
                SHARDED_OPTIMIZER: cut(SHARDED_OPTIMIZER, states),
                **self._projections(),
            }
        if not self.ranks.is_first:
            # Rank 0 has the same, and writes it.
            return dict.fromkeys((MODEL, OPTIMIZER, *self._projections()))
        weights = weights if self.base is None else lora_weights(weights)
        return {
            MODEL: partial(self._save_model, weights=self.saving.copied(MODEL, weights)),
            OPTIMIZER: self.saving.copied(OPTIMIZER, states),
            **self._projections(),
        }

    def _projections(self) -> dict[str, object]:
        if not self.projections:
            return {}
        return {PROJECTIONS: self.saving.copied(PROJECTIONS, self.projections)}

    def _save_model(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the model of a checkpoint; of LoRA only LoRA, next to a base that all checkpoints
        of the run share.
        """
        if self.base is None:
            save_model(self.model, path, weights)
            return
        base = self.folder / BASE
        if (read_manifest(base) or {}).get("checksum") != self.base or damage(
            base, contents=False
        ) is not None:
            partial_base = begin(base)
            # It is frozen, so it may be read while the training goes on.
            save_model(self.model, partial_base, with_lora=False)
            finish(partial_base, base, {"checksum": self.base})
        save_model(
            self.model, path, weights, base=Base(folder=f"../../../{BASE}", checksum=self.base)
        )


def fixed_base(model: LanguageModel) -> str | None:
    """Checksum of the weights next to LoRA if nothing else is trained or changes; None: it does, or
    has no LoRA.

    Of whole weights: ask before the model is sharded.
    """
    module = module_of(model)
    return base_checksum(module.state_dict()) if _base_is_fixed(model, module) else None


def _base_is_fixed(model: LanguageModel, module: torch.nn.Module) -> bool:
    """Whether a model has LoRA, and nothing else of it is trained or changes."""
    if model.lora is None:
        return False
    weights = {weight.data_ptr() for weight in model.parameters()}
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    # A buffer that is saved may change in training, such as a running mean; a tied weight has two
    # names.
    known = stored_names(module)
    kept = [
        name
        for name, value in module.state_dict().items()
        if name not in known and value.data_ptr() not in weights
    ]
    return all(is_adapter_weight(name) for name in trained) and not kept


def _copy(source: Path, target: Path) -> None:
    """Copy a file or folder if it exists. Only rank 0 checks that, because all ranks must pass the
    same parts.
    """
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copyfile(source, target)


def module_of(model: LanguageModel) -> torch.nn.Module:
    """The model as a torch module."""
    assert isinstance(model, torch.nn.Module)
    return model


@contextmanager
def reports_dropped(loader: Loader, say: Callable[[str], None]) -> Iterator[None]:
    """Say at the end which documents a loader dropped, and which parts it left out, in a line each.

    Args:
        loader: The loader.
        say: Called with each line.
    """
    yield
    for what, found, why in (
        ("documents dropped", loader.dropped, "empty, or longer than a row with too_long: drop"),
        (
            "parts left out",
            loader.untrained,
            "of documents longer than a row, without a target after the cut",
        ),
    ):
        if found:
            counts = ", ".join(f"{count:,} of source {name}" for name, count in found.items())
            say(f"{what}: {counts} ({why})")


def count_steps(loader: Loader, settings: TrainSettings) -> int:
    """Steps of the run: those of the settings, or until the sources end.

    Raises:
        ConfigError: Steps are not set and a source never ends, or the warm-up is longer than the
            run.
    """
    if settings.steps is not None:
        return settings.steps
    endless = [source.name for source in loader.mixture.sources if source.max_epochs is None]
    if endless:
        raise ConfigError(
            f"training.steps is missing, and source {endless[0]!r} never ends; give steps, or "
            "max_epochs of each source"
        )
    steps = loader.count_steps()
    settings.schedule.check_length(steps)
    return steps
