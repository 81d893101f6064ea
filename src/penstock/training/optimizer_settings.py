"""Which optimizer, and with which numbers; the section `optimizer` of a run file. Imports no torch."""

from dataclasses import dataclass
from typing import Literal, final

from penstock.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW, or Muon for the matrices inside the model with AdamW for the rest."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`adamw` (Loshchilov and Hutter 2019) or `muon` (Jordan et al. 2024; updates scaled as in Liu et al. 2025,
    arXiv:2502.16982, so that the rate and decay that suit AdamW suit it too)."""
    learning_rate: float = 3e-3
    """Peak learning rate; 1e-3 to 3e-3 suit models of some million parameters, large ones want less."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the running mean of gradients and of their squares."""
    eps: float = 1e-8
    """Added to AdamW's root of the mean square."""
    weight_decay: float = 0.1
    """Share of a weight taken away each step, times the learning rate; of matrices only."""
    decay_embeddings: bool = False
    """Whether embeddings and an output matrix decay as well. Norms and biases never do."""
    momentum: float = 0.95
    """Muon's (Nesterov) momentum."""
    clip_norm: float | None = 1.0
    """Gradients whose norm over all parameters is above this are scaled down to it; None: never."""
    fused: bool | None = None
    """One kernel for all of AdamW's arithmetic; None: where the device has it. It changes the last bits."""

    def __post_init__(self) -> None:
        if self.kind not in ("adamw", "muon"):
            raise ConfigError(f"optimizer.kind must be adamw or muon, got {self.kind!r}")
        for name in ("learning_rate", "eps"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"optimizer.{name} must be above 0 and finite, got {getattr(self, name)}")
        if not self.weight_decay >= 0:
            raise ConfigError(f"optimizer.weight_decay must be 0 or more, got {self.weight_decay}")
        for name, value in (("betas", self.betas[0]), ("betas", self.betas[1]), ("momentum", self.momentum)):
            if not 0 <= value < 1:
                raise ConfigError(f"optimizer.{name} must be from 0 to below 1, got {value}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"optimizer.clip_norm must be above 0, got {self.clip_norm}; leave it out to never clip")
