"""The settings of a loader: those of its plan, and how its steps are filled, prefetched and
kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, final

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping
from penstock.plan.inputs.requirements import EVERYTHING, Attention, InputRequirements
from penstock.plan.loader.companion import Companion
from penstock.plan.loader.data_parallel import DataParallel
from penstock.plan.loader.kept_settings import KeptSettings
from penstock.plan.loader.mixture import whole
from penstock.plan.loader.places import Start, read_place
from penstock.plan.loader.plan_settings import PlanSettings

_WHOLE = (
    "sequence_length",
    "seed",
    "window_rows",
    "patches_per_row",
    "documents_per_row",
    "max_document_tokens",
    "threads",
    "prefetch",
    "pad_id",
    "image_cache_bytes",
    "prefetch_bytes",
    "cache_bytes",
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings(PlanSettings, KeptSettings):
    """The keywords of `Loader`, of which this class is the source: names, types, defaults and
    descriptions.

    Raises:
        ConfigError: A setting is out of range, or two disagree.
        DistributedError: Several processes, and `data_parallel` was left out.
    """

    data_parallel: Any = None
    """This process's rank: `DataParallel`, (rank, size), or a torch DeviceMesh, whose dimensions
    for tensor, pipeline, expert and context parallelism give the same rows. May be left out only
    when there is one process. Always a `DataParallel` once the settings are made.
    """
    requirements: InputRequirements | None = None
    """What the model needs; everything in int32 when None."""
    attention: Attention | None = None
    """"row" lets the documents of a row see each other: positions and `cu_seqlens` then run over
    the row, while targets, loss weights and `document_ids` stay as they are. It is there to
    reproduce baselines. By default what `requirements` say, and "document" when they say nothing.
    Plan and states are the same.
    """
    pad_id: int = 0
    """Token id in padding; it is never a target."""
    threads: int = 1
    """Filling threads; 0 does all in the caller's thread."""
    prefetch: int = 2
    """Maximum steps that are prepared ahead; none are without threads."""
    pin_memory: bool | None = None
    """Write into page-locked memory; by default when CUDA is there and torch is already imported.
    Copy such rows with `penstock.to_torch`: the loader reuses a buffer once nothing references it,
    and the copy holds it until the GPU has read it.
    """
    companion: Companion | None = None
    """Makes something more of each row, in the filling threads; it becomes the row's
    `distillation`.
    """
    sum_over_ranks: Callable[[list[float]], Sequence[float]] | None = None
    """Sums numbers over all ranks in float64, such as an all-reduce: called with a list on every
    rank, for each step in order, by the thread that takes the step. With it, objectives written in
    Python run only for this rank's rows, and the ranks' loss weights are added up; without it, each
    rank runs them for all rows, because every rank needs the sum. It is not called if no source has
    such an objective.
    """
    continue_from: JsonMapping | None = None
    """Where the sources of another loader stood after one of its steps, `Step.place`: sources of
    the same name go on there, and new ones begin at their beginning. Shares, limits, objectives and
    the form of rows may be others; a dataset may have grown at its end. None: all begin at their
    beginning.
    """
    first_step: int = 0
    """Number of the first step, for changes of shares and a batch ramp that count on."""

    def __post_init__(self) -> None:
        for name in _WHOLE:
            if (value := getattr(self, name)) is not None or name not in _MAY_BE_NONE:
                object.__setattr__(self, name, whole(name, value))
        PlanSettings.__post_init__(self)
        if not 0 <= self.pad_id < 2**31:
            raise ConfigError(f"pad_id must be a token id, 0 … 2^31 − 1, got {self.pad_id}")
        object.__setattr__(self, "data_parallel", DataParallel.of(self.data_parallel))
        for _, rows in self.ramp.phases:
            self.data_parallel.rows(rows)
        if self.threads < 0 or self.prefetch < 1:
            raise ConfigError(
                f"threads must be at least 0 and prefetch at least 1, got {self.threads} and "
                f"{self.prefetch}"
            )
        if not isinstance(self.requirements, InputRequirements | None):
            raise ConfigError(
                f"requirements must be penstock.InputRequirements, got {self.requirements!r:.60}"
                + ("; call it: model.requirements()" if callable(self.requirements) else "")
            )
        self.merged_requirements().require_effect()
        self.check_sizes()
        object.__setattr__(self, "first_step", step_number(self.first_step))

    def merged_requirements(self) -> InputRequirements:
        """The requirements with `attention`, or all fields."""
        needed = EVERYTHING if self.requirements is None else self.requirements
        if self.attention is None:
            return needed
        asked_by = f"Loader(attention={self.attention!r})"
        return needed.merge(InputRequirements(asked_by=asked_by, attention=self.attention))

    @property
    def plan(self) -> PlanSettings:
        """Those of the plan, with no more documents in a row than the requirements have room
        for.
        """
        own = {field.name: getattr(self, field.name) for field in fields(PlanSettings)}
        return PlanSettings(**own).within(self.merged_requirements())

    @property
    def start(self) -> Start:
        """Where the plan begins."""
        place = None if self.continue_from is None else read_place(self.continue_from)
        return Start(step=self.first_step, place=place)

    @property
    def filling(self) -> dict[str, object]:
        """Those that change no plan and have values for any process: `pad_id`, `threads`, … and
        those of a cache.
        """
        names = ["pad_id", "threads", "prefetch", "pin_memory", "prefetch_bytes"]
        if self.image_cache is not None:
            names += ["image_cache", "image_cache_bytes"]
        if self.cache is not None or self.cache_bytes is not None:
            names += ["cache", "cache_bytes"]
        return {name: getattr(self, name) for name in names}

    def elsewhere(self) -> "LoaderSettings":
        """The same in another process, without calls that belong to this one."""
        return replace(self, companion=None, sum_over_ranks=None)


_MAY_BE_NONE = {field.name for field in fields(LoaderSettings) if field.default is None}


def step_number(value: object) -> int:
    """A number of a step.

    Raises:
        ConfigError: It is not a whole number, or below 0.
    """
    step = whole("step", value)
    if step < 0:
        raise ConfigError(f"steps are numbered from 0, got {step}")
    return step
