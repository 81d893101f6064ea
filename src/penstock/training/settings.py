"""How a model is trained: the section `training` of a run file. Imports no torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Literal, final, get_args

from penstock.errors import ConfigError
from penstock.evaluation.settings import TaskSettings
from penstock.generation.settings import Sampling
from penstock.loader import Mixture, Source
from penstock.models.lora import LoraSettings
from penstock.objectives import Causal, Objective
from penstock.training.optimizer_settings import OptimizerSettings
from penstock.training.schedules import ScheduleSettings


def _above_zero(where: str, settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{where}.{name} must be above 0, got {value!r}")


AttentionBackend = Literal["auto", "per_document", "varlen", "flex", "dense"]
"""Of `penstock.models.attention`."""
MOST_THREADS = 4096
_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d{1,4})?")


def check_device(where: str, name: str) -> None:
    """Refuse what is no device's name; whether it is here, `local_device` finds out.

    Raises:
        ConfigError: It is none.
    """
    if not _DEVICE.fullmatch(name):
        raise ConfigError(
            f"{where} {name!r}: expected auto, cpu, cuda, cuda:1, xpu or mps; give one that is here, or auto"
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """When the run is saved, besides its end and SIGTERM."""

    every: int = 500
    """Steps between checkpoints."""
    keep: int = 3
    """Complete checkpoints that stay, the newest ones."""

    def __post_init__(self) -> None:
        _above_zero("checkpoints", self, "every", "keep")


_KEYS = {
    "loss": ("data", "slice", "objective", "sources", "rows"),
    "samples": ("prompts", "max_tokens", "temperature"),
}
"""Kind of evaluator → the keys that only it has."""
SCORED_TASKS = ("mmlu", "bits_per_byte")
"""Tasks of which no texts are written."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorSettings:
    """One look at the model now and then."""

    kind: Literal["loss", "samples", "task"] = "loss"
    """loss: of held-out data, with bits per byte where the dataset knows its text's bytes. samples: texts that the
    model writes. task: the score on a real task."""
    every: int = 500
    """Steps between looks; there is one at the end too."""
    data: str | None = None
    """loss: a dataset folder; its documents are used once, in their order."""
    slice: tuple[float, float] = (0.0, 1.0)
    """loss: the part of the documents of `data` in use, as fractions of their number."""
    objective: Objective = field(default_factory=Causal)
    """loss: what is predicted of the documents of `data`."""
    sources: Sequence[Source] = ()
    """loss: several datasets in place of `data`, written as the sources of the section `data`; each document is used
    once. `loss` is then the mean of the sources' losses, weighted by their shares."""
    rows: int | None = None
    """loss: rows at most; None: all."""
    prompts: tuple[str, ...] = ("",)
    """samples: what each text begins with, after BOS."""
    max_tokens: int = 64
    """samples: tokens of each, at most."""
    temperature: float = 0.8
    """samples: 0 takes the likeliest token."""
    task: TaskSettings | None = None
    """task: which, and how it is given."""

    def __post_init__(self) -> None:
        _above_zero("evaluators", self, "every", "rows", "max_tokens")
        if self.kind not in ("loss", "samples", "task"):
            raise ConfigError(f"evaluators: kind must be loss, samples or task, got {self.kind!r}")
        if self.kind == "samples":
            Sampling(temperature=self.temperature, max_tokens=self.max_tokens)
        if self.kind == "loss":
            _ = self.mixture
        if (self.kind == "task") != (self.task is not None):
            raise ConfigError("evaluators: kind task and the key task, such as {name: mmlu, data: FOLDER}, go together")
        self._refuse_ignored()

    def _refuse_ignored(self) -> None:
        """Refuse what is said to another kind of look."""
        for key in fields(self):
            kind = next((kind for kind, keys in _KEYS.items() if key.name in keys), self.kind)
            default = key.default if key.default_factory is MISSING else key.default_factory()
            if kind != self.kind and getattr(self, key.name) != default:
                raise ConfigError(
                    f"evaluators: {key.name} goes with kind {kind}, and this one's is {self.kind}; leave {key.name} "
                    f"out, or set kind to {kind}"
                )

    @property
    def mixture(self) -> Mixture:
        """kind loss: the sources, each document once."""
        if (self.data is None) == (not self.sources):
            found = "neither" if self.data is None else "both"
            raise ConfigError(f"evaluators: kind loss needs data, a dataset folder, or sources; found {found}")
        if self.data is not None:
            held_out = Source(
                self.data, name="held out", slice=self.slice, objective=self.objective, shuffle="none", max_epochs=1
            )
            return Mixture([held_out])
        if self.slice != (0.0, 1.0) or self.objective != Causal():
            raise ConfigError("evaluators: slice and objective go with data; give each of the sources its own")
        for source in self.sources:
            if source.max_epochs not in (None, 1) or not source.share > 0:
                raise ConfigError(
                    f"evaluators: source {source.name!r} has share {source.share:g} and max_epochs "
                    f"{source.max_epochs}; expected a share above 0 and no max_epochs, as each document is used once"
                )
        return Mixture([replace(source, max_epochs=1) for source in self.sources])

    @property
    def writes(self) -> bool:
        """Whether the model writes texts, rather than that texts are scored."""
        return self.kind == "samples" or (self.task is not None and self.task.name not in SCORED_TASKS)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLogSettings:
    """Tensors to look at while debugging."""

    patterns: tuple[str, ...] = ()
    """Shell patterns of the names: parameters, `grad.` + parameter, `out.` + module; empty: none."""
    every: int = 100
    """Steps between them."""
    full: bool = False
    """Whole tensors, not only their statistics."""

    def __post_init__(self) -> None:
        _above_zero("tensor_logs", self, "every")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How a model is trained."""

    steps: int | None = None
    """Optimiser steps; None: until every source has had its `max_epochs`."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    """What turns gradients into steps."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    """How the learning rate goes."""
    z_loss: float = 0.0
    """Coefficient of log² Z (PaLM, Chowdhery et al. 2022)."""
    lora: LoraSettings | None = None
    """Train small matrices beside the frozen model (LoRA, Hu et al. 2021); needs the extra `lora`."""
    micro_sequences: int = 1
    """Parts in which each row goes through the model, to save memory; the gradients are those of the whole row."""
    attention: AttentionBackend = "auto"
    """Backend of attention by name; see `penstock.models.attention`."""
    device: str = "auto"
    """cpu, cuda, cuda:1, xpu or mps; auto: a GPU where there is one."""
    threads: int | None = None
    """Of torch on the CPU; None: torch's choice. Other numbers of threads give other roundings."""
    compile: bool = False
    """torch.compile the model's blocks."""
    deterministic: bool = True
    """Only algorithms that give the same bits each time; an error where there is none."""
    seed: int = 0
    """Of the first weights."""
    shard: bool = False
    """Several processes: shard weights, gradients and optimiser states (FSDP2) instead of copying them."""
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    """When the run is saved."""
    evaluators: Mapping[str, EvaluatorSettings] = field(default_factory=dict)
    """Looks at the model, by name."""
    log_every: int = 1
    """Steps between records in metrics.jsonl."""
    tensorboard: bool = False
    """Also write TensorBoard's files into the run's folder."""
    wandb: str | None = None
    """Also send metrics to this project of Weights & Biases."""
    tensor_logs: TensorLogSettings = field(default_factory=TensorLogSettings)
    """Tensors to look at."""

    def __post_init__(self) -> None:
        writes = any(one.writes for one in self.evaluators.values())
        clash = [
            ("micro_sequences", self.micro_sequences > 1),
            ("lora", self.lora is not None),
            ("evaluators that write texts (samples, tasks but mmlu and bits_per_byte)", writes),
        ]
        if self.shard and (name := next((name for name, on in clash if on), None)):
            raise ConfigError(f"training.shard and {name} do not go together; choose one")
        _above_zero("training", self, "steps", "micro_sequences", "threads", "log_every")
        if not self.z_loss >= 0:
            raise ConfigError(f"training.z_loss must be 0 or more, got {self.z_loss!r}")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ConfigError(f"training.threads must be at most {MOST_THREADS:,}, got {self.threads}")
        if self.attention not in get_args(AttentionBackend):
            known = ", ".join(get_args(AttentionBackend))
            raise ConfigError(f"training.attention must be one of {known}, got {self.attention!r}")
        check_device("training.device", self.device)
        if self.steps is not None:
            self.schedule.check_length(self.steps)
