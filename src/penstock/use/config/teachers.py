"""The teachers of a run file's section `teacher`, opened for training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from penstock.core.errors import ConfigError
from penstock.data.shards import Corpus
from penstock.learn.distillation.cached_teacher import CachedTeacher
from penstock.learn.distillation.distiller import Distiller, OpenTeacher, wanted_of
from penstock.learn.distillation.process_teacher import ProcessTeacher
from penstock.learn.distillation.projection import Projection, project
from penstock.learn.distillation.settings import DistillationSettings, TeacherSettings
from penstock.learn.distillation.teacher_rows import TeacherRows, TeacherText
from penstock.learn.distillation.teachers import ModelTeacher, starts_boundary
from penstock.learn.training import RunFolder
from penstock.models import PackedRows
from penstock.models.facts import require_token_by_token
from penstock.models.saving import load_model
from penstock.plan.objectives.objective import Causal
from penstock.tokenizers.loading import load_tokenizer
from penstock.use.config.run_file import DataSettings

if TYPE_CHECKING:
    from penstock.learn.distillation.teachers import Teacher
    from penstock.models import LanguageModel
    from penstock.tokenizers import Tokenizer

HUGGING_FACE = "hf:"


@dataclass(frozen=True, kw_only=True)
class Taught:
    """What the loader and the trainer need for the section `teacher`."""

    companion: "TeacherRows"
    """Makes the teachers' rows in the loader's threads."""
    distiller: "Distiller"
    """Runs the teachers in the trainer."""


def open_teachers(
    settings: DistillationSettings | None,
    data: DataSettings,
    device: "torch.device",
    say: Callable[[str], None],
) -> Taught | None:
    """The teachers of a run; None if the run file has no section `teacher`. Sources must be open.

    Raises:
        ConfigError: A loss does not fit a teacher's tokenizer, or no source has a tokenizer.
        FormatError: A path has no model, cache or projection.
        IsolationError: A teacher's rows hold several documents, and its model does not isolate
            them.
        PenstockError: A teacher in its own process could not be loaded there.
    """
    if settings is None:
        return None

    if any(one.cache is not None for one in settings.teachers):
        require_cacheable(data)
    student = student_tokenizer(data)
    found = [_find(one) for one in settings.teachers]
    prints = [cast(Corpus, source.path).fingerprint for source in data.sources]
    texts = [
        teacher_text(one.settings, student, one.tokenizer, one.context_length, one.trained_with_bos)
        for one in found
    ]
    averaged = settings.combine == "average"
    if averaged:
        _require_one_vocabulary(found)
        _require_one_context(found, texts)
    opened = [
        _open(
            one,
            averaged,
            f"teacher.teachers.{number}",
            student,
            prints,
            packed_rows(text, student, data),
            device,
            say,
        )
        for number, (one, text) in enumerate(zip(found, texts, strict=True))
    ]
    for one in opened:
        # A teacher in its own process reports here whether it loaded. All have been started, so
        # they load in parallel.
        one.teacher.ask(())
    return Taught(
        companion=TeacherRows(student, texts),
        distiller=Distiller(settings, opened, vocab_size=student.vocab_size, device=device),
    )


def student_tokenizer(data: DataSettings) -> "Tokenizer":
    """The tokenizer stored with the sources."""
    for source in data.sources:
        found = source.open().loaded_tokenizer
        if found is not None:
            return found
    raise ConfigError(
        "no source stores its tokenizer, which a teacher needs to decode the text; use "
        "datasets of penstock prepare"
    )


def require_cacheable(data: DataSettings) -> None:
    """Refuse sources of which a cache would know the first epoch alone.

    Raises:
        ConfigError: An objective rewrites documents in several epochs.
    """
    for source in data.sources:
        once = source.max_epochs is not None and source.max_epochs <= 1
        if not (once or isinstance(source.objective, Causal)):
            raise ConfigError(
                f"source {source.name!r}: its objective, {source.objective.name}, rewrites each "
                "document anew in each epoch, and a teacher's cache knows the first alone; set "
                "max_epochs to 1, leave out objective, or train with the teacher's model"
            )


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A teacher on disk. A run is opened only once, because that reads its whole checkpoint to
    verify checksums.
    """

    settings: TeacherSettings
    run: "RunFolder | None"
    """The run of its model; None for a cache."""
    tokenizer: "Tokenizer"
    context_length: int | None
    """Maximum tokens per document that it reads, or that the cache holds."""
    trained_with_bos: bool | None
    """See `TeacherText`."""
    weights: str
    """Fingerprint of the teacher's model, or of the model that filled the cache."""


