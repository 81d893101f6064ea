"""What a run has taken from another run's checkpoint, and the settings that ask for it; read
without torch.

It is kept in the run's folder (`continued.json`) and in its checkpoints, so the new run needs the
other one only until its own first checkpoint.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Self, final, get_args

from penstock.core import formats
from penstock.core.errors import ConfigError, CorruptionError, FormatError, StateError
from penstock.core.json_values import JsonMapping
from penstock.data.stores.files import write_json
from penstock.plan.loader.places import Start

CONTINUED = "continued.json"

Part = Literal["weights", "optimizer", "schedule", "data"]
PARTS: tuple[Part, ...] = get_args(Part)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ContinueSettings:
    """A run with whose checkpoint a new run begins."""

    run: str
    """Its folder."""
    step: int | None = None
    """The step of the checkpoint; None: the newest complete one."""
    take: tuple[Part, ...] = PARTS
    """What is taken: `weights`; `optimizer`, its state of each parameter; `schedule`, the count of
    steps and tokens, so that steps, the learning rate and changes at steps go on; `data`, the place
    of each source. What is not taken starts fresh.
    """

    def __post_init__(self) -> None:
        if not self.run:
            raise ConfigError("continue_from.run is empty; give the folder of a run")
        if self.step is not None and self.step < 1:
            raise ConfigError(f"continue_from.step must be 1 or more, got {self.step}")
        object.__setattr__(self, "take", tuple(self.take))
        unknown = [part for part in self.take if part not in PARTS]
        if unknown or not self.take or len(set(self.take)) < len(self.take):
            raise ConfigError(
                f"continue_from.take must be one or several of {', '.join(PARTS)}, got "
                f"{', '.join(self.take) or 'none'}"
            )

    @classmethod
    def of(cls, given: "ContinueSettings | str | None") -> "ContinueSettings | None":
        """From what settings may hold: a run's folder alone stands for its newest checkpoint with
        all parts.
        """
        return cls(run=given) if isinstance(given, str) else given


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """What a run has taken from another one."""

    run: str
    """The other run's folder."""
    step: int
    """Of its checkpoint."""
    digest: str
    """SHA-256 of the checkpoint's manifest, which holds those of its files."""
    take: tuple[str, ...]
    """The parts that were taken."""
    place: JsonMapping | None
    """The place of its sources; None: it was not taken."""
    totals: JsonMapping
    """Tokens, targets and seconds of the run so far; empty: they were not taken."""
    learning_rate: float | None = None
    """Its peak, for a new run that takes the schedule and sets none."""

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """What a run's folder, or a checkpoint's, says; None: it began by itself.

        Raises:
            CorruptionError: It cannot be read.
        """
        path = folder / CONTINUED
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            formats.CONTINUED.check(values, path, cure="begin the run again")
            del values["format"]
            return cls(**{**values, "take": tuple(values["take"])})
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            if isinstance(error, FormatError):
                raise
            raise CorruptionError(
                f"{path}: cannot be read ({error}); copy it from a checkpoint of the run"
            ) from error

    def save(self, folder: Path) -> None:
        """Write it into a run's folder."""
        write_json(
            folder / CONTINUED,
            {**formats.CONTINUED.fields(), **asdict(self), "take": list(self.take)},
        )

    @property
    def start(self) -> Start:
        """Where the new run's loader begins."""
        return Start(step=self.step if "schedule" in self.take else 0, place=self.place)

    @property
    def settings(self) -> ContinueSettings:
        """The settings that give this checkpoint again."""
        return ContinueSettings(run=self.run, step=self.step, take=self.take)  # type: ignore[arg-type]

    def require(self, settings: ContinueSettings | None) -> None:
        """Refuse settings of a resumed run that name another beginning; they may leave it out.

        Raises:
            StateError: They do.
        """
        if settings is None:
            return
        given = replace(settings, step=settings.step or self.step)
        if (given.run, given.step, set(given.take)) != (self.run, self.step, set(self.take)):
            raise StateError(
                f"the run began from {self.run} at step {self.step} ({', '.join(self.take)}), "
                f"and continue_from is now {given.run} at step {given.step} "
                f"({', '.join(given.take)}); resume it without continue_from, or take another "
                "folder"
            )

    def report(self) -> list[str]:
        """What was taken and what was not, a sentence each."""
        left = [part for part in PARTS if part not in self.take]
        taken = f"begins with {', '.join(self.take)} of {self.run} at step {self.step:,}"
        return [taken + (f"; not taken, so started fresh: {', '.join(left)}" if left else "")]
