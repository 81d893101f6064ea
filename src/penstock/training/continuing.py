"""A new run that begins with named parts of another run's checkpoint: `training.continue_from`.

What was taken is kept in the run's folder (`continued.json`) and in its checkpoints, so the new run needs the other one
only until its own first checkpoint.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, final, get_args

from penstock.core.errors import ConfigError, CorruptionError, FormatError, StateError
from penstock.loader.places import Start
from penstock.shards.files import write_json
from penstock.training.checkpoints import MANIFEST, Checkpoint, digest, load_checkpoint, newest_complete

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.models import LanguageModel
    from penstock.training.optimizers import Optimizers

CONTINUED = "continued.json"
MODEL, STATE, OPTIMIZER, SHARDED_OPTIMIZER = "model", "state.json", "optimizer.safetensors", "optimizer.dcp"
"""Parts of a checkpoint."""
FORMAT = 1
_NAMED = 6
"""Parameters that a message names."""

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
    """What is taken: `weights`; `optimizer`, its state of each parameter; `schedule`, the count of steps and tokens,
    so that steps, the learning rate and changes at steps go on; `data`, the place of each source. What is not taken
    begins anew."""

    def __post_init__(self) -> None:
        if not self.run:
            raise ConfigError("continue_from.run is empty; give the folder of a run")
        if self.step is not None and self.step < 1:
            raise ConfigError(f"continue_from.step must be 1 or more, got {self.step}")
        object.__setattr__(self, "take", tuple(self.take))
        unknown = [part for part in self.take if part not in PARTS]
        if unknown or not self.take or len(set(self.take)) < len(self.take):
            raise ConfigError(
                f"continue_from.take must be one or several of {', '.join(PARTS)}, got {', '.join(self.take) or 'none'}"
            )

    @classmethod
    def of(cls, given: "ContinueSettings | str | None") -> "ContinueSettings | None":
        """From what settings may hold: a run's folder alone stands for its newest checkpoint with all parts."""
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
    place: Mapping[str, Any] | None
    """The place of its sources; None: it was not taken."""
    totals: Mapping[str, Any]
    """Tokens, targets and seconds of the run so far; empty: they were not taken."""
    learning_rate: float | None = None
    """Its peak, for a new run that takes the schedule and sets none."""

    @classmethod
    def begin(cls, settings: ContinueSettings, say: Callable[[str], None]) -> Self:
        """Find the checkpoint, and what of it the new run needs to know.

        Raises:
            ConfigError: There is no such run or checkpoint.
            StateError: The checkpoint does not say where its data stood.
            CorruptionError: It is damaged.
        """
        checkpoint = _find(Path(settings.run), settings.step, say)
        state, place = checkpoint.value(STATE), None
        if "data" in settings.take:
            place = state.get("place")
            if place is None:
                raise StateError(
                    f"{checkpoint.folder}: does not say which documents were seen, as it was saved by an earlier "
                    "version: resume that run for a step, or leave data out of continue_from.take"
                )
        schedule = "schedule" in settings.take
        return cls(
            run=settings.run,
            step=checkpoint.step,
            digest=digest(checkpoint.folder / MANIFEST),
            take=settings.take,
            place=place,
            totals=state["totals"] if schedule else {},
            learning_rate=_learning_rate(checkpoint.folder) if schedule else None,
        )

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
            if values.pop("format") != FORMAT:
                raise FormatError(f"{path}: is of another version of penstock; use the one that wrote it")
            return cls(**{**values, "take": tuple(values["take"])})
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            if isinstance(error, FormatError):
                raise
            raise CorruptionError(f"{path}: cannot be read ({error}); copy it from a checkpoint of the run") from error

    def save(self, folder: Path) -> None:
        """Write it into a run's folder."""
        write_json(folder / CONTINUED, {"format": FORMAT, **asdict(self), "take": list(self.take)})

    @property
    def start(self) -> Start:
        """Where the new run's loader begins."""
        return Start(step=self.step if "schedule" in self.take else 0, place=self.place)

    @property
    def settings(self) -> ContinueSettings:
        """The settings that give this checkpoint again."""
        return ContinueSettings(run=self.run, step=self.step, take=self.take)  # type: ignore[arg-type]

    def checkpoint(self) -> Checkpoint:
        """The checkpoint, as it was when the run began.

        Raises:
            StateError: It is gone, or another one is in its place.
        """
        try:
            found = _find(Path(self.run), self.step, lambda _: None)
        except (ConfigError, CorruptionError) as error:
            raise StateError(f"{error}. The new run has no checkpoint of its own yet; begin it again") from error
        if digest(found.folder / MANIFEST) != self.digest:
            raise StateError(
                f"{found.folder}: is not the checkpoint that the run began with, which had the same step; begin the "
                "new run again"
            )
        return found

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
                f"the run began from {self.run} at step {self.step} ({', '.join(self.take)}), and continue_from is now "
                f"{given.run} at step {given.step} ({', '.join(given.take)}); resume it without continue_from, or take "
                "another folder"
            )

    def report(self) -> list[str]:
        """What was taken and what was not, a sentence each."""
        left = [part for part in PARTS if part not in self.take]
        taken = f"begins with {', '.join(self.take)} of {self.run} at step {self.step:,}"
        return [taken + (f"; not taken, so begun anew: {', '.join(left)}" if left else "")]


