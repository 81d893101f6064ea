"""The sections of a run file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from penstock.config.document import override, read_document
from penstock.config.models import check, model_of
from penstock.loader import Mixture, PlanSettings, ShareChange, Source


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """What flows: the sources and how they become rows."""

    sources: Sequence[Source]
    """At least one; names are unique. Paths are relative to the working directory."""
    changes: Sequence[ShareChange] = ()
    """Changes of shares, by rising step."""
    loader: PlanSettings
    """How documents become rows and rows become steps."""
    target_distances: int = 1
    """Targets at distance 1 … this many (multi-token prediction)."""

    def __post_init__(self) -> None:
        _ = self.mixture

    @property
    def mixture(self) -> Mixture:
        """The sources with their changes of shares."""
        return Mixture(self.sources, self.changes)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """A run file."""

    data: DataSettings
    """Sources with their shares, and the form of rows and steps."""


def load_run(path: str | Path, assignments: Sequence[str] = ()) -> RunSettings:
    """Read a run file, apply `a.b=1` assignments, and check everything.

    Args:
        path: A YAML file.
        assignments: As given to `--set`, in order.

    Raises:
        ConfigError: With the file, line and key of everything that is wrong.
    """
    settings: RunSettings = check(override(read_document(path), list(assignments)), RunSettings)
    return settings


def run_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a run file."""
    schema = model_of(RunSettings).model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "penstock run file"}
