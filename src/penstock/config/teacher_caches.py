"""From a run file to the cache of one of its teachers: the loader of the run, once over each document."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from penstock.config.run import RunSettings, make_loader, open_sources
from penstock.distillation.teacher_settings import TeacherSettings
from penstock.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from penstock.distillation.cache_layout import CacheManifest

TOP_K = 64
"""Tokens that are kept where neither the loss nor the caller says how many."""
ROWS_AT_ONCE = 8
"""Rows of a step of the pass; changes nothing in the cache but the places where a killed pass goes on."""


def cache_teacher(
    settings: RunSettings,
    output: str | Path,
    *,
    run_file: str = "run file",
    number: int = 0,
    model: str | None = None,
    top_k: int | None = None,
    temperature: float | None = None,
    precision: Literal["float16", "float32"] = "float16",
    device: "torch.device | str" = "cpu",
    progress: bool = False,
) -> "CacheManifest":
    """Write what a teacher says about all documents of a run's sources.

    Args:
        settings: Of the run file; its rows are those that training will have.
        output: The cache's folder.
        run_file: Its name, for errors.
        number: Of the teacher in the section `teacher`.
        model: A run or a model of transformers, instead of what that teacher says.
        top_k: Tokens that are kept of each distribution; None: as many as its loss takes, or `TOP_K`.
        temperature: Of their log-probabilities; None: its loss's.
        precision: Of their log-probabilities.
        device: Where the teacher runs.
        progress: Show a bar.

    Raises:
        ConfigError: There is no such teacher, or the rows do not fit a cache.
        IsolationError: Rows hold several documents, and the teacher's model would let them see each other.
        OutputError: The folder holds something else.
    """
    from penstock.config.teachers import load_teacher, open_teacher_run, packed_rows, student_tokenizer, teacher_text
    from penstock.distillation.caching import write_cache
    from penstock.distillation.outputs import Wanted
    from penstock.distillation.rows import TeacherRows
    from penstock.distillation.teachers import ModelTeacher

    chosen = _choose(settings, run_file, number, model)
    if settings.teacher is not None and top_k is None:
        _refuse_all_tokens(chosen, f"{run_file}: teacher.teachers.{number}")
    wanted = Wanted(
        temperature=chosen.loss.temperature if temperature is None else temperature,
        top_k=top_k or chosen.loss.top_k or TOP_K,
        boundary=True,
    )
    data = open_sources(settings.data, run_file)
    run, student = open_teacher_run(chosen), student_tokenizer(data)
    network, tokenizer = load_teacher(run.model, run.tokenizer, str(device))
    text = teacher_text(chosen, student, tokenizer, run.trained_length)
    loader = make_loader(
        replace(
            data,
            sources=[replace(source, max_epochs=1) for source in data.sources],
            loader=replace(data.loader, rows_per_step=ROWS_AT_ONCE),
        ),
        run_file=run_file,
        threads=1,
        companion=TeacherRows(student, [text]),
    )
    return write_cache(
        loader,
        ModelTeacher(network, tokenizer, wanted, packed=packed_rows(text, student, data)),
        output,
        tokenizer=tokenizer,
        wanted=wanted,
        name=run.path.resolve().name,
        weights=run.fingerprint(),
        precision=precision,
        max_tokens=text.max_tokens,
        progress=progress,
    )


def _refuse_all_tokens(chosen: TeacherSettings, where: str) -> None:
    """Refuse to make a cache that its own run file could not train with."""
    loss = chosen.loss
    if loss.kind in ("h_kl", "uld"):
        raise ConfigError(
            f"{where}: loss {loss.kind} needs whole distributions, which a cache does not keep; take p_kl with "
            "top_k, or alm"
        )
    if loss.kind != "alm" and loss.top_k is None:
        raise ConfigError(
            f"{where}: loss {loss.kind} wants all tokens, and a cache keeps some of each distribution; set loss.top_k "
            f"there ({TOP_K} suits most), or give --top-k for another run file"
        )


def _choose(settings: RunSettings, run_file: str, number: int, model: str | None) -> TeacherSettings:
    """The teacher that is meant, with a model."""
    teachers = [] if settings.teacher is None else list(settings.teacher.teachers)
    if not teachers and model is not None:
        return TeacherSettings(model=model)
    if number >= len(teachers):
        raise ConfigError(
            f"{run_file}: has {len(teachers)} teachers, and number {number} is asked for; give --teacher MODEL, or a "
            "section teacher"
        )
    chosen = teachers[number]
    if model is not None:
        return replace(chosen, model=model, cache=None)
    if chosen.model is None:
        raise ConfigError(
            f"{run_file}: teacher.teachers.{number} is read from a cache; give the model that it is made of: "
            "--teacher MODEL"
        )
    return chosen