def _find(run: Path, step: int | None, say: Callable[[str], None]) -> Checkpoint:
    folder = run / "checkpoints"
    if re.fullmatch(r"step-\d{8,}", run.name):
        raise ConfigError(f"continue_from: {run} is a checkpoint; give its run, and its step: {{run: …, step: …}}")
    there = sorted(int(found[1]) for path in folder.glob("step-*") if (found := re.fullmatch(r"step-(\d+)", path.name)))
    if not there:
        raise ConfigError(f"continue_from: {run} is no run with a checkpoint; give the folder of one")
    if step is None:
        newest = newest_complete(folder, say=say)
        if newest is None:
            raise ConfigError(f"continue_from: {folder}: no checkpoint is complete; train that run on, or restore one")
        return newest
    if step not in there:
        raise ConfigError(
            f"continue_from: {run} has no checkpoint of step {step}; there are {', '.join(map(str, there))}"
        )
    return load_checkpoint(folder / f"step-{step:08d}")


def _learning_rate(folder: Path) -> float | None:
    """The peak learning rate in the run file of a checkpoint."""
    from penstock.core.yaml_files import read_yaml
    from penstock.training.run_folder import RUN_FILE

    values = read_yaml(folder / RUN_FILE)[1] if (folder / RUN_FILE).is_file() else {}
    for name in ("training", "optimizer", "learning_rate"):
        values = values.get(name) if isinstance(values, dict) else None
    return values if isinstance(values, float) else None


def matching_weights(checkpoint: Checkpoint, model: "LanguageModel", cure: str) -> dict[str, "Tensor"]:
    """The weights of a checkpoint, all with the names and shapes of a model.

    Raises:
        StateError: One has not, or a setting differs that shapes do not show; ends with `cure`.
    """
    from penstock.models.own_model import OwnModel
    from penstock.models.saving import load_model, own_weights

    module: Any = model
    unseen: list[tuple[str, Any, Any]] = []
    if isinstance(model, OwnModel):
        # The user's module defines the computation; the folder holds only weights.
        weights = own_weights(checkpoint.part(MODEL))
    else:
        saved: Any = load_model(checkpoint.part(MODEL), device="cpu")
        weights, unseen = saved.state_dict(), _unseen_by_weights(saved, model)
    present = module.state_dict()
    shapes = [
        (f"weight {name}", *(list(w[name].shape) if name in w else "missing" for w in (weights, present)))
        for name in sorted(weights.keys() | present.keys())
    ]
    for what, then, now in [*shapes, *unseen]:
        if then != now:
            raise StateError(f"{checkpoint.folder}: is of another model: {what} is {then} there, {now} now; {cure}")
    return weights


def _unseen_by_weights(saved: "LanguageModel", model: "LanguageModel") -> list[tuple[str, Any, Any]]:
    """Settings that change what a model computes but not the shapes of its weights: (setting, saved, present)."""
    settings = [getattr(one, "settings", None) for one in (saved, model)]
    found = []
    for name in ("heads", "rope_theta", "norm_eps", "sliding_window"):
        then, now = (getattr(one, name, None) for one in settings)
        found.append((f"model.{name}", then, now))
    return [*found, ("training.lora", saved.lora, model.lora)]


def take_weights(checkpoint: Checkpoint, model: "LanguageModel") -> None:
    """Load the weights of another run's checkpoint.

    Raises:
        StateError: They are not those of the model.
    """
    cure = (
        "give the model as that run had it; or begin with model: from:RUN, which merges LoRA and fits new tokens, and "
        "leave weights out of continue_from.take"
    )
    module: Any = model
    module.load_state_dict(matching_weights(checkpoint, model, cure))


def take_optimizer(
    checkpoint: Checkpoint, optimizers: "Optimizers", kind: str, beside: Sequence[str], say: Callable[[str], None]
) -> None:
    """Load an optimizer's state; a parameter that is new or has another shape begins without one, and is named.

    Args:
        checkpoint: Of another run, sharded or whole.
        optimizers: Without a state yet.
        kind: Its kind.
        beside: Parameters that are not of the model; they begin anew.
        say: Called with what was taken.

    Raises:
        StateError: The state is of another kind of optimizer.
    """
    from penstock.training.distributed import share_out

    then = checkpoint.value(STATE)["optimizer"]
    if then != kind:
        raise StateError(
            f"{checkpoint.folder}: continue_from takes the optimizer's state, and the optimizer is {kind} now, {then} "
            "then; take that, or leave optimizer out of continue_from.take"
        )
    optimizers.fill_state()
    present = optimizers.state_tensors()
    sharded = (checkpoint.folder / SHARDED_OPTIMIZER).exists()
    whole = {} if sharded else checkpoint.tensors(OPTIMIZER)
    shapes = checkpoint.shapes(SHARDED_OPTIMIZER) if sharded else {name: one.shape for name, one in whole.items()}
    names = dict.fromkeys(key.rsplit("/", 1)[0] for key in present)
    fresh = {
        name
        for name in names
        if name in beside
        or any(tuple(one.shape) != tuple(shapes.get(key, (-1,))) for key, one in present.items() if _of(key) == name)
    }
    for key, one in present.items():
        if _of(key) in fresh:
            # As before a first step, which `fill_state` has counted.
            one.zero_()
    taken = {key: one for key, one in present.items() if _of(key) not in fresh}
    if sharded:
        checkpoint.read_into(SHARDED_OPTIMIZER, taken)
    else:
        share_out(whole, taken)
    say(f"optimizer: the state of {len(names) - len(fresh):,} of {len(names):,} parameters is taken")
    left = {_of(key) for key in shapes} - names.keys()
    for what, those in (("begin without a state, new or of another shape", fresh), ("are no longer trained", left)):
        if those:
            more = f" and {len(those) - _NAMED:,} more" if len(those) > _NAMED else ""
            say(f"optimizer: parameters that {what}: {', '.join(sorted(those)[:_NAMED])}{more}")


def _of(key: str) -> str:
    return key.rsplit("/", 1)[0]
