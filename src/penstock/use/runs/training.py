"""Train and distill from Python: the same trainer, settings and run folder as `penstock train`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Unpack, overload

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject
from penstock.learn.distillation.settings import (
    DEFAULT_LOSS,
    DistillationSettings,
    LossSettings,
    TeacherSettings,
)
from penstock.plan.loader.loader import Loader
from penstock.use.runs.given import DistillLoss, TeacherLike
from penstock.use.runs.keywords import DistillKeywords, TrainKeywords
from penstock.use.runs.run import Run, open_run
from penstock.use.runs.run_document import described, plain, training_section
from penstock.use.runs.starting import Model, assignments_of, start, start_file

_OF_TEACHER = [one.name for one in fields(DistillationSettings) if one.name != "teachers"]


@overload
def train(
    model: Model,
    loader: Loader,
    *,
    output: str | Path,
    resume: bool = False,
    progress: bool = True,
    **settings: Unpack[TrainKeywords],
) -> Run: ...
@overload
def train(
    model: str | Path,
    *,
    output: str | Path,
    resume: bool = False,
    progress: bool = True,
    assignments: Sequence[str] = (),
    **settings: Unpack[TrainKeywords],
) -> Run: ...
def train(
    model: Model,
    loader: Loader | None = None,
    *,
    output: str | Path,
    resume: bool = False,
    progress: bool = True,
    assignments: Sequence[str] = (),
    **settings: Unpack[TrainKeywords],
) -> Run:
    """Train a model on a loader's rows, or as a run file describes, into a run's folder that
    `penstock` reads.

    ```python
    ps.train("hf:Qwen/Qwen3-0.6B", loader, steps=2000, learning_rate=1e-5, output="runs/a")
    ps.train("run.yaml", steps=2000, output="runs/b")
    ```

    Under `torchrun` each process calls it with its own rank's loader (`data_parallel`). SIGTERM or
    Ctrl-C ends the run after the current step, with a checkpoint; a second Ctrl-C ends it at once.
    A model object is trained in place.

    Args:
        model: The model with its initial weights; see `Model`. None: that of the run in
            `continue_from`. Without a loader, a run file.
        loader: Source of the rows, at its first step; the model's needs are added to its
            requirements.
        output: The run's folder, new or to resume.
        resume: Resume from the newest complete checkpoint of the folder; start a new run if there
            is none.
        progress: Show progress.
        assignments: Changes of a run file's settings, such as `data.loader.seed=7`.
        settings: The section `training` of a run file, see `TrainSettings`. Settings of `optimizer`
            and `schedule` may be given directly, such as learning_rate and warmup_steps.

    Raises:
        ConfigError: An argument is unknown or out of range, or model, loader and settings do not
            fit together.
        IsolationError: Rows hold several documents, and the model would let them see each other.
        OutputError: The folder holds something else, or a run and `resume` is false.
        StateError: The run in the folder has another plan or model.
    """
    section = training_section(
        settings, "ps.train", ("output", "resume", "progress", "assignments")
    )
    if loader is None and isinstance(model, str | Path):
        changes = [*assignments, *assignments_of("ps.train", section)]
        module = start_file(_run_file(model), changes, output, resume, progress)
    elif assignments:
        raise ConfigError("ps.train: assignments change a run file, and there is none")
    else:
        module = start("ps.train", model, loader, section, None, output, resume, progress)
    return open_run(output, module=module)


def _run_file(given: str | Path) -> str:
    if (Path(given) / "run.yaml").is_file():
        raise ConfigError(
            f"{given}: is the folder of a run; to go on with it, call "
            f"ps.open_run({str(given)!r}).resume(), or give {given}/run.yaml, the folder "
            "as output, and resume=True (--resume)"
        )
    if Path(given).suffix not in (".yaml", ".yml", ".json") and not Path(given).is_file():
        raise ConfigError(
            f"ps.train: the loader is missing, and {str(given)!r} is not a run file (.yaml); give "
            "ps.train(model, loader, …), or ps.train(run_file, …)"
        )
    return str(given)


def distill(
    model: Model,
    loader: Loader,
    *,
    teacher: TeacherLike | Run | Sequence[TeacherLike | Run],
    loss: DistillLoss | None = None,
    output: str | Path,
    resume: bool = False,
    progress: bool = True,
    **settings: Unpack[DistillKeywords],
) -> Run:
    """Train a model with one or several teachers, with the same tokenizer or others.

    Args:
        model: As for `train`.
        loader: As for `train`; its datasets store their tokenizer.
        teacher: A run or its folder, a folder of transformers with its tokenizer, settings
            (`TeacherSettings`), or several.
        loss: The loss for teachers without their own: kl, p_kl, h_kl, alm, uld, or `LossSettings`.
        output: The run's folder.
        resume: As for `train`.
        progress: As for `train`.
        settings: Those of `train`, and of the section `teacher` of a run file
            (`DistillationSettings`).

    Raises:
        ConfigError: As for `train`, or a loss does not fit a teacher's tokenizer.
        FormatError: There is no teacher at a path.
        IsolationError: As for `train`, for the model or a teacher.
    """
    given = dict(settings)
    taught = {name: given.pop(name) for name in _OF_TEACHER if name in given}
    if "loss" in given or callable(loss):
        raise ConfigError("ps.distill: a loss of your own does not go with a teacher; use ps.train")
    listed: Iterable[object] = [teacher]
    if isinstance(teacher, Iterable) and not isinstance(teacher, str | Mapping):
        listed = teacher
    taught["teachers"] = [_teacher(each, loss) for each in listed]
    section = training_section(
        given, "ps.distill", ("output", "resume", "progress", "teacher", "loss", *_OF_TEACHER)
    )
    module = start("ps.distill", model, loader, section, taught, output, resume, progress)
    return open_run(output, module=module)


def _teacher(given: object, loss: DistillLoss | None) -> JsonObject:
    if isinstance(given, Run):
        given = given.path
    if isinstance(given, str | Path):
        given = {"model": str(given)}
    if not isinstance(given, TeacherSettings | Mapping):
        shown = "None" if given is None else described(given)
        raise ConfigError(
            f"ps.distill: a teacher is {shown}; expected a run or its folder, a folder of "
            "transformers with its tokenizer, settings (TeacherSettings), or a list of these; a "
            "model in memory is saved first, as with save_pretrained"
        )
    found: JsonObject = plain(given, (), {})
    if isinstance(given, TeacherSettings) and given.loss is not DEFAULT_LOSS:
        found["loss"] = given.loss
    elif loss is not None and "loss" not in found:
        found["loss"] = {"kind": loss} if isinstance(loss, str) else loss
    if isinstance(found.get("loss"), LossSettings):
        # Written even if it is the default, which `plain` would leave out.
        found["loss"] = {"kind": found["loss"].kind, **plain(found["loss"], (), {})}
    return found
