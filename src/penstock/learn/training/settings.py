"""How a model is trained: the section `training` of a run file. Imports no torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final, get_args

from penstock.core.errors import ConfigError, require_above_zero
from penstock.learn.training.continued import ContinueSettings
from penstock.learn.training.evaluator_settings import EvaluatorSettings
from penstock.learn.training.optimizer_settings import (
    NEW_RATE,
    TUNING_RATES,
    OptimizerSettings,
    ScheduleSettings,
)
from penstock.learn.training.path_settings import PolicySettings, PreferenceSettings
from penstock.learn.training.trackers import TrackerName
from penstock.models.lora.settings import LoraSettings

AttentionBackend = Literal["auto", "per_document", "varlen", "flex", "dense"]
"""Backends of `penstock.models.attention`."""
RecurrentBackend = Literal["torch", "fla", "mamba_ssm", "causal_conv1d"]
"""Backends of `penstock.models.recurrent`."""
Precision = Literal["auto", "float32", "bfloat16"]
"""Dtypes in which a model's blocks compute."""
Checkpointing = Literal["none", "selective", "full"]
"""What blocks keep for the backward pass; see `penstock.models.activation_checkpointing`."""
MOST_THREADS = 4096
_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d{1,4})?")


def check_device(where: str, name: str) -> None:
    """Refuse a text that is not a device name; `local_device` checks whether the machine has it.

    Raises:
        ConfigError: It is not a device name.
    """
    if not _DEVICE.fullmatch(name):
        raise ConfigError(
            f"{where} {name!r}: expected auto, cpu, cuda, cuda:1, xpu or mps; give one of "
            "this machine, or auto"
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """When the run is saved; it is always saved at its end and at SIGTERM."""

    every: int = 500
    """Steps between checkpoints."""
    keep: int = 3
    """Number of complete checkpoints to keep, the newest ones."""
    asynchronous: bool | Literal["auto"] = "auto"
    """Write a checkpoint while the training goes on, from a copy of weights and optimizer state in
    the CPU's memory; false: stand still, without a copy. auto: true on a GPU, false on the CPU.
    """

    def __post_init__(self) -> None:
        require_above_zero("checkpoints", self, "every", "keep")
        if self.asynchronous not in (True, False, "auto"):
            raise ConfigError(
                f"checkpoints.asynchronous must be true, false or auto, got {self.asynchronous!r}"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLogSettings:
    """Tensors to log for debugging."""

    patterns: tuple[str, ...] = ()
    """Shell patterns of the names: parameters, `grad.` + parameter, `out.` + module; empty:
    none.
    """
    every: int = 100
    """Steps between logged steps."""
    full: bool = False
    """Save whole tensors, not only their statistics."""

    def __post_init__(self) -> None:
        require_above_zero("tensor_logs", self, "every")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How a model is trained."""

    steps: int | None = None
    """Optimizer steps; None: until every source has had its `max_epochs`."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    """The optimizer and its settings."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    """How the learning rate rises and falls over the run."""
    continue_from: ContinueSettings | str | None = None
    """Begin with parts of another run's checkpoint: the folder of a run, for its newest checkpoint
    with weights, optimizer, schedule and place in the data; or which checkpoint, and what is taken
    of it.
    """
    loss: Callable[..., Any] | str | None = None
    """Your own loss instead of the cross entropy, `module:function` or `path/to/file.py:function`;
    see `penstock.learn.training.own`.
    """
    on_step: Callable[..., Any] | str | None = None
    """Your own function, called after each step; named in the same way."""
    preference: PreferenceSettings | None = None
    """Learn from answers that are better or worse, instead of from each token; the data have `rank`
    or `label`.
    """
    policy: PolicySettings | None = None
    """Learn from sampled answers with rewards, instead of from each token."""
    z_loss: float = 0.0
    """Coefficient of log² Z (PaLM, Chowdhery et al. 2022)."""
    lora: LoraSettings | None = None
    """Train small matrices next to the frozen model (LoRA, Hu et al. 2021); needs the extra
    `lora`.
    """
    frozen: tuple[str, ...] = ()
    """Weights that are not trained, by name, with `*` for any text: `["*visual*"]`, a vision
    tower.
    """
    feature_cache: str | None = None
    """Folder for the features of images that a frozen vision tower and projector give, so that each
    image passes the tower once, in all epochs and runs with the same frozen weights. None: the
    tower runs in every step.
    """
    micro_sequences: int = 1
    """Number of parts in which the model processes each row, to save memory; gradients are those of
    the whole row.
    """
    rows_per_pass: int | None = None
    """Rows that the model processes in one pass, end to end; None: chosen by row length, model and
    device. More need more memory, up to `rows_per_step` over the number of processes. It changes
    rounding, not the loss.
    """
    attention: AttentionBackend = "auto"
    """Attention backend; see `penstock.models.attention`."""
    recurrent: RecurrentBackend | tuple[RecurrentBackend, ...] = "torch"
    """What computes recurrent layers: torch, or packages with kernels for CUDA, each operation by
    the first that provides it: fla (delta rules, convolution), mamba_ssm (Mamba's scans),
    causal_conv1d.
    """
    device: str = "auto"
    """cpu, cuda, cuda:1, xpu or mps; auto: a GPU if there is one."""
    threads: int | None = None
    """Torch's threads on the CPU; None: torch's choice. The number of threads affects rounding."""
    precision: Precision = "auto"
    """Dtype in which the model's blocks compute; weights that are trained, their gradients and the
    optimizer's state stay in float32, as do norms inside, softmax and loss. auto: bfloat16 on CUDA,
    else the model's own (`model.dtype`).
    """
    activation_checkpointing: Checkpointing = "none"
    """Keep less of each block for the backward pass, which then computes the block again: full
    keeps its input only, selective also what its attention gave. Gradients stay the same; a step
    takes up to a third longer.
    """
    compile: bool = False
    """torch.compile the model's blocks."""
    deterministic: bool | Literal["auto"] = "auto"
    """Use only algorithms that give the same bits each time; an operation without one is an error.
    auto: on the CPU, where they cost nothing; on a GPU FlashAttention's backward pass would take
    about twice as long.
    """
    seed: int = 0
    """Seed of the initial weights and of each step's random numbers."""
    context_parallel: int = 1
    """Processes that share each row, of which each has some of the slots and attends to the keys of
    all; for rows whose activations do not fit into one device. The loss and its gradients are those
    of the whole row.
    """
    shard: bool | int = False
    """Split weights, gradients and optimizer states among processes (FSDP2) instead of replicating
    them. true: among all; N: among N neighbouring ranks, such as the GPUs of one
    machine, with a copy in each such group (hybrid sharding, HSDP).
    """
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    """When the run is saved."""
    evaluators: Mapping[str, EvaluatorSettings] = field(default_factory=dict)
    """Evaluators by name."""
    log_every: int = 1
    """Steps between records in metrics.jsonl."""
    log: TrackerName | tuple[TrackerName, ...] = ()
    """Trackers that get the figures, too: tensorboard (files in the run's folder), wandb (Weights &
    Biases), trackio, mlflow.
    """
    log_project: str | None = None
    """Project of W&B and trackio, experiment of MLflow. None: WANDB_PROJECT or
    MLFLOW_EXPERIMENT_NAME, else penstock.
    """
    log_name: str | None = None
    """Name of the run in the trackers; None: the name of its folder."""
    tensor_logs: TensorLogSettings = field(default_factory=TensorLogSettings)
    """Tensors to log."""

    @property
    def trackers(self) -> tuple[TrackerName, ...]:
        """Those that `log` names."""
        return (self.log,) if isinstance(self.log, str) else self.log

    def __post_init__(self) -> None:
        object.__setattr__(self, "continue_from", ContinueSettings.of(self.continue_from))
        for name, choices in (
            ("precision", get_args(Precision)),
            ("activation_checkpointing", get_args(Checkpointing)),
        ):
            if (given := getattr(self, name)) not in choices:
                raise ConfigError(
                    f"training.{name} must be one of {', '.join(choices)}, got {given!r}"
                )
        for tracker in self.trackers:
            if tracker not in get_args(TrackerName):
                raise ConfigError(
                    f"training.log must name some of {', '.join(get_args(TrackerName))}, got "
                    f"{tracker!r}"
                )
        if self.deterministic not in (True, False, "auto"):
            raise ConfigError(
                f"training.deterministic must be true, false or auto, got {self.deterministic!r}"
            )
        if self.micro_sequences > 1 and self.activation_checkpointing != "none":
            raise ConfigError(
                "training.micro_sequences and activation_checkpointing do not go together: both "
                "compute activations twice to save memory; choose one"
            )
        if self.shard_over is not None and self.shard_over < 2:
            raise ConfigError(
                "training.shard must be true, false, or a number of ranks from 2, got "
                f"{self.shard!r}"
            )
        if self.shard and self.lora is not None and self.lora.quantize is not None:
            raise ConfigError(
                "training.shard and lora.quantize do not go together: matrices in 4 bits are not "
                "divided among ranks; each rank holds all of them without shard"
            )
        if self.shard and self.micro_sequences > 1:
            raise ConfigError("training.shard and micro_sequences do not go together; choose one")
        if self.micro_sequences > 1 and (self.rows_per_pass or 1) > 1:
            raise ConfigError(
                "training.micro_sequences cuts rows and rows_per_pass joins them; choose one"
            )
        if self.loss is not None:
            self._check_own_loss()
        if self.context_parallel > 1:
            self._check_shared_rows()
        require_above_zero(
            "training",
            self,
            "steps",
            "micro_sequences",
            "context_parallel",
            "rows_per_pass",
            "threads",
            "log_every",
        )
        if not self.z_loss >= 0:
            raise ConfigError(f"training.z_loss must be 0 or more, got {self.z_loss!r}")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ConfigError(
                f"training.threads must be at most {MOST_THREADS:,}, got {self.threads}"
            )
        if self.attention not in get_args(AttentionBackend):
            known = ", ".join(get_args(AttentionBackend))
            raise ConfigError(f"training.attention must be one of {known}, got {self.attention!r}")
        self._check_recurrent()
        check_device("training.device", self.device)
        if self.steps is not None:
            self.schedule.check_length(self.steps)

    @property
    def shard_over(self) -> int | None:
        """Neighbouring ranks that hold the weights once; None: all, or nothing is sharded."""
        return None if isinstance(self.shard, bool) else self.shard

    def default_rate(self, *, pretrained: bool) -> float:
        """The learning rate where none is set.

        Args:
            pretrained: Whether the model has weights from an earlier training.
        """
        whole_answers = self.preference is not None or self.policy is not None
        return TUNING_RATES[self.lora is not None, whole_answers] if pretrained else NEW_RATE

    def _check_shared_rows(self) -> None:
        """Refuse what does not work on a part of a row."""
        clash = {
            "micro_sequences": self.micro_sequences > 1,
            "preference": self.preference is not None,
            "policy": self.policy is not None,
            "compile": self.compile,
            "attention: flex": self.attention == "flex",
        }
        if name := next((name for name, on in clash.items() if on), None):
            raise ConfigError(
                f"training.context_parallel and {name} do not go together; choose one"
            )

    @property
    def beginning(self) -> ContinueSettings | None:
        """`continue_from` in full."""
        return ContinueSettings.of(self.continue_from)

    @property
    def recurrent_backends(self) -> tuple[str, ...]:
        """The names in `recurrent`."""
        return (self.recurrent,) if isinstance(self.recurrent, str) else tuple(self.recurrent)

    def _check_recurrent(self) -> None:
        known, names = get_args(RecurrentBackend), self.recurrent_backends
        if not names or len(set(names)) < len(names) or any(name not in known for name in names):
            raise ConfigError(
                f"training.recurrent must be one or several of {', '.join(known)}, got "
                f"{self.recurrent!r}"
            )
        if self.micro_sequences > 1 and "mamba_ssm" in names:
            raise ConfigError(
                "training.recurrent: mamba_ssm carries no states between the parts of a row; "
                "set micro_sequences to 1, or take torch"
            )

    def _check_own_loss(self) -> None:
        """Refuse settings that have no effect on the user's own loss."""
        for name, off in (("z_loss", 0.0), ("micro_sequences", 1), ("context_parallel", 1)):
            if getattr(self, name) != off:
                raise ConfigError(
                    f"training.loss is your own, and {name} belongs to the built-in one; "
                    f"leave {name} out"
                )
