"""The learning rate of each step, as a share of its peak: a pure function of the step, so that nothing is to be saved.

    share
      1 |    ________________        wsd: warm-up, stable, decay over the last fraction of the steps
        |   /                \\
        |  /                  \\
        | /                    \\
        0 +--------------------------> step

Imports no torch.
"""

import math
from dataclasses import dataclass
from typing import Literal, final

from penstock.errors import ConfigError

USUAL_WARMUP = 100
"""Steps of warm-up where nothing else is said."""
Shape = Literal["constant", "linear", "cosine", "wsd"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """How the learning rate goes up and down."""

    shape: Shape = "wsd"
    """After the warm-up: `constant`; `linear` or `cosine` down to `floor`; `wsd`: constant, then linear down to `floor`
    over the last `decay` of the steps (Hu et al. 2024, MiniCPM, arXiv:2404.06395), so a run can go on from before."""
    warmup_steps: int | None = None
    """Steps over which the rate rises linearly; the first has 1 / warmup_steps of the peak, not 0. None: 100, or all
    steps of a shorter run."""
    decay: float = 0.2
    """`wsd`: share of all steps, at the end, over which the rate falls."""
    floor: float = 0.0
    """Share of the peak that is reached after the last step."""

    def __post_init__(self) -> None:
        if self.shape not in ("constant", "linear", "cosine", "wsd"):
            raise ConfigError(f"schedule.shape must be constant, linear, cosine or wsd, got {self.shape!r}")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ConfigError(f"schedule.warmup_steps must be 0 or more, got {self.warmup_steps}")
        for name in ("decay", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"schedule.{name} must be a share from 0 to 1, got {getattr(self, name)}")

    def check_length(self, total_steps: int) -> None:
        """Refuse a warm-up that is longer than the run, whose peak would never come.

        Raises:
            ConfigError: It is.
        """
        if self.warmup_steps is not None and self.warmup_steps > total_steps:
            raise ConfigError(
                f"training.schedule.warmup_steps is {self.warmup_steps}, and the run has {total_steps} steps; lower "
                "it, or leave it out"
            )

    def share(self, step: int, total_steps: int) -> float:
        """Share of the peak rate at a step.

        Args:
            step: Number of the step, from 0.
            total_steps: Steps of the whole run.

        Returns:
            In (0, 1], down to `floor` at `step == total_steps`.
        """
        warmup = min(USUAL_WARMUP if self.warmup_steps is None else self.warmup_steps, total_steps)
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
