"""An evaluation during training: the entries of the section `evaluators` of a run file."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal, final

from penstock.core.errors import ConfigError, require_above_zero
from penstock.learn.evaluation.tasks import TaskSettings
from penstock.learn.generation.settings import Sampling
from penstock.plan.loader.mixture import Mixture, Source
from penstock.plan.objectives import Objective
from penstock.plan.objectives.objective import Causal

_KEYS = {
    "loss": ("data", "slice", "objective", "sources", "rows", "patience", "worst"),
    "preference": ("data", "slice", "sources", "rows", "patience"),
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
    patience: int | None = None
    """loss, preference: end the run when this many evaluations in a row gave no lower loss than
    the best before; None: never.
    """
    worst: int = 0
    """loss: name this many documents with the highest loss a target, and say which share of all
    targets the model predicts right.
    """
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
        require_above_zero("evaluators", self, "every", "rows", "patience", "max_tokens")
        if self.kind not in ("loss", "preference", "samples", "task", "own"):
            raise ConfigError(
                "evaluators: kind must be loss, preference, samples, task or own, got "
                f"{self.kind!r}"
            )
        if self.worst < 0:
            raise ConfigError(f"evaluators.worst must be 0 or more, got {self.worst!r}")
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
