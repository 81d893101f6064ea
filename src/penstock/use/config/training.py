"""From a run file to a trainer: assembles datasets, model, loader and run folder.

Cheap checks come first: the run's folder, packages and datasets; then the model, the evaluators
with their files and sandbox, the teachers (their projection can take minutes), and the loader. The
run's folder is created only after all of them succeed. A dry run does the same up to that point,
reads the checkpoint that it would resume, and writes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, final

from penstock.core.errors import ConfigError, StateError
from penstock.core.folders import check_unlocked
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.core.urls import shown_urls
from penstock.core.yaml_files import parse_yaml, read_yaml, write_yaml
from penstock.learn.training import Trainer, TrainSettings
from penstock.learn.training.agreement import shared_settings
from penstock.learn.training.checks import check_writers, freeze
from penstock.learn.training.continued import Continued
from penstock.learn.training.continuing import begin_from, checkpoint_of
from penstock.learn.training.determinism import prepare_torch
from penstock.learn.training.evaluators import make_evaluators
from penstock.learn.training.loss_groups import LossGroups
from penstock.learn.training.processes import in_step
from penstock.learn.training.restoring import take_weights
from penstock.learn.training.run_folder import (
    CHECKPOINTS,
    LOCK,
    RUN_FILE,
    begin_run,
    change_run,
    check_run,
)
from penstock.learn.training.run_state import count_steps
from penstock.models import use_recurrent
from penstock.models.facts import DiffusionFacts, require_token_by_token
from penstock.models.four_bits import four_bits_in_words, require_bitsandbytes
from penstock.models.lora.lora import add_lora
from penstock.plan.inputs.requirements import InputRequirements
from penstock.plan.loader import Companion
from penstock.plan.loader.agreement import check_values
from penstock.plan.objectives.diffusion import BlockDiffusion, MaskedDiffusion
from penstock.use.config.initial_models import GIVEN, TRAINED, initial_model, is_gone, widen
from penstock.use.config.run_file import RunSettings, make_loader, open_sources
from penstock.use.config.teachers import open_teachers
from penstock.use.config.vocabularies import frozen_rows
from penstock.use.inspection.targets import target_warnings

if TYPE_CHECKING:
    from penstock.data.shards import Corpus
    from penstock.learn.training.distributed import Ranks
    from penstock.models import LanguageModel
    from penstock.plan.loader.loader import Loader
    from penstock.plan.objectives import Objective

FILLING_THREADS = 1
READ_BY_TEACHERS = InputRequirements(asked_by="the teacher", positions=True, cu_seqlens=True)
"""Fields for teachers: one with the student's tokenizer reads the student's own rows."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Python objects that replace or extend sections of a run file."""

    model: "LanguageModel | None" = None
    """The model with its initial weights."""
    requirements: InputRequirements | None = None
    """Fields that rows must have in addition to the model's."""
    companion: Companion | None = None
    """Makes additional data for each row; see `Loader`."""
    filling: JsonMapping = field(default_factory=lambda: {"threads": FILLING_THREADS})
    """Loader settings that do not affect the rows: threads, prefetch and so on."""


NOTHING = Given()


