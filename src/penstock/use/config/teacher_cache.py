"""The cache of a teacher's answers, made by the run's loader in one pass over the documents."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch

from penstock.core.errors import ConfigError
from penstock.core.suggestions import suggests
from penstock.learn.distillation.cache_writer import write_cache
from penstock.learn.distillation.outputs import Wanted
from penstock.learn.distillation.settings import TeacherSettings
from penstock.learn.distillation.teacher_rows import TeacherRows
from penstock.learn.distillation.teachers import ModelTeacher
from penstock.learn.training.distributed import local_device
from penstock.use.config.run_file import RunSettings, load_run, make_loader, open_sources

if TYPE_CHECKING:
    from penstock.learn.distillation.cache_format import CacheManifest
from penstock.use.config.teachers import (
    load_teacher,
    open_teacher_run,
    packed_rows,
    require_cacheable,
    student_tokenizer,
    teacher_text,
    trained_with_bos,
)

Precision = Literal["float16", "float32"]
"""Of stored log-probabilities."""

TOP_K = 64
"""Tokens stored per prediction if neither the loss nor the caller sets a number."""

ROWS_AT_ONCE = 8
"""Rows per step of the pass. Only affects where a killed pass resumes, not the contents of the
cache.
"""


@suggests
def cache_teacher(
    run_file: str | Path,
    output: str | Path,
    *,
    number: int = 0,
    model: str | Path | None = None,
    top_k: int | None = None,
    temperature: float | None = None,
    precision: Precision = "float16",
    device: str = "auto",
    threads: int | None = None,
    assignments: Sequence[str] = (),
    progress: bool = True,
) -> "CacheManifest":
    """Store a teacher's predictions for the data of a run, so that training does not need the
    teacher's model: `cache: FOLDER` instead of `model` in the run file.

    If it is killed, the same call resumes from the last finished part.

    Args:
        run_file: The run file that will train with it. The rows are those of training.
        output: Folder of the cache.
        number: Index of the teacher in the section `teacher`.
        model: A run or a transformers model, used instead of that teacher's.
        top_k: Tokens stored per distribution; None: the loss's `top_k`, or `TOP_K`.
        temperature: Of the log-probabilities; None: the loss's.
        precision: Of the stored log-probabilities.
        device: Device of the teacher: cpu, cuda, …; auto: a GPU if there is one.
        threads: Torch's threads on the CPU; None: unchanged.
        assignments: Changes of the file's settings, such as `data.loader.seed=7`.
        progress: Show a progress bar.

    Raises:
        ConfigError: There is no such teacher, its rows cannot be cached, or an objective rewrites
            documents in several epochs.
        IsolationError: Rows hold several documents, and the teacher's model does not isolate them.
        OutputError: The folder contains something else.
    """
    if precision not in get_args(Precision):
        raise ConfigError(f"precision must be float16 or float32; got {precision!r}")
    if threads is not None:
        torch.set_num_threads(threads)
    place = str(run_file)
    settings = load_run(place, assignments)
    chosen = _choose(settings, place, number, None if model is None else str(model))
    if settings.teacher is not None and top_k is None:
        _refuse_all_tokens(chosen, f"{place}: teacher.teachers.{number}")
    wanted = Wanted(
        temperature=chosen.loss.temperature if temperature is None else temperature,
        top_k=(chosen.loss.top_k or TOP_K) if top_k is None else top_k,
        boundary=True,
    )
    require_cacheable(settings.data)
    data = open_sources(settings.data, place)
    run, student = open_teacher_run(chosen), student_tokenizer(data)
    network, tokenizer = load_teacher(run.model, run.tokenizer, str(local_device(device)))
    text = teacher_text(
        chosen, student, tokenizer, run.context_length, trained_with_bos(run, tokenizer)
    )
    loader = make_loader(
        replace(
            data,
            # Each source is read once, also one that comes in or goes out at a later step.
            sources=[
                replace(source, max_epochs=1, share=source.share or 1.0) for source in data.sources
            ],
            changes=(),
            loader=replace(data.loader, rows_per_step=ROWS_AT_ONCE),
        ),
        run_file=place,
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
        bos=text.bos,
        trained_with_bos=text.trained_with_bos,
        progress=progress,
    )


def _refuse_all_tokens(chosen: TeacherSettings, where: str) -> None:
    """Refuse to make a cache that the same run file could not train with."""
    loss = chosen.loss
    if loss.kind in ("h_kl", "uld"):
        raise ConfigError(
            f"{where}: loss {loss.kind} needs full distributions, which a cache does not "
            "store; use p_kl with top_k, or alm"
        )
    if loss.kind != "alm" and loss.top_k is None:
        raise ConfigError(
            f"{where}: loss {loss.kind} uses all tokens, but a cache stores only some of each "
            f"distribution; set loss.top_k there ({TOP_K} suits most), or set top_k for "
            "another run file"
        )


def _choose(
    settings: RunSettings, run_file: str, number: int, model: str | None
) -> TeacherSettings:
    """The settings of the chosen teacher, which must have a model."""
    teachers = [] if settings.teacher is None else list(settings.teacher.teachers)
    if not teachers and model is not None:
        return TeacherSettings(model=model)
    if not 0 <= number < len(teachers):
        raise ConfigError(
            f"{run_file}: has {len(teachers)} teachers, so there is no number {number}; give "
            "a teacher, or a section teacher"
        )
    chosen = teachers[number]
    if model is not None:
        return replace(chosen, model=model, cache=None)
    if chosen.model is None:
        raise ConfigError(
            f"{run_file}: teacher.teachers.{number} reads from a cache; give the teacher, the "
            "model to make one with"
        )
    return chosen
