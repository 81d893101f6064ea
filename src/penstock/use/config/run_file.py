"""The sections of a run file: loading, schema, the loader they describe, and chat settings.

Chat settings come from a YAML file of their own or from the section `chat` of a run file, plus the
command line. All of them are on one level, such as `mask_history: true`. Their classes are the only
place that defines names, types and defaults.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final

from penstock.core.errors import ConfigError, FormatError
from penstock.core.json_values import JsonObject
from penstock.core.yaml_files import write_yaml
from penstock.data.prepare.chat_settings import ChatSettings
from penstock.learn.distillation.settings import DistillationSettings
from penstock.learn.training import TrainSettings
from penstock.learn.training.continued import Continued
from penstock.learn.training.continuing import begin_from
from penstock.learn.training.run_folder import RUN_FILE
from penstock.models import ModelSettings
from penstock.plan.inputs import EVERYTHING, Attention
from penstock.plan.inputs.requirements import InputRequirements
from penstock.plan.loader import Companion, LoaderSettings, PlanSettings
from penstock.plan.loader.kept_settings import KeptSettings
from penstock.plan.loader.loader import Loader
from penstock.plan.loader.mixture import Mixture, ShareChange, Source
from penstock.plan.loader.places import BEGINNING, Start
from penstock.use.config.document import Document, override, read_document
from penstock.use.config.models import check, model_of

PYTHON = "python"
"""Section that a run started from Python has: place → the Python object that was passed there."""
LOOKED_AT = EVERYTHING.merge(InputRequirements(asked_by="a look at rows", trees=True))
"""What is asked for to show or count rows, without a model."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings(KeptSettings):
    """The data: sources and how they become rows."""

    sources: Sequence[Source]
    """At least one, with unique names. Paths are relative to the working directory."""
    changes: Sequence[ShareChange] = ()
    """Changes of shares, in order of steps."""
    loader: PlanSettings
    """How documents become rows and rows become steps."""
    target_distances: int | None = None
    """Number of target distances, 1 to n (multi-token prediction); None: as many as the model
    predicts, or 1.
    """
    attention: Attention = "document"
    """Which earlier tokens a token attends to: those of its document, or ("row", to reproduce
    baselines) of its row.
    """

    def __post_init__(self) -> None:
        self.loader.require_effect(self.mixture)
        self.check_sizes()

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
    """The model that `penstock train` trains: a transformer with these sizes; `from:path`, the
    weights of a run or a model folder; `hf:path`, any causal model of transformers; or
    `module:function`, your own.
    """
    training: TrainSettings | None = None
    """How `penstock train` trains it."""
    teacher: DistillationSettings | None = None
    """Teachers that the model also learns from, and the weights of their losses."""
    chat: ChatSettings | None = None
    """How `penstock prepare --config` turns conversations into training data. Training does not
    read it.
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Data:
    """The part of a run file to check."""

    data: DataSettings


def load_run(path: str | Path, assignments: Sequence[str] = ()) -> RunSettings:
    """Read a run file, apply `a.b=1` assignments, and check everything.

    Args:
        path: A YAML file.
        assignments: As given to `--set`, in order.

    Raises:
        ConfigError: Names file, line and key of each problem.
    """
    document = override(read_document(path), list(assignments))
    if isinstance(given := document.values.get(PYTHON), dict):
        named = "; ".join(f"{name}: {what}" for name, what in given.items())
        raise ConfigError(
            f"{path}: was started from Python with objects that a run file cannot hold "
            f"({named}); resume from Python: ps.train(model, loader, …, output=…, resume=True)"
        )
    settings: RunSettings = check(document, RunSettings)
    return settings


def run_file_of(target: str) -> str:
    """The run file in a run's folder; anything else stays as it is."""
    inside = Path(target) / RUN_FILE
    return str(inside) if inside.is_file() else target


def load_data(path: str | Path, assignments: Sequence[str] = ()) -> DataSettings:
    """The section `data` of a run file; of a run that was started from Python too, if its data are
    in the file.

    Args:
        path: A YAML file.
        assignments: As given to `--set`, in order.

    Raises:
        ConfigError: As `load_run`; or the run's data are objects that a run file cannot hold.
    """
    document = override(read_document(path), list(assignments))
    given = document.values.get(PYTHON)
    if not isinstance(given, dict):
        return load_run(path, assignments).data
    named = "; ".join(
        f"{name}: {what}" for name, what in given.items() if name.partition(".")[0] == "data"
    )
    if named:
        raise ConfigError(
            f"{path}: was started from Python with data that a run file cannot hold "
            f"({named}); look at its loader from Python: ps.inspect(loader)"
        )
    alone: _Data = check(replace(document, values={"data": document.values.get("data")}), _Data)
    return alone.data


def resolved_text(path: str | Path, assignments: Sequence[str] = ()) -> str:
    """The run file with all overrides applied, as YAML. A run's folder keeps this text."""
    values = override(read_document(path), list(assignments)).values
    return write_yaml(values, str(path))


def written_steps(path: str | Path, assignments: Sequence[str] = ()) -> int | None:
    """Steps of the training that a run file describes; None: it says nothing of them."""
    values = override(read_document(path), list(assignments)).values
    training = values.get("training")
    steps = training.get("steps") if isinstance(training, dict) else None
    return steps if isinstance(steps, int) else None


