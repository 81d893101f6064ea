"""The sections of a run file."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final

from penstock.config.document import override, read_document
from penstock.config.models import check, model_of
from penstock.distillation.teacher_settings import DistillationSettings
from penstock.errors import ConfigError, FormatError
from penstock.inputs import EVERYTHING, Attention, InputRequirements
from penstock.loader import Companion, Loader, Mixture, PlanSettings, ShareChange, Source
from penstock.models import ModelSettings
from penstock.prepare.chat_settings import ChatSettings
from penstock.shards import open_dataset
from penstock.training import TrainSettings


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
    target_distances: int | None = None
    """Targets at distance 1 … this many (multi-token prediction); None: as many as the model predicts, or 1."""
    attention: Attention = "document"
    """Whom a token may see before it: its own document, or ("row", to reproduce baselines) all documents of its row."""

    def __post_init__(self) -> None:
        self.loader.require_effect(self.mixture)

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
    model: ModelSettings | str | None = None
    """What `penstock train` trains: a transformer of these numbers, `from:path`, which starts with the weights of a run
    or a folder, or `hf:path`, any causal model of transformers."""
    training: TrainSettings | None = None
    """How `penstock train` trains it."""
    teacher: DistillationSettings | None = None
    """Whom `penstock train` lets the model learn from besides the text, and how much."""
    chat: ChatSettings | None = None
    """How `penstock prepare --config` makes conversations training data; what is prepared does not need it again."""


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


def resolved_text(path: str | Path, assignments: Sequence[str] = ()) -> str:
    """The run file with all overrides in it, as YAML: what a run keeps."""
    import yaml

    values = override(read_document(path), list(assignments)).values
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text


def run_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a run file."""
    schema = model_of(RunSettings).model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "penstock run file"}


def make_loader(
    data: DataSettings,
    *,
    run_file: str = "run file",
    data_parallel: tuple[int, int] = (0, 1),
    threads: int = 0,
    requirements: InputRequirements = EVERYTHING,
    companion: Companion | None = None,
) -> Loader:
    """The loader that a run file describes.

    Args:
        data: The section `data`.
        run_file: Its file, as errors show it.
        data_parallel: (rank, size).
        threads: Filling threads; 0 does all in the caller's thread.
        requirements: What is wanted of a row; everything by default.
        companion: What else is made of each row.

    Raises:
        FormatError: The dataset of a source is missing or not one; the message says of which.
        CorruptionError: A dataset is damaged.
        ConfigError: A dataset needs more to be opened than a path, or sources disagree.
    """
    settings = {field.name: getattr(data.loader, field.name) for field in fields(data.loader)}
    distances = InputRequirements(asked_by="target_distances", target_distances=data.target_distances)
    data = open_sources(data, run_file)
    try:
        return Loader(
            data.mixture,
            **settings,
            requirements=requirements.merge(distances),
            attention=data.attention,
            data_parallel=data_parallel,
            threads=threads,
            companion=companion,
        )
    except (FormatError, ConfigError) as error:
        raise type(error)(f"{run_file}: {error}") from error


def open_sources(data: DataSettings, run_file: str = "run file") -> DataSettings:
    """The same with opened datasets in place of paths; what is open already stays as it is.

    Raises:
        FormatError: The dataset of a source is missing or not one; the message says of which.
        CorruptionError: A dataset is damaged.
        ConfigError: A dataset needs more to be opened than a path.
    """
    opened = []
    for source in data.sources:
        try:
            is_path = isinstance(source.path, str | Path)
            opened.append(replace(source, path=open_dataset(source.path)) if is_path else source)
        except (FormatError, ConfigError) as error:
            raise type(error)(f"{run_file}: source {source.name!r}: {error}") from error
    return replace(data, sources=opened)
