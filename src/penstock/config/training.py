"""From a run file to a trainer: datasets, model, loader and run folder, put together in this order.

What is cheap to refuse comes first: the run's folder, packages, datasets, then the model, the evaluators with their
files and sandbox, the teachers, whose projection can take minutes, and the loader. The run's folder is begun only when
all of them fit. A dry run is the same up to there, reads the checkpoint that it would resume, and writes nothing.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config.run import DataSettings, RunSettings, make_loader, open_sources
from penstock.errors import ConfigError
from penstock.inputs import InputRequirements
from penstock.loader import Loader
from penstock.locks import check_unlocked
from penstock.models import ModelSettings
from penstock.training import TrainSettings

if TYPE_CHECKING:
    import torch

    from penstock.distillation.distiller import Distiller
    from penstock.models import LanguageModel
    from penstock.training import Trainer
    from penstock.training.distributed import Ranks

FILLING_THREADS = 1
READ_BY_TEACHERS = InputRequirements(asked_by="the teacher", positions=True, cu_seqlens=True)
"""A teacher with the student's tokenizer reads the student's own rows."""
TRAINED = "from:"
"""What the name of a run or a folder of a model begins with whose weights a run starts from."""


def make_trainer(
    settings: RunSettings,
    *,
    run_file: str,
    text: str,
    output: Path | None,
    resume: bool,
    ranks: "Ranks",
    say: Any,
    dry_run: bool = False,
) -> "Trainer":
    """The trainer of a run file, at the place where its run is.

    Args:
        settings: Of the run file.
        run_file: Its name, for errors.
        text: The run file as it is kept in the run's folder, overrides included.
        output: The run's folder; None in a dry run without one.
        resume: Go on with a run that is there, from its newest complete checkpoint; the run file is kept only then.
        ranks: The processes that train together.
        say: Called with a sentence now and then.
        dry_run: Refuse all that starting would refuse, and write nothing.

    Raises:
        ConfigError: A section is missing, or model and data do not fit.
        IsolationError: Rows hold several documents, and the model would let them see each other.
        MissingExtraError: TensorBoard or W&B is asked for and not installed.
        OutputError: The run's folder is not free.
        StateError: The run that is there has another plan or model.
    """
    # All of these need torch, which reading a run file does not.
    from penstock.training.processes import in_step
    from penstock.training.run_folder import LOCK, begin_run, change_run, check_run

    if settings.model is None:
        raise ConfigError(f"{run_file}: model is missing: give layers, width, …, from:RUN or hf:path")
    data = open_sources(settings.data, run_file)
    datasets = [source.path for source in data.sources]
    with in_step():
        if ranks.is_first:
            check_run(output, datasets, resume=resume)
            if dry_run and output is not None:
                check_unlocked(output, output / LOCK, doing="training")
    trainer = _set_up(replace(settings, data=data), run_file, output, resume, ranks, say)
    if output is None:
        return trainer
    with in_step():
        if ranks.is_first and not dry_run:
            begin_run(output, text, datasets, resume=resume, hold=ranks.hold)
    if resume:
        trainer.resume(writes=not dry_run)
        if ranks.is_first and not dry_run:
            change_run(output, text, say)
    return trainer


def _set_up(
    settings: RunSettings, run_file: str, output: Path | None, resume: bool, ranks: "Ranks", say: Any
) -> "Trainer":
    """The trainer before its first step. Nothing is written; `settings.data` is open."""
    from penstock.config.teachers import open_teachers
    from penstock.models.lora import add_lora
    from penstock.training import Trainer
    from penstock.training.checks import check_memory, check_writers
    from penstock.training.evaluators import make_evaluators
    from penstock.training.loss_groups import LossGroups
    from penstock.training.setup import prepare_torch
    from penstock.training.trainer import count_steps

    data, training, start = settings.data, settings.training or TrainSettings(), settings.model
    assert start is not None
    check_writers(training)
    prepare_torch(training)
    if resume and output is not None and _is_gone(start):
        # And no more needed: the run's own checkpoint has the same shapes, and all weights.
        start = f"{TRAINED}{output}"
    check_memory(start, _vocabulary(data), training, data.loader, device=ranks.device, ranks=ranks.place.size)
    model = _make_model(data, start, training, ranks.device)
    if training.lora is not None:
        add_lora(model, training.lora, seed=training.seed)
    datasets = [source.path for source in data.sources]
    evaluators = make_evaluators(training.evaluators, datasets, data.loader.sequence_length, model, ranks)
    taught = open_teachers(settings.teacher, data, ranks.device, say)
    groups = LossGroups(None if taught is None else taught.companion)
    loader = make_loader(
        data,
        run_file=run_file,
        data_parallel=(ranks.place.rank, ranks.place.size),
        threads=FILLING_THREADS,
        requirements=model.requirements() if taught is None else model.requirements().merge(READ_BY_TEACHERS),
        companion=groups,
    )
    return Trainer(
        run=output or Path(),
        model=model,
        loader=loader,
        settings=training,
        steps=count_steps(loader, training),
        ranks=ranks,
        distiller=None if taught is None else taught.distiller,
        groups=groups,
        evaluators=evaluators,
        say=say,
    )


def _is_gone(model: ModelSettings | str) -> bool:
    """Whether it is a run, to begin with, that is no more there."""
    return isinstance(model, str) and model.startswith(TRAINED) and not Path(model.removeprefix(TRAINED)).exists()


def _make_model(
    data: DataSettings, model: ModelSettings | str, training: TrainSettings, device: "torch.device"
) -> "LanguageModel":
    """The model with the weights to begin with."""
    from penstock.models import build_model

    if isinstance(model, str) and model.startswith(TRAINED):
        return _trained_model(model.removeprefix(TRAINED), data, device)
    return build_model(model, vocab_size=_vocabulary(data), device=device, seed=training.seed)


def _trained_model(path: str, data: DataSettings, device: "torch.device") -> "LanguageModel":
    """A trained model to go on from, for other data or another schedule: its weights in float32, LoRA merged.

    Raises:
        ConfigError: The data was made with another tokenizer than the model's, or it knows too few ids.
    """
    import torch

    from penstock.models import load_model, merge_lora
    from penstock.tokenizers import load_tokenizer
    from penstock.training import open_run

    run = open_run(path)
    fingerprint = load_tokenizer(run.tokenizer).fingerprint
    for source in data.sources:
        made_with = getattr(source.path, "tokenizer", None)
        if made_with is not None and made_with.fingerprint != fingerprint:
            raise ConfigError(
                f"source {source.name!r}: was made with another tokenizer ({made_with.name}) than the model "
                f"{TRAINED}{path}; prepare it with {run.tokenizer}"
            )
    model = load_model(run.model, device)
    if (needed := _vocabulary(data)) > model.vocab_size:
        raise ConfigError(f"the model {TRAINED}{path} knows {model.vocab_size} ids, and the objectives need {needed}")
    if model.lora is not None:
        merge_lora(model)
    for weight in model.parameters():
        weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
    return model


def _vocabulary(data: DataSettings) -> int:
    """Ids that the model must know: those of the datasets, and those that objectives add."""
    sizes: list[int] = []
    for source in data.sources:
        info = getattr(source.path, "tokenizer", None)
        if info is None:
            raise ConfigError(
                f"source {source.name!r}: its format does not say its tokenizer, which a model needs; `penstock "
                "prepare` makes a dataset that does"
            )
        sizes.append(info.vocab_size)
        extended = getattr(source.objective, "tokenizer", None)
        if extended is not None:
            from penstock.tokenizers import load_tokenizer

            sizes.append(load_tokenizer(extended).vocab_size)
    return max(sizes)


def describe(trainer: "Trainer", model: ModelSettings | str) -> list[tuple[str, str]]:
    """What a run is about to do, as (what, figure): parameters, memory, tokens, steps."""
    parameters = sum(p.numel() for p in trainer.model.parameters())
    # A frozen weight has neither gradient nor the optimiser's two numbers.
    memory = sum(p.numel() * (16 if p.requires_grad else 4) for p in trainer.model.parameters())
    if trainer.settings.shard:
        memory //= trainer.ranks.place.size
    loader: Loader = trainer.loader
    plan = loader.settings
    slots = plan.sequence_length * plan.rows_per_step
    return [
        ("model", model if isinstance(model, str) else f"{model.layers} layers of {model.width}"),
        ("parameters", f"{parameters:,}"),
        ("weights, gradients, optimiser", f"{memory / 1e6:,.1f} MB a rank"),
        ("rows", f"{plan.rows_per_step} of {plan.sequence_length} slots a step, {slots:,} slots"),
        ("steps", f"{trainer.steps:,}, at most {trainer.steps * slots:,} tokens"),
        *([] if trainer.distiller is None else [("teachers", _teachers(trainer.distiller))]),
        ("ranks", f"{trainer.ranks.place.size}, on {trainer.ranks.device}"),
        ("bits", ", ".join(f"{name} {value}" for name, value in trainer.bits.items())),
    ]


def _teachers(distiller: "Distiller") -> str:
    """The teachers with their losses, in a line."""
    named = (one.settings for one in distiller.teachers)
    return ", ".join(f"{one.model or one.cache} ({one.loss.kind}, weight {one.weight:g})" for one in named)
