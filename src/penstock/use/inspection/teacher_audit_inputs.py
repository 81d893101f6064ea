"""Audits a teacher with texts, prepared datasets and conversations."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from penstock.chat import encode, load_template
from penstock.core.errors import ConfigError, RecordError
from penstock.data.shards.opening import open_dataset
from penstock.data.sources import Fields, open_sources, read_texts
from penstock.learn.distillation.projection import control_pairs
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.loading import load_tokenizer
from penstock.use.inspection.conversations import sample_records
from penstock.use.inspection.teacher_audit import Audit, AuditReport


def audit_teacher(
    student: str | Path,
    teacher: str | Path,
    *,
    text: Sequence[str] = (),
    data: Sequence[str] = (),
    chats: Sequence[str] = (),
    student_template: str | None = None,
    teacher_template: str | None = None,
    control: Sequence[str] = (),
    documents: int = 1000,
    format: str | None = None,
    text_field: str = "text",
) -> AuditReport:
    """Measure how well a student's tokens align with a teacher's, and recommend a loss, before any
    training.

    ```python
    report = ps.inspection.audit_teacher("tokenizer", "runs/first", text=["stories.jsonl"])
    report.loss, report.advice
    ```

    Args:
        student: The student's tokenizer, or a run.
        teacher: The teacher's tokenizer, or a run.
        text: Files, folders, globs or URLs of texts.
        data: Datasets that were prepared with the student's tokenizer.
        chats: Sources of conversations, which are aligned turn by turn.
        student_template: Chat template of the student; None: that of its tokenizer's folder.
        teacher_template: Chat template of the teacher; None: that of its tokenizer's folder.
        control: Control tokens with the same meaning, each `STUDENT=TEACHER`.
        documents: Maximum documents of each kind of input.
        format: Format of the texts; None: by their names.
        text_field: Field of the text.

    Raises:
        ConfigError: There is nothing to audit, `documents` is below 1, or a dataset was prepared
            with another tokenizer.
        RecordError: A record cannot be read, or a conversation cannot be trained.
        TokenizerError: A tokenizer cannot be loaded.
    """
    if not (text or data or chats):
        raise ConfigError("nothing to audit: give text, data or chats")
    if documents < 1:
        raise ConfigError(f"documents must be at least 1, got {documents}")
    folders = tokenizer_folder(student), tokenizer_folder(teacher)
    ours, theirs = load_tokenizer(folders[0]), load_tokenizer(folders[1])
    found = Audit(ours, theirs, control_pairs=control_pairs(control, ours, theirs))
    if text:
        audit_texts(found, text, documents, format=format, text_field=text_field)
    for dataset in data:
        audit_dataset(found, dataset, ours, documents)
    if chats:
        templates = student_template or folders[0], teacher_template or folders[1]
        audit_chats(found, chats, (ours, theirs), templates, documents)
    return found.report()


def tokenizer_folder(path: str | Path) -> str:
    """The tokenizer that a path means: a run has its own in the folder `tokenizer`."""
    folder = Path(path) / "tokenizer"
    return str(folder) if folder.is_dir() else str(path)


def audit_texts(
    audit: Audit,
    sources: Sequence[str],
    count: int,
    *,
    format: str | None = None,
    text_field: str = "text",
) -> None:
    """Count the first `count` texts of files, folders, globs or URLs.

    Raises:
        RecordError: There is no such file, or a record cannot be read.
    """
    parts = open_sources(list(sources), format=format, fields=Fields(text=text_field))
    for text in islice(read_texts(parts), count):
        audit.add_text(text)


def audit_dataset(audit: Audit, path: str, student: Tokenizer, count: int) -> None:
    """Count `count` documents of a dataset of the student's tokens, spread evenly over it.

    Raises:
        ConfigError: The dataset was prepared with another tokenizer.
        FormatError: There is no dataset.
    """
    dataset = open_dataset(path)
    made_by = dataset.tokenizer
    if made_by is not None and made_by.fingerprint != student.fingerprint:
        raise ConfigError(
            f"{path}: was prepared with another tokenizer ({made_by.name}, "
            f"{made_by.fingerprint[:8]}) than the student's ({student.name}, "
            f"{student.fingerprint[:8]}); give {Path(path) / 'tokenizer'} as STUDENT"
        )
    for document in np.unique(
        np.linspace(0, len(dataset) - 1, min(count, len(dataset))).astype(np.int64)
    ).tolist():
        audit.add_ids(dataset[document].tokens)


def audit_chats(
    audit: Audit,
    sources: Sequence[str],
    tokenizers: tuple[Tokenizer, Tokenizer],
    templates: tuple[str, str],
    count: int,
) -> None:
    """Count the trained turns of `count` conversations, each rendered by the student's and the
    teacher's template.

    Raises:
        RecordError: A record cannot be read, or fails a check for training; names its file and
            line.
        ConfigError: There is no such template.
    """
    loaded = [
        load_template(template, tokenizer=one)
        for template, one in zip(templates, tokenizers, strict=True)
    ]
    for record in sample_records(list(sources), count).records:
        if record.value is None:
            raise RecordError(f"{record.origin}: {record.problem}")
        try:
            chats = [
                encode(record.value, tokenizer=one, template=template)
                for one, template in zip(tokenizers, loaded, strict=True)
            ]
            audit.add_chat(*chats)
        except RecordError as error:
            raise RecordError(f"{record.origin}: {error}") from error
