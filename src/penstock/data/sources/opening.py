"""Opens the sources that a user names and cuts them into parts, the units of work of a preparation.

Parts depend on the input alone, never on the number of processes. A part is a byte range of a large
JSONL file, a whole compressed file, some row groups of a Parquet file, several small files, or one
file of a saved `datasets` folder.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from penstock.core.errors import ConfigError, RecordError
from penstock.core.json_values import JsonObject
from penstock.data.sources.arrow_files import ArrowPart, cut_parquet
from penstock.data.sources.csv_files import cut_csv
from penstock.data.sources.files import Extent, SourceFile
from penstock.data.sources.finding import named_apart, refuse_twice
from penstock.data.sources.formats import FORMATS, check_delimiter, with_formats
from penstock.data.sources.hub_datasets import Choice
from penstock.data.sources.image_folders import cut_image_folders
from penstock.data.sources.json_files import (
    JsonlPart,
    cut_values,
    holds_values,
    join_ranges,
    number_lines,
)
from penstock.data.sources.objects import ObjectBlock, cut_records
from penstock.data.sources.records import Fields, OnDamage, RecordBlock, Reject, stop_at_damage
from penstock.data.sources.small_files import join_small
from penstock.data.sources.tar_files import TarPart
from penstock.data.sources.text import TextPart

PART_BYTES = 64 << 20
"""Approximate raw bytes of a part; each part becomes one shard."""

MAX_PARTS = 4096
"""Input that would give more parts is cut into larger ones, of at most `LARGEST_PART_BYTES`."""

LARGEST_PART_BYTES = 1 << 30


class Part(Protocol):
    """One unit of work: some records, in order."""

    @property
    def name(self) -> str:
        """What it reads, for messages."""

    @property
    def identity(self) -> str:
        """What it reads and how, whatever the content: a path, and which stretch of the file."""

    @property
    def sources(self) -> tuple[SourceFile, ...]:
        """The files that it reads."""

    @property
    def files(self) -> tuple[str, ...]:
        """The names that `files` of its blocks points into."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """What opens each of `files`, to find what lies next to them; may hold secrets, so it is
        never text.
        """

    @property
    def size_bytes(self) -> int:
        """Raw bytes, for progress."""

    def extents(self) -> tuple[Extent, ...]:
        """The bytes of local files that determine the result; empty if the files are not local."""

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """Yield the requested fields of the records in order; calls `damaged` if a file cannot be
        read further.
        """

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """Yield whole records in order, if `Fields.whole` is set."""


def open_sources(
    specs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    format: str | None = None,
    fields: Fields | None = None,
    separator: str | None = None,
    delimiter: str | None = None,
    part_bytes: int | None = None,
    subset: str | None = None,
    split: str | None = None,
    notice: Callable[[str], None] | None = None,
    damaged: OnDamage = stop_at_damage,
) -> list[Part]:
    """Find the files and cut them into parts.

    Args:
        specs: Paths, folders, globs or fsspec URLs; one or several.
        format: One of `FORMATS`; None: by file name extension and first bytes.
        fields: Which fields to read; None: `text`.
        separator: Plain text only: the text between documents. None: each file is one document.
        delimiter: CSV and TSV only: the character between cells. None: a tab in TSV, else a comma.
        part_bytes: Approximate raw bytes of a part; None: 64 MiB, more for terabytes.
        subset: Of `hf://datasets/OWNER/NAME`: which of its subsets (configs); None: the default
            one, or the only one.
        split: Of `hf://datasets/OWNER/NAME`: which split; None: `train`, or the only one.
        notice: Called with a message about files of a folder that are skipped, and about wrong
            names.
        damaged: Called for a file that cannot be cut into parts; if it returns, the file becomes
            one empty part.

    Returns:
        The parts, in order of the input.

    Raises:
        RecordError: Nothing was found, or a file cannot be read as its format.
        DamagedFileError: A file was cut or is damaged.
        ConfigError: A setting is out of range, or the format of a file is unknown.
    """
    fields = fields or Fields()
    _check(format, separator, part_bytes)
    check_delimiter(delimiter)
    listed = [specs] if isinstance(specs, (str, os.PathLike)) else list(specs)
    if not listed:
        raise RecordError("no source is given; expected: at least one path, folder, glob or URL")
    files = with_formats(listed, format, notice or (lambda _: None), Choice(subset, split))
    refuse_twice(file for file, _ in files)
    named = named_apart([file for file, _ in files])
    files = [(file, kind) for file, (_, kind) in zip(named, files, strict=True)]
    total = sum(file.size_bytes for file, _ in files)
    size = part_bytes or min(max(PART_BYTES, total // MAX_PARTS), LARGEST_PART_BYTES)
    if format == "imagefolder":
        return _image_folders([file for file, _ in files], fields)
    between = separator.encode() if separator else None
    parts = _cut(files, fields, between, delimiter, size, damaged)
    return list(join_small(parts, [file.size_bytes for file, _ in files], size))


def _image_folders(files: Sequence[SourceFile], fields: Fields) -> list[Part]:
    if not fields.whole:
        raise ConfigError(
            "imagefolder: images with captions are conversations, not texts; prepare them as "
            "chats (template)"
        )
    parts: list[Part] = list(cut_image_folders(files))
    if not parts:
        raise RecordError(
            "imagefolder: no images among the files; expected: images with captions next to them"
        )
    return parts


def open_records(
    records: Iterable[str | JsonObject],
    *,
    fields: Fields | None = None,
    part_bytes: int | None = None,
) -> Iterator[Part]:
    """Cut an iterable of texts or objects into parts as it is consumed."""
    _check(None, None, part_bytes)
    yield from cut_records(records, fields or Fields(), part_bytes or PART_BYTES)


def read_texts(
    parts: Sequence[Part],
    *,
    skip: Callable[[Reject], None] | None = None,
    damaged: OnDamage = stop_at_damage,
) -> Iterator[str]:
    """The texts of all parts, one after another.

    Args:
        parts: The result of `open_sources`.
        skip: Called with each reject, which is then skipped; None: the first reject raises.
        damaged: Called when a file cannot be read further; if it returns, reading continues with
            the next file.

    Raises:
        RecordError: A record cannot be read.
        DamagedFileError: A file was cut or is damaged.
    """
    for part in number_lines(join_ranges(parts)):
        for block in part.blocks(damaged):
            if skip is None:
                stop_at_reject(block)
            else:
                for reject in block.rejects:
                    skip(reject)
            yield from block.texts.to_pylist()


def stop_at_reject(block: RecordBlock) -> None:
    """Raise for the first reject of a block, if it has one."""
    if block.rejects:
        raise RecordError(f"{block.rejects[0]} (set on_error to skip to leave such records out)")


def _check(format: str | None, separator: str | None, part_bytes: int | None) -> None:
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format {format!r} is unknown; known: {', '.join(FORMATS)}")
    if separator == "":
        raise ConfigError("the separator is empty; expected: at least one character")
    if part_bytes is not None and part_bytes < 1:
        raise ConfigError(f"part_bytes must be >= 1, got {part_bytes}")


def _cut(
    files: Sequence[tuple[SourceFile, str]],
    fields: Fields,
    separator: bytes | None,
    delimiter: str | None,
    size: int,
    damaged: OnDamage,
) -> Iterator[Part]:
    for file, kind in files:
        if kind == "text" and fields.whole:
            raise ConfigError(
                f"{file.path}: plain text holds no conversations; expected: JSON lines, "
                "Parquet, Arrow or CSV"
            )
        if kind == "text":
            yield TextPart((file,), fields, separator)
        elif kind in ("csv", "tsv"):
            between = delimiter or ("\t" if kind == "tsv" else ",")
            yield from cut_csv(file, fields, between, size, damaged)
        else:
            yield from _cut_file(file, kind, fields, size, damaged)


def _cut_file(
    file: SourceFile, kind: str, fields: Fields, size: int, damaged: OnDamage
) -> Iterator[Part]:
    if kind in ("parquet", "arrow", "webdataset") and file.compression:
        raise ConfigError(
            f"{file.path}: compressed {kind} files are not supported; decompress the file first"
        )
    if kind == "parquet":
        yield from cut_parquet(file, fields, size, damaged)
    elif kind == "arrow":
        yield ArrowPart(file, fields)
    elif kind == "webdataset":
        if not fields.whole:
            raise ConfigError(
                f"{file.path}: tar shards hold records with images, not texts; prepare them "
                "as chats (template)"
            )
        yield TarPart(file)
    elif fields.whole and holds_values(file):
        yield from cut_values(file, size)
    elif file.compression:
        yield JsonlPart(file, fields, 0, file.size_bytes)
    else:
        for begin in range(0, max(file.size_bytes, 1), size):
            yield JsonlPart(file, fields, begin, min(begin + size, file.size_bytes))
