"""What flows into a loader: sources with their shares."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from penstock.errors import ConfigError
from penstock.loader.numbers import real, whole
from penstock.locations import local_path
from penstock.objectives import Causal, Objective
from penstock.sampling import SHUFFLE_CODES, Shuffle, integer_shares

TooLong = Literal["split", "drop", "truncate", "error"]
"""A document longer than a row. `split`: in parts, each a document of its own, and no target is lost. `drop`,
`truncate`: counted. `error`: refused, naming its origin."""

TOO_LONG: tuple[str, ...] = ("split", "drop", "truncate", "error")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShareChange:
    """From step `step` on, sources have these shares."""

    step: int
    """First step with the new shares, at least 1."""
    shares: dict[str, float]
    """Share by source name; sources that are not named keep theirs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", whole("a change of shares: step", self.step))
        what = f"the change at step {self.step}: share of"
        shares = {name: real(f"{what} {name!r}", share) for name, share in self.shares.items()}
        object.__setattr__(self, "shares", shares)


@final
@dataclass(frozen=True, slots=True)
class Source:
    """One dataset in a mixture."""

    path: Any
    """A dataset folder, a Megatron prefix, or an opened dataset."""
    share: float = 1.0
    """Share of the tokens, relative to the other sources'."""
    name: str = ""
    """Unique in the mixture; shuffle and keys depend on it. By default the last part of the path."""
    objective: Objective = field(default_factory=Causal)
    """What is trained on these documents."""
    max_epochs: float | None = None
    """Passes over the documents, at most; then the other sources go on in their proportions. None = no limit."""
    slice: tuple[float, float] = (0.0, 1.0)
    """The part of the documents in use, as fractions of their number, in the order on disk."""
    shuffle: Shuffle = "full"
    """Order in each epoch: `full`, `block` (for remote storage) or `none`."""
    too_long: TooLong | None = None
    """What happens to documents longer than a row; None is `split`. Not with packing `concat`, which cuts at rows."""

    def __post_init__(self) -> None:
        if not self.name:
            path = getattr(self.path, "name", None) if not isinstance(self.path, (str, Path)) else Path(self.path).name
            object.__setattr__(self, "name", str(path))
        where = f"source {self.name!r}"
        if isinstance(self.path, (str, Path)):
            local_path(self.path, f"the dataset of {where}")
        object.__setattr__(self, "share", real(f"{where}: share", self.share))
        if not (self.share >= 0 and math.isfinite(self.share)):
            raise ConfigError(f"{where}: share must be at least 0 and finite, got {self.share:g}")
        if self.max_epochs is not None:
            object.__setattr__(self, "max_epochs", real(f"{where}: max_epochs", self.max_epochs))
        if self.max_epochs is not None and not (self.max_epochs > 0 and math.isfinite(self.max_epochs)):
            raise ConfigError(
                f"{where}: max_epochs must be above 0, got {self.max_epochs:g}; leave it out for no limit"
            )
        try:
            edges = tuple(self.slice)
        except TypeError:
            edges = ()
        if len(edges) != 2:
            raise ConfigError(f"{where}: slice must be two fractions (begin, end), got {self.slice!r}")
        begin, end = (real(f"{where}: slice", edge) for edge in edges)
        object.__setattr__(self, "slice", (begin, end))
        if not 0 <= begin < end <= 1:
            raise ConfigError(f"{where}: slice must be fractions 0 ≤ begin < end ≤ 1, got {self.slice}")
        if isinstance(self.objective, type) or not hasattr(self.objective, "measure"):
            raise ConfigError(f"{where}: objective must be one such as penstock.Causal(), got {self.objective!r}")
        if self.shuffle not in tuple(SHUFFLE_CODES):
            raise ConfigError(f"{where}: shuffle must be one of {', '.join(SHUFFLE_CODES)}, got {self.shuffle!r}")
        if self.too_long is not None and self.too_long not in TOO_LONG:
            raise ConfigError(f"{where}: too_long must be one of {', '.join(TOO_LONG)}, got {self.too_long!r}")


@final
@dataclass(frozen=True, slots=True)
class Mixture:
    """Sources blended by share, token-exact; shares may change at given steps."""

    sources: Sequence[Source]
    """At least one; names are unique."""
    changes: Sequence[ShareChange] = ()
    """Changes of shares, by rising step."""

    def __post_init__(self) -> None:
        given: Any = self.sources
        if isinstance(given, (Source, str, Path)) or hasattr(given, "table") or not isinstance(given, Iterable):
            given = [given]
        sources = tuple(source if isinstance(source, Source) else Source(source) for source in given)
        object.__setattr__(self, "sources", sources)
        names = [source.name for source in self.sources]
        if not names:
            raise ConfigError("a mixture needs at least one source")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"two sources are called {twice[0]!r}; give each its own name, as order and keys depend on it"
            )
        steps = [change.step for change in self.changes]
        if steps != sorted(set(steps)) or (steps and steps[0] < 1):
            raise ConfigError(f"changes of shares must be at rising steps from 1 on, got {steps}")
        for change in self.changes:
            unknown = sorted(set(change.shares) - set(names))
            if unknown:
                raise ConfigError(
                    f"the change at step {change.step} names {unknown[0]!r}; sources are {', '.join(names)}"
                )

        for step, shares in self.phases():
            try:
                integer_shares(shares)
            except ConfigError as error:
                raise ConfigError(f"from step {step} on: {error}") from None

    def phases(self) -> list[tuple[int, list[float]]]:
        """(first step, shares in the order of the sources) of each stretch with the same shares, from step 0."""
        shares = {source.name: source.share for source in self.sources}
        phases = [(0, list(shares.values()))]
        for change in self.changes:
            shares.update(change.shares)
            phases.append((change.step, [float(share) for share in shares.values()]))
        return phases

    def shares_at(self, step: int) -> list[float]:
        """The shares in force at a step, in the order of the sources."""
        return next(shares for first, shares in reversed(self.phases()) if first <= step)