def _find(settings: TeacherSettings) -> _Found:
    """Locate a teacher, or a cache of its answers, without loading its model."""
    if settings.cache is not None:
        tokenizer, made = CachedTeacher.reading_of(settings.cache)
        return _Found(
            settings=replace(settings, bos=made.bos if settings.bos is None else settings.bos),
            run=None,
            tokenizer=tokenizer,
            context_length=made.max_tokens,
            trained_with_bos=made.trained_with_bos,
            weights=made.weights,
        )
    run = open_teacher_run(settings)
    tokenizer = load_tokenizer(run.tokenizer)
    return _Found(
        settings=settings,
        run=run,
        tokenizer=tokenizer,
        context_length=run.context_length,
        trained_with_bos=trained_with_bos(run, tokenizer),
        weights=run.fingerprint(),
    )


def open_teacher_run(settings: TeacherSettings) -> "RunFolder":
    """The run, or the Hugging Face folder, of a teacher that has a model.

    Raises:
        ConfigError: The model was trained by diffusion.
        FormatError: There is none.
    """
    assert settings.model is not None
    found = RunFolder.open(settings.model.removeprefix(HUGGING_FACE))
    require_token_by_token(found, "a teacher")
    return found


def trained_with_bos(run: "RunFolder", tokenizer: "Tokenizer") -> bool | None:
    """Whether the texts that a run was trained on begin with BOS; None: unknown."""
    begin = run.facts.begin_ids
    return None if begin is None else tokenizer.bos_id in begin


def load_teacher(model: Path, tokenizer: Path, device: str) -> "tuple[LanguageModel, Tokenizer]":
    """Load a teacher's model and tokenizer; called in the process that runs it."""
    return load_model(model, device), load_tokenizer(tokenizer)


def teacher_text(
    settings: TeacherSettings,
    student: "Tokenizer",
    tokenizer: "Tokenizer",
    context_length: int | None,
    trained_with_bos: bool | None,
) -> "TeacherText":
    """How a teacher reads the sources' text: by default at most its context of each document, with
    BOS as it was trained.
    """
    return TeacherText(
        tokenizer,
        settings.documents,
        control_pairs=_control_pairs(settings, student, tokenizer),
        bos=settings.bos,
        trained_with_bos=trained_with_bos,
        max_tokens=settings.max_tokens or context_length,
        multiple=settings.multiple,
    )


def packed_rows(
    text: "TeacherText", student: "Tokenizer", data: DataSettings
) -> "PackedRows | None":
    """The size of a teacher's rows if they hold several documents that must be isolated; else None.

    With the student's tokenizer the teacher reads the student's rows, and documents have the same
    lengths. With another tokenizer documents have at most `max_tokens` tokens, or a row's length if
    that is not set; the number of tokens in a row is unknown in advance.
    """
    slots, most = data.loader.sequence_length, text.max_tokens
    same = text.tokenizer.fingerprint == student.fingerprint and not text.documents
    own_rows = same and text.bos is None and (most is None or most >= slots)
    if not data.loader.needs_isolation(data.attention if own_rows else "document"):
        return None
    # BOS may be added to a document that fills a row.
    longest = min(slots + bool(text.bos), most or slots + 1) if same else most or slots
    return PackedRows(max(slots, longest), longest)


def _control_pairs(
    settings: TeacherSettings, student: "Tokenizer", tokenizer: "Tokenizer"
) -> dict[int, int]:
    """Student id → teacher id of control tokens with the same meaning."""
    return {
        _control_id(student, mine): _control_id(tokenizer, theirs)
        for mine, theirs in settings.control_tokens.items()
    }


def _control_id(tokenizer: "Tokenizer", text: str) -> int:
    if text not in tokenizer.special_tokens:
        known = ", ".join(sorted(tokenizer.special_tokens)[:12])
        raise ConfigError(
            f"teacher control_tokens: {tokenizer.name!r} has no control token {text!r}; it "
            f"has {known or 'none'}"
        )
    return tokenizer.special_tokens[text]


