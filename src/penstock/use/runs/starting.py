"""Starts and resumes trainings from Python: arguments and objects become a run file's settings, and
a trainer runs.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.core.terminal import visible
from penstock.core.urls import shown_values
from penstock.core.yaml_files import parse_yaml
from penstock.learn.distillation.settings import DistillationSettings
from penstock.learn.training.distributed import Ranks, local_device
from penstock.learn.training.metrics import Metrics
from penstock.learn.training.run_folder import RUN_FILE, RunFolder
from penstock.learn.training.settings import TrainSettings
from penstock.models.building import as_language_model
from penstock.models.own_model import OwnModel
from penstock.models.saving import load_model
from penstock.models.settings import ModelSettings
from penstock.plan.inputs.requirements import InputRequirements
from penstock.plan.loader.loader import Loader
from penstock.plan.loader.places import BEGINNING
from penstock.use.config.document import Document, Place, read_document
from penstock.use.config.models import check
from penstock.use.config.run_file import (
    PYTHON,
    DataSettings,
    RunSettings,
    load_run,
    resolved_text,
)
from penstock.use.config.summary import describe
from penstock.use.config.training import NOTHING, Given, make_trainer
from penstock.use.runs.keywords import TrainKeywords
from penstock.use.runs.opening import model_section
from penstock.use.runs.run_document import (
    OBJECT,
    RunDocument,
    check_names,
    data_section,
    plain,
    training_section,
)

if TYPE_CHECKING:
    from penstock.learn.training import Trainer
    from penstock.models import LanguageModel

Model = Any
"""A model of `ps.load_model` or `ps.build_model`, one of transformers, a torch module that meets
`penstock.models.own_model.OwnModule`, `ModelSettings`, or a name: a run's folder, a folder or hub
name of transformers, `module:function`; None with `continue_from`.
"""


def resume(
    run: RunFolder,
    module: object,
    model: Model | None,
    loader: Loader | None,
    changes: Mapping[str, object],
    progress: bool,
) -> Any:
    """Resume a run; see `Run.resume`. `module` is the run's own torch module, if it has one.

    Returns:
        The module that was trained, if it is the user's own.
    """
    if not (run.path / RUN_FILE).is_file():
        raise ConfigError(
            f"{run.path}: is a model, not a run, so there is nothing to resume; train it with "
            "ps.train"
        )
    check_names("Run.resume", changes, TrainKeywords, "model", "loader", "progress")
    kept = read_document(run.path / RUN_FILE).values
    objects = kept.pop(PYTHON, None) or {}
    section = _merged(kept.get("training") or {}, training_section(changes, "Run.resume"))
    missing = [
        name
        for name in objects
        if name.startswith("training.") and _at(section, name.split(".")[1:]) == OBJECT
    ]
    if missing:
        raise ConfigError(
            f"{run.path}: {missing[0]} was an object ({objects[missing[0]]}), which a run's "
            f"folder cannot hold; give it again: run.resume({missing[0].split('.')[1]}=…)"
        )
    if loader is None and any(name.startswith("data") for name in objects):
        raise ConfigError(
            f"{run.path}: its loader has objects, which a run's folder cannot hold; "
            "run.resume(loader=…)"
        )
    if model is None:
        model = _checkpointed(run, module) if "model" in objects else None
    values: JsonObject = {
        name: value for name, value in kept.items() if name not in ("training", "data", "model")
    }
    found: dict[Place, Any] = {}
    values |= _model_values(model, found) if model is not None else {"model": kept.get("model")}
    data = _data_of(loader) if loader is not None else None
    values["data"] = kept["data"] if data is None else data_section(data, found)
    values["training"] = plain(section, ("training",), found)
    document = RunDocument(values=values, objects=found)
    if data is None:
        data = check(
            Document(str(run.path / RUN_FILE), {"data": values["data"]}, {}), RunSettings
        ).data
    return _start("Run.resume", document, data, loader, str(run.path), True, progress)


def _checkpointed(run: RunFolder, module: Any) -> "LanguageModel":
    """The checkpoint's model, for a run that was given its model as an object; the checkpoint
    describes it fully.
    """
    return load_model(run.model, module=module)


def _at(section: object, place: Sequence[str]) -> Any:
    """The value of a run file at a place; an object on the way is returned itself."""
    for part in place:
        if isinstance(section, list):
            section = section[int(part)] if int(part) < len(section) else None
        elif isinstance(section, Mapping):
            section = section.get(part)
        else:
            break
    return section


def _merged(before: JsonMapping, changes: Mapping[str, object]) -> JsonObject:
    """`before` updated by `changes`; sections are merged setting by setting."""
    merged = {**before}
    for name, value in changes.items():
        inner = before.get(name)
        merged[name] = (
            {**inner, **value} if isinstance(inner, dict) and isinstance(value, dict) else value
        )
    return merged


def start(
    call: str,
    model: Model,
    loader: Loader | None,
    section: JsonObject,
    taught: JsonObject | None,
    output: str | Path,
    resume: bool,
    progress: bool,
) -> Any:
    """Train a model on a loader's rows, from the arguments of `call`.

    Args:
        call: The function that was called, for messages.
        model: See `Model`.
        loader: The loader, at its first step.
        section: The section `training` of a run file, with objects.
        taught: The section `teacher`; None: no teachers.
        output: The run's folder.
        resume: Resume from the newest checkpoint of the folder.
        progress: Show progress.

    Returns:
        The module that was trained, if it is the user's own.
    """
    data = _data_of(loader)
    objects: dict[Place, Any] = {}
    values = {
        "data": data_section(data, objects),
        **_model_values(model, objects),
        "training": plain(section, ("training",), objects),
        **({} if taught is None else {"teacher": plain(taught, ("teacher",), objects)}),
    }
    return _start(
        call, RunDocument(values=values, objects=objects), data, loader, output, resume, progress
    )


def start_file(
    run_file: str,
    assignments: Sequence[str],
    output: str | Path,
    resume: bool,
    progress: bool,
) -> Any:
    """Train as a run file describes.

    Args:
        run_file: The run file.
        assignments: Changes of its settings, such as `training.steps=100`.
        output: The run's folder.
        resume: Resume from the newest checkpoint of the folder.
        progress: Show what will be trained, and progress.

    Returns:
        The module that was trained, if it is the user's own.
    """
    with set_up(run_file, assignments, output, resume, progress=progress) as found:
        for name, value in describe(found.trainer, found.settings.model):
            found.say(f"{name}: {value}")
        train_to_end(found.trainer, parse_yaml(found.text, run_file)[1], progress=progress)
        found.trainer.ranks.barrier()
    return _own_module(found.trainer)


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """A trainer that a run file describes."""

    settings: RunSettings
    text: str
    """The run file, with the changes."""
    trainer: "Trainer"
    say: Callable[[str], None]


@contextmanager
def set_up(
    run_file: str,
    assignments: Sequence[str],
    output: str | Path | None,
    resume: bool,
    *,
    dry_run: bool = False,
    progress: bool = True,
) -> Iterator[SetUp]:
    """The trainer of a run file, while its ranks are together; with `dry_run` it writes nothing."""
    settings, text = load_run(run_file, assignments), resolved_text(run_file, assignments)
    training = settings.training or TrainSettings()
    with (
        _torch_as_it_was(),
        Ranks(local_device(training.device), training.context_parallel) as ranks,
    ):
        say = speak if ranks.is_first and progress else silent
        trainer = make_trainer(
            settings,
            run_file=run_file,
            text=text,
            output=None if output is None else Path(output),
            resume=resume,
            ranks=ranks,
            say=say,
            dry_run=dry_run,
        )
        yield SetUp(settings=settings, text=text, trainer=trainer, say=say)


def assignments_of(call: str, section: Mapping[str, Any]) -> list[str]:
    """Settings of the section `training` as changes of a run file.

    Raises:
        ConfigError: One is an object, which a run file cannot hold.
    """
    objects: dict[Place, Any] = {}
    values = plain(section, ("training",), objects)
    if objects:
        place = ".".join(map(str, next(iter(objects))))
        raise ConfigError(
            f"{call}: {place} is an object, which a run file cannot hold; name it "
            "(module:function), or give a model and a loader in place of the run file"
        )
    return [f"training.{name}={json.dumps(value)}" for name, value in _flat(values)]


def _flat(values: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of each setting; those of a section as `section.name`."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{inside}{name}.")
        else:
            yield f"{inside}{name}", value


def _model_values(model: Model, objects: dict[Place, Any]) -> JsonObject:
    """The key `model` of a run file; a model that is an object goes into `objects`."""
    if model is None:
        return {"model": None}
    if isinstance(model, str | Path):
        return {"model": model_section(model)}
    if isinstance(model, ModelSettings):
        return {"model": plain(model, ("model",), objects)}

    objects[("model",)] = as_language_model(model)
    return {"model": None}


LONGEST = 80
"""Characters of an object that an error shows."""


def _short(given: object) -> str:
    """An object in a few words."""
    shown = repr(given)
    return shown if len(shown) < LONGEST and "\n" not in shown else f"a {type(given).__name__}"


def _data_of(loader: object) -> DataSettings:
    """The section `data` that makes the same plan as a loader.

    Raises:
        ConfigError: It is not a loader, or not at step 0.
    """
    if not isinstance(loader, Loader):
        raise ConfigError(
            f"loader: found {_short(loader)}, expected a ps.Loader, such as ps.Loader('data/web', "
            "sequence_length=1024, rows_per_step=32); the model comes first, then the loader"
        )
    if loader.start != BEGINNING:
        raise ConfigError(
            "loader: begins at the place or the step of another (continue_from, first_step), "
            "which a run's folder cannot hold; make it without, and give ps.train "
            "continue_from=RUN"
        )
    if loader.step:
        raise ConfigError(
            f"loader: is at step {loader.step}, and a run begins at step 0 (or at its "
            "checkpoint); loader.seek(0), or make another"
        )
    needs = loader.requirements
    return DataSettings(
        sources=loader.mixture.sources,
        changes=loader.mixture.changes,
        loader=loader.settings,
        target_distances=needs.target_distances,
        attention=needs.attention or "document",
    )


def _wanted(loader: Loader) -> InputRequirements | None:
    """What the user requires of rows in addition to the model; None if the loader was made without
    requirements.
    """
    needs = loader.requirements
    return None if needs.asked_by.startswith("the default") else needs


def _start(
    call: str,
    document: RunDocument,
    data: DataSettings,
    loader: Loader | None,
    output: str | Path,
    resume: bool,
    progress: bool,
) -> Any:
    """Check everything, and train; gives the module that was trained, if it is the user's own."""
    training = document.settings("training", TrainSettings, call)
    teacher = (
        document.settings("teacher", DistillationSettings, call)
        if "teacher" in document.values
        else None
    )
    with (
        _torch_as_it_was(),
        Ranks(local_device(training.device), training.context_parallel) as ranks,
    ):
        given = NOTHING
        if loader is not None:
            _check_place(loader, ranks)
            datasets = zip(data.sources, loader.datasets, strict=True)
            data = replace(
                data, sources=[replace(source, path=dataset) for source, dataset in datasets]
            )
            given = Given(
                requirements=_wanted(loader),
                companion=loader.companion,
                filling=loader.loader_settings.filling,
            )
        given = replace(given, model=document.objects.get(("model",)))
        settings = RunSettings(
            data=data, model=_model_settings(document), training=training, teacher=teacher
        )
        say = speak if ranks.is_first and progress else silent
        trainer = make_trainer(
            settings,
            run_file=call,
            text=document.text(),
            output=Path(output),
            resume=resume,
            ranks=ranks,
            say=say,
            given=given,
        )
        train_to_end(trainer, document.values, progress=progress)
        ranks.barrier()
    return _own_module(trainer)