def written_start(path: str | Path, assignments: Sequence[str] = ()) -> Start:
    """Where the data of a run file begin: with `training.continue_from`, where those of another run
    stood.

    Args:
        path: A YAML file; that of a run knows the checkpoint that the run began with.
        assignments: As given to `--set`, in order.

    Raises:
        ConfigError: `continue_from` names no run with such a checkpoint.
    """
    if (continued := Continued.load(Path(path).parent)) is not None and Path(path).name == RUN_FILE:
        return continued.start
    document = override(read_document(path), list(assignments))
    training = document.values.get("training")
    given = training.get("continue_from") if isinstance(training, dict) else None
    if given is None:
        return BEGINNING
    alone = Document(document.name, {"continue_from": given}, document.lines, document.assigned)
    asked = check(alone, TrainSettings).beginning
    return BEGINNING if asked is None else begin_from(asked, lambda _: None).start


def run_schema() -> JsonObject:
    """The JSON Schema (draft 2020-12) of a run file."""
    schema = model_of(RunSettings).model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "penstock run file",
    }


def make_loader(
    data: DataSettings,
    *,
    run_file: str = "run file",
    data_parallel: tuple[int, int] = (0, 1),
    threads: int = 0,
    requirements: InputRequirements = LOOKED_AT,
    companion: Companion | None = None,
    **filling: Any,
) -> Loader:
    """The loader that a run file describes.

    Args:
        data: The section `data`.
        run_file: Name of its file, for errors.
        data_parallel: (rank, size).
        threads: Filling threads; 0 does all work in the caller's thread.
        requirements: Fields that rows must have; all by default.
        companion: Makes additional data for each row.
        filling: Other arguments of `Loader` that do not change the plan: prefetch, pin_memory,
            pad_id, sum_over_ranks.

    Raises:
        FormatError: A source's path is missing or not a dataset; the message names the source.
        CorruptionError: A dataset is damaged.
        ConfigError: A dataset cannot be opened from its path alone, or sources disagree.
    """
    settings = {field.name: getattr(data.loader, field.name) for field in fields(data.loader)}
    filling = {**{one.name: getattr(data, one.name) for one in fields(KeptSettings)}, **filling}
    distances = InputRequirements(
        asked_by="target_distances", target_distances=data.target_distances
    )
    data = open_sources(data, run_file)
    try:
        loader_settings = LoaderSettings(
            **settings,
            requirements=requirements.merge(distances),
            attention=data.attention,
            data_parallel=data_parallel,
            threads=threads,
            companion=companion,
            **filling,
        )
        return Loader.of(data.mixture, loader_settings)
    except (FormatError, ConfigError) as error:
        raise type(error)(f"{run_file}: {error}") from error


def open_sources(data: DataSettings, run_file: str = "run file") -> DataSettings:
    """The same settings with opened datasets in place of paths. Sources that are already open are
    kept.

    Raises:
        FormatError: A source's path is missing or not a dataset; the message names the source.
        CorruptionError: A dataset is damaged.
        ConfigError: A dataset cannot be opened from its path alone.
    """
    opened = []
    for source in data.sources:
        try:
            opened.append(replace(source, path=source.open(data.cache)))
        except (FormatError, ConfigError) as error:
            raise type(error)(f"{run_file}: source {source.name!r}: {error}") from error
    return replace(data, sources=opened)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """A run file of which only the section `chat` is read."""

    chat: ChatSettings
    """Chat settings."""


def load_chat_settings(
    path: str | Path | None,
    assignments: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
) -> ChatSettings:
    """Chat settings; each argument overrides the ones before it.

    Args:
        path: A YAML file, or None.
        assignments: `mask_history=true`, in order.
        options: Setting → value.

    Raises:
        ConfigError: Names file, line and key of each problem.
    """
    document = read_document(path) if path is not None else Document("chats", {}, {})
    document = override(document, list(assignments))
    document = Document(
        document.name, {**document.values, **(options or {})}, document.lines, document.assigned
    )
    settings: ChatSettings = check(document, ChatSettings)
    if "template" not in document.values:
        raise ConfigError(
            "chat settings are given without a template; set template to a .jinja file or auto"
        )
    return settings


def load_chat_section(
    path: str | Path, assignments: Sequence[str] = (), options: Mapping[str, object] | None = None
) -> ChatSettings:
    """Chat settings from the section `chat` of a run file. Other sections are not read.

    Args:
        path: The run file.
        assignments: `chat.mask_history=true` or `mask_history=true`, in order.
        options: Setting → value; overrides the assignments.

    Raises:
        ConfigError: Names file, line and key of each problem.
    """
    own = [text if text.startswith("chat.") else f"chat.{text}" for text in assignments]
    document = override(read_document(path), own)
    if "chat" not in document.values:
        raise ConfigError(
            f"{path}: no section `chat`; expected one with chat settings, such as `chat: "
            "{template: auto}`"
        )
    section = Document(
        document.name, {"chat": document.values["chat"]}, document.lines, document.assigned
    )
    settings: _Section = check(section, _Section)
    return settings.chat.merge(options or {})