def _require_one_vocabulary(found: Sequence[_Found]) -> None:
    """Refuse teachers of other tokenizers than the first's, as a mean has one vocabulary."""
    first = found[0]
    for number, one in enumerate(found[1:], 1):
        if one.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise ConfigError(
                f"teacher.combine average needs one vocabulary, but teacher 0 "
                f"({first.settings.model}) has the tokenizer {first.tokenizer.name!r} of "
                f"{first.tokenizer.vocab_size:,} ids, and teacher {number} ({one.settings.model}) "
                f"has {one.tokenizer.name!r} of {one.tokenizer.vocab_size:,}; set combine to "
                "losses, which compares the student with each in its own vocabulary (p_kl, h_kl, "
                "alm)"
            )


def _require_one_context(found: Sequence[_Found], texts: "Sequence[TeacherText]") -> None:
    """Refuse teachers that would read documents up to different lengths."""
    lengths = [text.max_tokens for text in texts]
    if len(set(lengths)) > 1:
        each = ", ".join(
            f"{one.settings.model}: {'any length' if most is None else f'{most:,}'}"
            for one, most in zip(found, lengths, strict=True)
        )
        least = min(most for most in lengths if most is not None)
        raise ConfigError(
            f"teacher.combine average: the teachers read documents up to different lengths "
            f"({each}), and a mean needs all of them; set max_tokens of each to {least}"
        )


def _open(
    found: _Found,
    averaged: bool,
    where: str,
    student: "Tokenizer",
    sources: Sequence[str],
    packed: "PackedRows | None",
    device: "torch.device",
    say: Callable[[str], None],
) -> "OpenTeacher":
    """Open one teacher with everything its loss needs. `averaged`: it is one of several whose
    distributions are averaged. `sources` are the fingerprints of the mixture's datasets.
    """
    settings, tokenizer = found.settings, found.tokenizer
    kind = settings.loss.kind
    if kind == "kl" and tokenizer.fingerprint != student.fingerprint:
        raise ConfigError(
            f"{where}: loss kl needs one tokenizer, but the teacher has {tokenizer.name!r} "
            f"and the student {student.name!r}; use p_kl, h_kl or alm (`penstock distill "
            "audit` says which fits)"
        )
    debiased = kind == "alm" and settings.loss.debias
    # On the host, which counts its ids.
    boundary = torch.from_numpy(starts_boundary(student)) if debiased else None
    return OpenTeacher(
        settings=settings,
        teacher=_teacher(found, averaged, sources, packed, device),
        projection=_projection(settings, student, tokenizer, say)
        if kind in ("p_kl", "h_kl")
        else None,
        boundary=boundary,
        weights=found.weights,
    )


def _projection(
    settings: TeacherSettings,
    student: "Tokenizer",
    tokenizer: "Tokenizer",
    say: Callable[[str], None],
) -> "Projection":
    pairs = _control_pairs(settings, student, tokenizer)
    if settings.projection is None:
        say(f"projecting the student's vocabulary onto that of {settings.model or settings.cache}")
        return project(student, tokenizer, control_pairs=pairs)
    found = Projection.load(settings.projection)
    found.check(student, tokenizer)
    for (mine, theirs), (row, column) in zip(
        settings.control_tokens.items(), pairs.items(), strict=True
    ):
        cells = found.indices[row]
        if cells[cells >= 0].tolist() != [column]:
            raise ConfigError(
                f"{settings.projection}: does not project {mine!r} onto {theirs!r}, as "
                "control_tokens say; make it again, with `penstock distill project --control "
                f"'{mine}={theirs}'`, or leave out projection"
            )
    return found


def _teacher(
    found: _Found,
    averaged: bool,
    sources: Sequence[str],
    packed: "PackedRows | None",
    device: "torch.device",
) -> "Teacher":
    settings, tokenizer, run = found.settings, found.tokenizer, found.run
    wanted = wanted_of(settings.loss, averaged=averaged)
    if settings.cache is not None:
        return CachedTeacher(settings.cache, tokenizer, wanted, sources, device=device)
    assert run is not None
    if settings.process == "own":
        load = partial(load_teacher, run.model, run.tokenizer, str(device))
        return ProcessTeacher(load, wanted, threads=settings.threads, device=device, packed=packed)

    return ModelTeacher(load_model(run.model, device), tokenizer, wanted, packed=packed)