def _own_module(trainer: "Trainer") -> "torch.nn.Module | None":
    """The module of the user that was trained; None: the model is not the user's own."""
    return trainer.model.module if isinstance(trainer.model, OwnModel) else None


def _model_settings(document: RunDocument) -> ModelSettings | str | None:
    found = document.values["model"]
    if not isinstance(found, dict):
        return found  # type: ignore[no-any-return]
    values: JsonObject = {
        name: tuple(one) if isinstance(one, list) else one for name, one in found.items()
    }
    return ModelSettings.of(values)


def _check_place(loader: Loader, ranks: "Ranks") -> None:
    mine, theirs, shared = ranks.data, loader.data_parallel, ranks.context.size
    if mine != theirs:
        cure = "ps.DataParallel.from_env()" if shared == 1 else f"({mine.rank}, {mine.size})"
        raise ConfigError(
            f"loader: has the rows of rank {theirs.rank} of {theirs.size}, and this process "
            f"is rank {mine.rank} of "
            f"{mine.size}{'' if shared == 1 else f', as {shared} processes share each row'}; "
            f"pass data_parallel={cure} to ps.Loader"
        )


@contextmanager
def _torch_as_it_was() -> Iterator[None]:
    """Restore threads, determinism and the seed, which the trainer sets for the whole process."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    generator, workspace = torch.get_rng_state(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)
        torch.set_rng_state(generator)
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def train_to_end(trainer: "Trainer", config: JsonMapping, *, progress: bool = True) -> JsonObject:
    """Train, and write and show each step's record.

    Args:
        trainer: The trainer, new or resumed.
        config: The run file's values, which trackers show next to the curves.
        progress: Show progress.

    Returns:
        The last record; empty if there was nothing left to train.
    """
    watched = trainer.settings
    with Metrics(
        trainer.run,
        total_steps=trainer.steps,
        done=trainer.loader.step,
        every=watched.log_every,
        log=watched.trackers,
        log_project=watched.log_project,
        log_name=watched.log_name,
        config=shown_values(config),
        shown=trainer.ranks.is_first,
        progress=progress,
    ) as metrics:
        for record in trainer.train():
            metrics.see(record)
    return metrics.last


def speak(sentence: str) -> None:
    """Print a sentence on standard error."""
    print(f"penstock: {visible(sentence, lines=True)}", file=sys.stderr, flush=True)


def silent(sentence: str) -> None:
    """Print nothing; used on the other ranks."""