def make_trainer(
    settings: RunSettings,
    *,
    run_file: str,
    text: str,
    output: Path | None,
    resume: bool,
    ranks: "Ranks",
    say: Callable[[str], None],
    dry_run: bool = False,
    given: Given = NOTHING,
) -> "Trainer":
    """The trainer of a run file, at the step that its run has reached.

    Args:
        settings: Of the run file.
        run_file: Its name, for errors.
        text: The run file as saved in the run's folder, with overrides; URLs are saved without user
            info and query.
        output: The run's folder; None for a dry run without one.
        resume: Continue an existing run from its newest complete checkpoint, and replace its saved
            run file.
        ranks: The processes of this training.
        say: Called with progress messages.
        dry_run: Run every check of a real start, and write nothing.
        given: Python objects in place of sections.

    Raises:
        ConfigError: A section is missing, or model and data do not match.
        IsolationError: Rows hold several documents, and the model does not isolate them.
        MissingExtraError: TensorBoard or W&B is requested but not installed.
        OutputError: The run's folder is in use or holds something else.
        StateError: The existing run has another plan or model.
    """
    if ranks.several:
        check_values(_common(settings))
    continued = _continued(settings, output, resume, ranks, say)
    settings, text = _with_beginning(settings, shown_urls(text), continued, output)
    settings, text = _with_rate(settings, text, given, continued, say)
    if ranks.several:
        # With the learning rate that each rank has chosen, or found in the other run.
        check_values(_common(settings))
    if (
        settings.model is None
        and given.model is None
        and (continued is None or "weights" not in continued.take)
    ):
        raise ConfigError(
            f"{run_file}: model is missing: give layers, width, …, from:RUN or hf:path, or "
            "take the weights of a run with continue_from"
        )
    # What fails on one rank, such as a dataset that its machine does not have, is an error on all.
    with in_step():
        data = open_sources(settings.data, run_file)
        datasets = [source.open() for source in data.sources]
        if ranks.is_first:
            check_run(output, datasets, resume=resume)
            if dry_run and output is not None:
                check_unlocked(output, output / LOCK, doing="training")
    settings = replace(settings, data=data)
    with in_step():
        parts = _make_parts(settings, run_file, output, resume, ranks, say, given, continued)
    trainer = Trainer(run=output or Path(), ranks=ranks, say=say, **parts)
    if ranks.is_first:
        for warning in target_warnings(trainer.loader, max_steps=trainer.steps):
            say(warning)
    if continued is not None and not _has_checkpoint(output, resume):
        trainer.take(continued)
    if output is None:
        return trainer
    with in_step():
        if ranks.is_first and not dry_run:
            facts = trainer.model.facts.with_data(datasets, say)
            begin_run(
                output,
                text,
                datasets,
                facts=facts,
                continued=continued,
                resume=resume,
                hold=ranks.hold,
            )
    if resume:
        trainer.resume(writes=not dry_run)
        if ranks.is_first and not dry_run:
            change_run(output, text, say)
    return trainer


def _common(settings: RunSettings) -> dict[str, str]:
    """What all ranks must share of a run file; its data are compared with the plans."""
    data = settings.data
    return shared_settings(
        settings.training or TrainSettings(),
        settings.model,
        settings.teacher,
        {source.name: source.objective for source in data.sources},
        {"target_distances": data.target_distances, "attention": data.attention},
    )


def _continued(
    settings: RunSettings,
    output: Path | None,
    resume: bool,
    ranks: "Ranks",
    say: Callable[[str], None],
) -> "Continued | None":
    """What the run takes, or has taken when it began, from another run; None: nothing.

    Raises:
        ConfigError, StateError: There is no such checkpoint, it is not what the run began with, or
            ranks find others.
    """
    with in_step():
        found = _found_beginning(settings, output, resume, say)
    step = -1 if found is None else found.step
    if ranks.differ(step):
        what = "none" if found is None else f"step {step} of {found.run}"
        raise StateError(
            f"continue_from: the ranks find different checkpoints, this one {what}; give "
            "continue_from.step, and the same folder to all of them"
        )
    return found


def _found_beginning(
    settings: RunSettings, output: Path | None, resume: bool, say: Callable[[str], None]
) -> "Continued | None":
    asked = None if settings.training is None else settings.training.beginning
    if resume and output is not None and (output / RUN_FILE).is_file():
        found = Continued.load(output)
        if found is not None:
            found.require(asked)
        elif asked is not None:
            raise StateError(
                f"{output}: the run there began by itself, and cannot continue from "
                f"{asked.run} any more; resume it without continue_from, or take another "
                "folder"
            )
        return found
    return None if asked is None else begin_from(asked, say)


