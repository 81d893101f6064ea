"""From the section `teacher` of a run file to teachers that can be asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.run import DataSettings
from penstock.distillation.teacher_settings import DistillationSettings, TeacherSettings
from penstock.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from penstock.distillation.distiller import Distiller, OpenTeacher
    from penstock.distillation.projection import Projection
    from penstock.distillation.rows import TeacherRows, TeacherText
    from penstock.distillation.teachers import Teacher
    from penstock.models import LanguageModel, PackedRows
    from penstock.tokenizers import Tokenizer
    from penstock.training import Run

HUGGING_FACE = "hf:"


@dataclass(frozen=True, kw_only=True)
class Taught:
    """What the loader and the trainer get of a section `teacher`."""

    companion: "TeacherRows"
    """Makes the teachers' rows, in the loader's threads."""
    distiller: "Distiller"
    """Asks the teachers, in the trainer."""


def open_teachers(
    settings: DistillationSettings | None, data: DataSettings, device: "torch.device", say: Callable[[str], None]
) -> Taught | None:
    """The teachers of a run whose sources are open; None where the run file has no section `teacher`.

    Raises:
        ConfigError: A loss does not fit a teacher's tokenizer, or the sources do not say their own.
        FormatError: There is no model, cache or projection at a path.
        IsolationError: A teacher's rows hold several documents, and its model would let them see each other.
        PenstockError: A teacher in a process of its own could not be loaded there, for whatever reason.
    """
    if settings is None:
        return None
    from penstock.distillation.distiller import Distiller
    from penstock.distillation.rows import TeacherRows

    student = student_tokenizer(data)
    found = [_find(one) for one in settings.teachers]
    prints = [source.path.fingerprint for source in data.sources]
    texts = [teacher_text(one.settings, student, one.tokenizer, one.trained_length) for one in found]
    opened = [
        _open(one, f"teacher.teachers.{number}", student, prints, packed_rows(text, student, data), device, say)
        for number, (one, text) in enumerate(zip(found, texts, strict=True))
    ]
    for one in opened:
        # One in a process of its own says now whether it could load; together, so that they load at the same time.
        one.teacher.ask(())
    return Taught(
        companion=TeacherRows(student, texts),
        distiller=Distiller(settings, opened, vocab_size=student.vocab_size, device=device),
    )


def student_tokenizer(data: DataSettings) -> "Tokenizer":
    """The tokenizer of the sources, which must ship it."""
    for source in data.sources:
        found: Tokenizer | None = getattr(source.path, "loaded_tokenizer", None)
        if found is not None:
            return found
    raise ConfigError(
        "no source ships its tokenizer, which a teacher needs to read the text; use datasets of penstock prepare"
    )


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A teacher on the disk. A run is opened once: that reads all of its checkpoint, for the checksums."""

    settings: TeacherSettings
    run: "Run | None"
    """Of its model; None where it is a cache."""
    tokenizer: "Tokenizer"
    trained_length: int | None
    """Tokens of a document that it was trained on, or that the cache has of it."""
    weights: str
    """Fingerprint of the model that teaches, or whose answers were kept."""


def _find(settings: TeacherSettings) -> _Found:
    """A teacher, or a cache of its answers, before its model is loaded."""
    from penstock.tokenizers import load_tokenizer

    if settings.cache is not None:
        from penstock.distillation.cached_teacher import CachedTeacher

        tokenizer, made = CachedTeacher.reading_of(settings.cache)
        return _Found(
            settings=settings, run=None, tokenizer=tokenizer, trained_length=made.max_tokens, weights=made.weights
        )
    run = open_teacher_run(settings)
    return _Found(
        settings=settings,
        run=run,
        tokenizer=load_tokenizer(run.tokenizer),
        trained_length=run.trained_length,
        weights=run.fingerprint(),
    )


def open_teacher_run(settings: TeacherSettings) -> "Run":
    """The run, or the folder in the Hugging Face layout, of a teacher with a model."""
    from penstock.training import open_run

    assert settings.model is not None
    return open_run(settings.model.removeprefix(HUGGING_FACE))


def load_teacher(model: Path, tokenizer: Path, device: str) -> "tuple[LanguageModel, Tokenizer]":
    """A teacher's model and tokenizer, in the process that runs it."""
    from penstock.models import load_model
    from penstock.tokenizers import load_tokenizer

    return load_model(model, device), load_tokenizer(tokenizer)


