r"""How a model is trained: the section `training` of a run file, with optimizer and schedule.
Imports no torch.

The learning rate of a step is a share of its peak, a pure function of the step, so a checkpoint
need not store it.

    share
      1 |    ________________        wsd: warm-up, stable, decay over the last fraction of the steps
        |   /                \
        |  /                  \
        | /                    \
        0 +--------------------------> step
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal, final, get_args

from penstock.core.errors import ConfigError
from penstock.learn.evaluation.tasks import TaskSettings
from penstock.learn.generation.settings import Sampling
from penstock.learn.training.continued import ContinueSettings
from penstock.learn.training.path_settings import PolicySettings, PreferenceSettings
from penstock.models.lora.settings import LoraSettings
from penstock.plan.loader.mixture import Mixture, Source
from penstock.plan.objectives import Objective
from penstock.plan.objectives.objective import Causal

NEW_RATE = 3e-3
"""Default learning rate of a model with new weights."""
TUNING_RATES = {(False, False): 2e-5, (True, False): 2e-4, (False, True): 1e-6, (True, True): 1e-5}
"""(whether LoRA is trained, whether on whole answers) → default learning rate of a pretrained
model. Those of TRL's trainers (SFT 2e-5; DPO, KTO and GRPO 1e-6), and ten times as much with LoRA,
which its documentation advises.
"""
LONGEST_USUAL_WARMUP = 100
"""Default number of warm-up steps, where that is no more than a tenth of the run."""
Shape = Literal["constant", "linear", "cosine", "wsd"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """The learning rate's schedule."""

    shape: Shape = "wsd"
    """After the warm-up: `constant`; `linear` or `cosine` down to `floor`; `wsd`: constant, then
    linear down to `floor` over the last `decay` of the steps (Hu et al. 2024, MiniCPM,
    arXiv:2404.06395), so a run can continue from a checkpoint before the decay.
    """
    warmup_steps: int | None = None
    """Steps over which the rate rises linearly; the first has 1 / warmup_steps of the peak, not 0.
    None: 100, or a tenth of the steps of a run of fewer than 1,000.
    """
    decay: float = 0.2
    """`wsd`: share of all steps, at the end of the run, over which the rate falls."""
    floor: float = 0.0
    """Share of the peak rate after the last step."""

    def __post_init__(self) -> None:
        if self.shape not in ("constant", "linear", "cosine", "wsd"):
            raise ConfigError(
                f"schedule.shape must be constant, linear, cosine or wsd, got {self.shape!r}"
            )
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ConfigError(f"schedule.warmup_steps must be 0 or more, got {self.warmup_steps}")
        for name in ("decay", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"schedule.{name} must be a share from 0 to 1, got {getattr(self, name)}"
                )

    def check_length(self, total_steps: int) -> None:
        """Refuse a warm-up longer than the run, which would never reach the peak.

        Raises:
            ConfigError: It is longer.
        """
        if self.warmup_steps is not None and self.warmup_steps > total_steps:
            raise ConfigError(
                f"training.schedule.warmup_steps is {self.warmup_steps}, and the run has "
                f"{total_steps} steps; lower it, or leave it out"
            )

    def share(self, step: int, total_steps: int) -> float:
        """Share of the peak rate at a step.

        Args:
            step: Number of the step, from 0.
            total_steps: Steps of the whole run.

        Returns:
            A share in (0, 1], `floor` at `step == total_steps`.
        """
        warmup = self.warmup_steps
        if warmup is None:
            warmup = min(LONGEST_USUAL_WARMUP, -(-total_steps // 10))
        warmup = min(warmup, total_steps)
        if step < warmup:
            return (step + 1) / warmup
        begin = warmup
        if self.shape == "wsd":
            begin = max(warmup, total_steps - round(self.decay * total_steps))
        if self.shape == "constant" or step < begin:
            return 1.0
        done = min(1.0, (step - begin) / max(1, total_steps - begin))
        left = 0.5 + 0.5 * math.cos(math.pi * done) if self.shape == "cosine" else 1 - done
        return self.floor + (1 - self.floor) * left


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW, or Muon for the matrices inside the model with AdamW for the rest."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`adamw` (Loshchilov and Hutter 2019) or `muon` (Jordan et al. 2024; updates scaled as in Liu
    et al. 2025, arXiv:2502.16982, so that the rate and decay that suit AdamW suit it too).
    """
    learning_rate: float | None = None
    """Peak learning rate; 1e-3 to 3e-3 suit new models of a few million parameters, large ones need
    less. None: 3e-3 for a model with new weights; for a pretrained one 2e-5, or 2e-4 with LoRA, and
    with `preference` or `policy` 1e-6, or 1e-5 with LoRA. The log and the run's folder say which.
    """
    learning_rate_factors: Mapping[str, float] = field(default_factory=dict)
    """Pattern of weights' names (`*visual*`) → factor of their learning rate; the first that fits a
    name counts.
    """
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the running means of gradients and of their squares."""
    eps: float = 1e-8
    """Added to AdamW's root of the mean square."""
    weight_decay: float = 0.1
    """Share of a weight subtracted each step, times the learning rate; for matrices only."""
    decay_embeddings: bool = False
    """Whether embeddings and an output matrix decay as well. Norms and biases never do."""
    momentum: float = 0.95
    """Muon's (Nesterov) momentum."""
    clip_norm: float | None = 1.0
    """Maximum norm of the gradients over all parameters; larger gradients are scaled down to it.
    None: no clipping.
    """
    fused: bool | None = None
    """Use the fused AdamW kernel; None: used if the device supports it. It changes the last
    bits.
    """

    def __post_init__(self) -> None:
        if self.kind not in ("adamw", "muon"):
            raise ConfigError(f"optimizer.kind must be adamw or muon, got {self.kind!r}")
        for name in ("learning_rate", "eps"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"optimizer.{name} must be above 0 and finite, got {getattr(self, name)}"
                )
        for pattern, factor in self.learning_rate_factors.items():
            if not 0 < factor < float("inf"):
                raise ConfigError(
                    f"optimizer.learning_rate_factors: {pattern!r} has {factor}, which must "
                    "be above 0 and finite; training.frozen leaves weights as they are"
                )
        if not self.weight_decay >= 0:
            raise ConfigError(f"optimizer.weight_decay must be 0 or more, got {self.weight_decay}")
        for name, value in (
            ("betas", self.betas[0]),
            ("betas", self.betas[1]),
            ("momentum", self.momentum),
        ):
            if not 0 <= value < 1:
                raise ConfigError(f"optimizer.{name} must be from 0 to below 1, got {value}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(
                f"optimizer.clip_norm must be above 0, got {self.clip_norm}; leave it out to "
                "never clip"
            )

    @property
    def peak(self) -> float:
        """The peak learning rate; that of new models if none is set."""
        return NEW_RATE if self.learning_rate is None else self.learning_rate


def _above_zero(where: str, settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{where}.{name} must be above 0, got {value!r}")


AttentionBackend = Literal["auto", "per_document", "varlen", "flex", "dense"]
"""Backends of `penstock.models.attention`."""
RecurrentBackend = Literal["torch", "fla", "mamba_ssm", "causal_conv1d"]
"""Backends of `penstock.models.recurrent`."""
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

    def __post_init__(self) -> None:
        _above_zero("checkpoints", self, "every", "keep")


_KEYS = {
    "loss": ("data", "slice", "objective", "sources", "rows"),
    "preference": ("data", "slice", "sources", "rows"),
    "samples": ("prompts", "max_tokens", "temperature"),
    "own": ("function",),
}
"""Kind of evaluator → the keys that only some kinds have."""
SCORED_TASKS = ("mmlu", "bits_per_byte")
"""Tasks that score given texts and generate none."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorSettings:
    """An evaluation of the model at intervals during training."""

    kind: Literal["loss", "preference", "samples", "task", "own"] = "loss"
    """loss: on held-out data, with bits per byte if the dataset knows its text's bytes. preference:
    loss, accuracy and margin of held-out answers, as `training.preference` compares them. samples:
    texts that the model generates. task: the score on a real task. own: the figures of your own
    function.
    """
    every: int = 500
    """Steps between evaluations; there is one at the end too."""
    data: str | None = None
    """loss, preference: a dataset folder or a glob; its documents are used once, in their order."""
    slice: tuple[float, float] = (0.0, 1.0)
    """loss, preference: the part of the documents of `data` to use, as fractions of their
    number.
    """
    objective: Objective = field(default_factory=Causal)
    """loss: the objective for the documents of `data`."""
    sources: Sequence[Source] = ()
    """loss, preference: several datasets instead of `data`, written like the sources of the section
    `data`; each document is used once. `loss` is then the mean of the sources' losses, weighted by
    their shares.
    """
    rows: int | None = None
    """loss, preference: maximum number of rows; None: all."""
    prompts: tuple[str, ...] = ("",)
    """samples: the prompts; each text begins with BOS and its prompt."""
    max_tokens: int = 64
    """samples: maximum tokens per text."""
    temperature: float = 0.8
    """samples: sampling temperature; 0 takes the most likely token."""
    task: TaskSettings | None = None
    """task: the task and its settings."""
    function: Callable[..., Any] | str | None = None
    """own: `module:function` or `path/to/file.py:function`; see `penstock.learn.training.own`."""

    def __post_init__(self) -> None:
        _above_zero("evaluators", self, "every", "rows", "max_tokens")
        if self.kind not in ("loss", "preference", "samples", "task", "own"):
            raise ConfigError(
                "evaluators: kind must be loss, preference, samples, task or own, got "
                f"{self.kind!r}"
            )
        if self.kind == "own" and self.function is None:
            raise ConfigError("evaluators: kind own needs function, such as my_code.py:score")
        if self.kind == "samples":
            Sampling(temperature=self.temperature, max_tokens=self.max_tokens)
        if self.kind in ("loss", "preference"):
            _ = self.mixture
        if (self.kind == "task") != (self.task is not None):
            raise ConfigError(
                "evaluators: kind task and the key task, such as {name: mmlu, data: FOLDER}, "
                "go together"
            )
        self._refuse_ignored()

    def _refuse_ignored(self) -> None:
        """Refuse settings of another kind of evaluator."""
        for key in fields(self):
            kinds = [kind for kind, keys in _KEYS.items() if key.name in keys] or [self.kind]
            kind = kinds[0]
            default = key.default if key.default_factory is MISSING else key.default_factory()
            if self.kind not in kinds and getattr(self, key.name) != default:
                raise ConfigError(
                    f"evaluators: {key.name} goes with kind {kind}, and this one's is "
                    f"{self.kind}; leave {key.name} out, or set kind to {kind}"
                )

    @property
    def mixture(self) -> Mixture:
        """kind loss or preference: the sources, each document used once."""
        if (self.data is None) == (not self.sources):
            found = "neither" if self.data is None else "both"
            raise ConfigError(
                f"evaluators: kind {self.kind} needs data, a dataset folder, or sources; "
                f"found {found}"
            )
        if self.data is not None:
            held_out = Source(
                self.data,
                name="held out",
                slice=self.slice,
                objective=self.objective,
                shuffle="none",
                max_epochs=1,
            )
            return Mixture([held_out])
        if self.slice != (0.0, 1.0) or self.objective != Causal():
            raise ConfigError(
                "evaluators: slice and objective go with data; give each of the sources its own"
            )
        for source in self.sources:
            share = 1 if isinstance(source.share, str) else source.share
            if source.max_epochs not in (None, 1) or not share > 0:
                raise ConfigError(
                    f"evaluators: source {source.name!r} has share {share:g} and max_epochs "
                    f"{source.max_epochs}; expected a share above 0 and no max_epochs, as "
                    "each document is used once"
                )
        return Mixture([replace(source, max_epochs=1) for source in self.sources])

    @property
    def writes(self) -> bool:
        """Whether the model generates texts, rather than scoring given ones."""
        return self.kind == "samples" or (
            self.task is not None and self.task.name not in SCORED_TASKS
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
        _above_zero("tensor_logs", self, "every")


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
    compile: bool = False
    """torch.compile the model's blocks."""
    deterministic: bool = True
    """Use only algorithms that give the same bits each time; an operation without one is an
    error.
    """
    seed: int = 0
    """Seed of the initial weights and of each step's random numbers."""
    context_parallel: int = 1
    """Processes that share each row, of which each has some of the slots and attends to the keys of
    all; for rows whose activations do not fit into one device. The loss and its gradients are those
    of the whole row.
    """
    shard: bool = False
    """With several processes: shard weights, gradients and optimizer states (FSDP2) instead of
    replicating them.
    """
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    """When the run is saved."""
    evaluators: Mapping[str, EvaluatorSettings] = field(default_factory=dict)
    """Evaluators by name."""
    log_every: int = 1
    """Steps between records in metrics.jsonl."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run's folder."""
    wandb: str | None = None
    """Also send metrics to this project of Weights & Biases."""
    tensor_logs: TensorLogSettings = field(default_factory=TensorLogSettings)
    """Tensors to log."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "continue_from", ContinueSettings.of(self.continue_from))
        writes = any(one.writes for one in self.evaluators.values())
        clash = [
            ("micro_sequences", self.micro_sequences > 1),
            ("lora", self.lora is not None),
            ("evaluators that write texts (samples, tasks but mmlu and bits_per_byte)", writes),
        ]
        if self.shard and (name := next((name for name, on in clash if on), None)):
            raise ConfigError(f"training.shard and {name} do not go together; choose one")
        if self.micro_sequences > 1 and (self.rows_per_pass or 1) > 1:
            raise ConfigError(
                "training.micro_sequences cuts rows and rows_per_pass joins them; choose one"
            )
        if self.loss is not None:
            self._check_own_loss()
        if self.context_parallel > 1:
            self._check_shared_rows()
        _above_zero(
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
