"""Settings of writing by unmasking. Imports no torch."""

from dataclasses import dataclass
from typing import Literal, final

from penstock.core.errors import ConfigError

REMASKINGS = ("low_confidence", "random")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Unmasking:
    """How masks are replaced.

    Raises:
        ConfigError: A number is out of range.
    """

    unmask_steps: int | None = None
    """Passes for each block; None: one for each of its tokens."""
    unmask_block: int | None = None
    """Tokens of a block; None: those of training, or 32 for a model of whole documents."""
    remasking: Literal["low_confidence", "random"] = "low_confidence"
    """Which masks stay in a step: those of the least likely choices, or any."""

    def __post_init__(self) -> None:
        for name in ("unmask_steps", "unmask_block"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise ConfigError(f"{name} must be a whole number of 1 or more, got {value!r}")
        if self.remasking not in REMASKINGS:
            raise ConfigError(
                f"remasking must be {' or '.join(REMASKINGS)}, got {self.remasking!r}"
            )