def teacher_text(
    settings: TeacherSettings, student: "Tokenizer", tokenizer: "Tokenizer", trained_length: int | None
) -> "TeacherText":
    """How a teacher reads the sources' text: by default no more of a document than it was trained on."""
    from penstock.distillation.rows import TeacherText

    return TeacherText(
        tokenizer,
        settings.documents,
        control_pairs=_control_pairs(settings, student, tokenizer),
        bos=settings.bos,
        max_tokens=settings.max_tokens or trained_length,
        multiple=settings.multiple,
    )


def packed_rows(text: "TeacherText", student: "Tokenizer", data: DataSettings) -> "PackedRows | None":
    """The rows that a teacher will read, where they hold several documents that must not see each other; else None.

    With the student's tokenizer it reads the student's own rows, and documents are as long as there. With another one
    they are as long as it is let read, or as rows are where nobody says; how many tokens a row has nobody knows before.
    """
    from penstock.models import PackedRows

    slots, most = data.loader.sequence_length, text.max_tokens
    same = text.tokenizer.fingerprint == student.fingerprint and not text.documents
    own_rows = same and text.bos is None and (most is None or most >= slots)
    if not data.loader.needs_isolation(data.attention if own_rows else "document"):
        return None
    # BOS may come before a document that fills a row.
    longest = min(slots + bool(text.bos), most or slots + 1) if same else most or slots
    return PackedRows(max(slots, longest), longest)


def _control_pairs(settings: TeacherSettings, student: "Tokenizer", tokenizer: "Tokenizer") -> dict[int, int]:
    """Student id → teacher id of control tokens that mean the same."""
    return {
        _control_id(student, mine): _control_id(tokenizer, theirs) for mine, theirs in settings.control_tokens.items()
    }


def _control_id(tokenizer: "Tokenizer", text: str) -> int:
    if text not in tokenizer.special_tokens:
        known = ", ".join(sorted(tokenizer.special_tokens)[:12])
        raise ConfigError(
            f"teacher control_tokens: {tokenizer.name!r} has no control token {text!r}; it has {known or 'none'}"
        )
    return tokenizer.special_tokens[text]


def _open(
    found: _Found,
    where: str,
    student: "Tokenizer",
    sources: Sequence[str],
    packed: "PackedRows | None",
    device: "torch.device",
    say: Callable[[str], None],
) -> "OpenTeacher":
    """One teacher, with what its loss needs; `sources` are the fingerprints of the mixture's datasets."""
    import torch

    from penstock.distillation.boundaries import starts_boundary
    from penstock.distillation.distiller import OpenTeacher

    settings, tokenizer = found.settings, found.tokenizer
    kind = settings.loss.kind
    if kind == "kl" and tokenizer.fingerprint != student.fingerprint:
        raise ConfigError(
            f"{where}: loss kl needs one tokenizer, and the teacher has {tokenizer.name!r}, the student "
            f"{student.name!r}; take p_kl, h_kl or alm (`penstock distill audit` says which fits)"
        )
    debiased = kind == "alm" and settings.loss.debias
    boundary = torch.from_numpy(starts_boundary(student)).to(device) if debiased else None
    return OpenTeacher(
        settings=settings,
        teacher=_teacher(found, sources, packed, device),
        projection=_projection(settings, student, tokenizer, say) if kind in ("p_kl", "h_kl") else None,
        boundary=boundary,
        weights=found.weights,
    )


def _projection(
    settings: TeacherSettings, student: "Tokenizer", tokenizer: "Tokenizer", say: Callable[[str], None]
) -> "Projection":
    from penstock.distillation.projection import Projection, project

    if settings.projection is None:
        say(f"projecting the student's vocabulary to that of {settings.model or settings.cache}")
        return project(student, tokenizer, control_pairs=_control_pairs(settings, student, tokenizer))
    found = Projection.load(settings.projection)
    found.check(student, tokenizer)
    return found


def _teacher(found: _Found, sources: Sequence[str], packed: "PackedRows | None", device: "torch.device") -> "Teacher":
    from penstock.distillation.distiller import wanted_of

    settings, tokenizer, run = found.settings, found.tokenizer, found.run
    wanted = wanted_of(settings.loss)
    if settings.cache is not None:
        from penstock.distillation.cached_teacher import CachedTeacher

        return CachedTeacher(settings.cache, tokenizer, wanted, sources, device=device)
    assert run is not None
    if settings.process == "own":
        from penstock.distillation.process_teacher import ProcessTeacher

        load = partial(load_teacher, run.model, run.tokenizer, str(device))
        return ProcessTeacher(load, wanted, threads=settings.threads, device=device, packed=packed)
    from penstock.distillation.teachers import ModelTeacher
    from penstock.models import load_model

    return ModelTeacher(load_model(run.model, device), tokenizer, wanted, packed=packed)