def _with_beginning(
    settings: RunSettings, text: str, continued: "Continued | None", output: Path | None
) -> tuple[RunSettings, str]:
    """Settings and run file that say what the run began with, where a resume leaves it out."""
    training = settings.training or TrainSettings()
    if continued is None or training.beginning is not None:
        return settings, text
    assert output is not None, "only a run's folder knows what it began with"
    kept = (read_yaml(output / RUN_FILE)[1] or {}).get("training") or {}
    values = parse_yaml(text, "run file")[1] or {}
    written = {"continue_from": kept.get("continue_from", continued.run)}
    values["training"] = {**(values.get("training") or {}), **written}
    settings = replace(settings, training=replace(training, continue_from=continued.settings))
    return settings, write_yaml(values, "run file")


def _with_rate(
    settings: RunSettings,
    text: str,
    given: Given,
    continued: "Continued | None",
    say: Callable[[str], None],
) -> tuple[RunSettings, str]:
    """Settings and run file with the learning rate that is chosen where none is set.

    The run's folder has the number, so that a run which goes on keeps it, whatever it is then
    opened from.
    """
    training = settings.training or TrainSettings()
    if training.optimizer.learning_rate is not None:
        return settings, text
    pretrained = isinstance(settings.model, str) and settings.model.startswith((TRAINED, "hf:"))
    pretrained |= given.model is not None and given.model.origin is not None
    pretrained |= continued is not None and "weights" in continued.take
    rate = training.default_rate(pretrained=pretrained)
    kind = "a pretrained model" if pretrained else "a model with new weights"
    kind += " with LoRA" if pretrained and training.lora is not None else ""
    why = f"the default for {kind}"
    if continued is not None and continued.learning_rate is not None:
        rate, why = continued.learning_rate, f"that of {continued.run}, whose schedule goes on"
    say(f"learning_rate {rate:g}: {why}")
    optimizer = replace(training.optimizer, learning_rate=rate)
    values = parse_yaml(text, "run file")[1] or {}
    section = values.get("training") or {}
    values["training"] = {
        **section,
        "optimizer": {**(section.get("optimizer") or {}), "learning_rate": rate},
    }
    settings = replace(settings, training=replace(training, optimizer=optimizer))
    return settings, write_yaml(values, "run file")


def _make_parts(
    settings: RunSettings,
    run_file: str,
    output: Path | None,
    resume: bool,
    ranks: "Ranks",
    say: Callable[[str], None],
    given: Given,
    continued: "Continued | None",
) -> JsonObject:
    """What a trainer is made of. The datasets of `settings.data` must be open. Writes nothing.

    Ranks do not talk to each other here: any of them may fail.
    """
    data, training, start = (
        settings.data,
        settings.training or TrainSettings(),
        settings.model or GIVEN,
    )
    continues = settings.model is None and given.model is None and continued is not None
    if continued is not None and continues:
        start = f"{TRAINED}{continued.run}"
    check_writers(training)
    packs = training.lora is not None and training.lora.quantize is not None
    if packs:
        require_bitsandbytes()
    prepare_torch(training, ranks.device)
    itself = resume and output is not None and is_gone(start)
    if itself:
        # It is no longer needed: the run's own checkpoint has the same shapes and all weights.
        start = f"{TRAINED}{output}"
    has_checkpoint = _has_checkpoint(output, resume)
    model, later = initial_model(
        data,
        start,
        training,
        ranks,
        say,
        given=given.model,
        merged=not (continues or itself),
    )
    if training.lora is not None and model.lora != training.lora:
        add_lora(model, training.lora, seed=training.seed)
        later = later and replace(later, lora_seed=training.seed)
    if packs:
        widen(model.to(ranks.device))
    if packed := four_bits_in_words(model):
        say(packed)
    if continued is not None and "weights" in continued.take:
        if later is None:
            _take_weights(model, continued, training, resumed=has_checkpoint)
        elif not has_checkpoint:
            later = replace(later, load=partial(take_weights, checkpoint_of(continued)))
    freeze(model, training.frozen)
    if (notice := frozen_rows(model)) is not None:
        say(notice)
    _choose_recurrent(model, training)
    datasets = [source.open() for source in data.sources]
    # What a base learned before does not say how this model writes: objectives do, below.
    model.facts = replace(model.facts, diffusion=None)
    evaluators = make_evaluators(
        training.evaluators, datasets, data.loader.sequence_length, model, ranks
    )
    taught = open_teachers(settings.teacher, data, ranks.device, say)
    groups = LossGroups(given.companion if taught is None else taught.companion)
    requirements = (
        model.requirements() if taught is None else model.requirements().merge(READ_BY_TEACHERS)
    )
    loader = make_loader(
        data,
        run_file=run_file,
        data_parallel=(ranks.data.rank, ranks.data.size),
        requirements=requirements
        if given.requirements is None
        else requirements.merge(given.requirements),
        companion=groups,
        # Of one rank there is nothing to sum, and a loader must not keep it, and so the lock of the
        # run, alive.
        sum_over_ranks=ranks.sum_of_rows if ranks.several else None,
        **({} if continued is None else continued.start.arguments),
        **given.filling,
    )
    model.facts = replace(model.facts, diffusion=_diffusion_of(loader))
    for name, one in training.evaluators.items():
        if one.kind == "task":
            require_token_by_token(model, f"evaluator {name!r}")
    if training.feature_cache is not None:
        if loader.blank_image is None:
            raise ConfigError("training.feature_cache: the data have no images; leave it out")
        model.cache_features(training.feature_cache, loader.blank_image)
    return {
        "model": model,
        "later": None if later is None else replace(later, is_resumed=has_checkpoint),
        "settings": training,
        "loader": loader,
        "steps": count_steps(loader, training),
        "distiller": None if taught is None else taught.distiller,
        "groups": groups,
        "evaluators": evaluators,
    }


