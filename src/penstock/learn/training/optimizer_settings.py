r"""The optimizer, and the schedule of its learning rate: `training.optimizer` and `.schedule`.

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, final

from penstock.core.errors import ConfigError

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