def _diffusion_of(loader: "Loader") -> DiffusionFacts | None:
    """How a model writes that learns from these rows; None: token by token.

    Raises:
        ConfigError: Sources are noised in ways that no one model can write by.
    """
    found = {_diffusion(*pair) for pair in zip(loader.objectives, loader.datasets, strict=True)}
    if len(found) == 1:
        return found.pop()
    ways = {None if one is None else (one.mask_id, one.block) for one in found}
    if len(ways - {None}) > 1:
        raise ConfigError(
            "data: sources are noised with different masks or blocks, and a model writes by one; "
            "give their objectives the same mask_token and block"
        )
    if None in ways:
        # It learned both; in its order, texts are written as by any other model.
        return None
    return next(one for one in found if one is not None and one.after_bos)


def _diffusion(objective: "Objective", dataset: "Corpus") -> DiffusionFacts | None:
    if not isinstance(objective, MaskedDiffusion | BlockDiffusion):
        return None
    assert isinstance(objective.mask_token, int)
    block = objective.block if isinstance(objective, BlockDiffusion) else 0
    return DiffusionFacts(
        mask_id=objective.mask_token, block=block, after_bos=bool(block) and dataset.framed[0]
    )


def _take_weights(
    model: "LanguageModel", continued: "Continued", training: TrainSettings, *, resumed: bool
) -> None:
    """Load the weights that a run begins with; a run with checkpoints needs them only for its
    reference model.

    Where the other run is gone by then, the reference is compared with what the run noted of it.
    """
    if resumed and training.preference is None and training.policy is None:
        return
    try:
        checkpoint = checkpoint_of(continued)
    except StateError:
        if resumed:
            return
        raise
    take_weights(checkpoint, model)


def _has_checkpoint(output: Path | None, resume: bool) -> bool:
    """Whether a run goes on from a checkpoint of its own."""
    return resume and output is not None and any((output / CHECKPOINTS).glob("step-*"))


def _choose_recurrent(model: "LanguageModel", training: TrainSettings) -> None:
    """Take the backends of `training.recurrent`, also in place of an earlier run's."""
    try:
        use_recurrent(model, training.recurrent_backends)
    except ConfigError as error:
        raise ConfigError(f"training.recurrent: {error}") from None
