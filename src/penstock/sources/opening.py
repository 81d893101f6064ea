"""From what the user names to parts: the units of work of preparing.

Parts depend on the input alone, never on the number of processes: byte ranges of large JSONL files, compressed
ones whole, row groups of Parquet files, small text files together, files of a saved `datasets` folder.
"""

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from penstock.errors import ConfigError, RecordError
from penstock.sources.compression import COMPRESSIONS, PACKED
from penstock.sources.damage import OnDamage, stop_at_damage
from penstock.sources.files import Extent, SourceFile, find_files, refuse_twice
from penstock.sources.jsonl import JsonlPart, number_lines
from penstock.sources.memory import cut_records
from penstock.sources.objects import ObjectBlock
from penstock.sources.parquet import cut_parquet
from penstock.sources.records import Fields, RecordBlock, Reject
from penstock.sources.saved import ArrowPart, find_saved
from penstock.sources.text import TextPart
from penstock.sources.values import cut_values, holds_values

PART_BYTES = 64 << 20
"""Raw bytes of a part, about; one shard comes of it."""

MAX_PARTS = 4096
"""With more input than this many parts, parts get larger, to at most `LARGEST_PART_BYTES`."""

LARGEST_PART_BYTES = 1 << 30

EXTENSIONS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
}
"""File name extension → format; `format=` overrides it."""

FORMATS = ("jsonl", "parquet", "text", "arrow")


class Part(Protocol):
    """One unit of work: some records, in order."""

    @property
    def name(self) -> str:
        """For people: what it reads."""

    @property
    def identity(self) -> str:
        """What it reads and how, whatever that holds: the path of a file, and what of it."""

    @property
    def sources(self) -> tuple[SourceFile, ...]:
        """The files that it reads from."""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that `RecordBlock.files` points into."""

    @property
    def size_bytes(self) -> int:
        """Raw bytes, for progress."""

    def extents(self) -> tuple[Extent, ...]:
        """The bytes of local files that decide what comes of it; empty where they are not local."""

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """The records, in order: the fields asked for; `damaged` is called where a file cannot be read further."""

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """The records, in order: whole, where `Fields.whole` asks for that."""


def open_sources(
    specs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    format: str | None = None,
    fields: Fields | None = None,
    separator: str | None = None,
    part_bytes: int | None = None,
    notice: Callable[[str], None] | None = None,
    damaged: OnDamage = stop_at_damage,
) -> list[Part]:
    """Find the files and cut them into parts.

    Args:
        specs: Paths, folders, globs or fsspec URLs; one or several.
        format: One of `FORMATS`; None goes by the file names.
        fields: Which fields to read; None reads `text`.
        separator: Plain text only: what stands between documents. None: a file is a document.
        part_bytes: Raw bytes of a part, about; None: 64 MiB, more for terabytes.
        notice: Is told, in words, which files of a folder are passed over.
        damaged: Called for a file that cannot be cut into parts; where it returns, the file is a part from which
            nothing can be read.

    Returns:
        The parts, in order of the input.

    Raises:
        RecordError: Nothing was found, or a file cannot be read as its format.
        DamagedFileError: A file was cut or is damaged.
        ConfigError: A setting is out of range, or a file's format is not known.
    """
    fields = fields or Fields()
    _check(format, separator, part_bytes)
    listed = [specs] if isinstance(specs, (str, os.PathLike)) else list(specs)
    if not listed:
        raise RecordError("no source is named; due: at least one path, folder, glob or URL")
    files = [pair for spec in listed for pair in _with_formats(spec, format, notice or (lambda _: None))]
    refuse_twice(file for file, _ in files)
    total = sum(file.size_bytes for file, _ in files)
    size = part_bytes or min(max(PART_BYTES, total // MAX_PARTS), LARGEST_PART_BYTES)
    return list(_cut(files, fields, separator.encode() if separator else None, size, damaged))


def open_records(
    records: Iterable[str | dict[str, Any]], *, fields: Fields | None = None, part_bytes: int | None = None
) -> Iterator[Part]:
    """Cut what Python hands over into parts, as it comes; `open_sources` for an iterable of texts or objects."""
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
        parts: What `open_sources` gave.
        skip: Is told of each reject, which is passed over; None: the first one stops.
        damaged: Called where a file cannot be read further; where it returns, reading goes on with the next.

    Raises:
        RecordError: A record cannot be read.
        DamagedFileError: A file was cut or is damaged.
    """
    for part in number_lines(parts):
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
        raise RecordError(f"{block.rejects[0]} (or skip such records: --on-error skip)")


def _check(format: str | None, separator: str | None, part_bytes: int | None) -> None:
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format {format!r} is not known; known: {', '.join(FORMATS)}")
    if separator == "":
        raise ConfigError("the separator is empty; due: at least one character")
    if part_bytes is not None and part_bytes < 1:
        raise ConfigError(f"part_bytes must be >= 1, got {part_bytes}")


def _with_formats(
    spec: str | os.PathLike[str], format: str | None, notice: Callable[[str], None]
) -> list[tuple[SourceFile, str]]:
    saved = find_saved(spec) if format in (None, "arrow") else None
    if saved is not None:
        return [(file, "arrow") for file in saved]
    text = os.fspath(spec)
    in_folder = not glob.has_magic(text) if "://" in text else os.path.isdir(os.path.expanduser(text))
    files = find_files(spec)
    known = [(file, format or EXTENSIONS.get(file.suffixes[0], "")) for file in files]
    chosen = [(file, kind) for file, kind in known if kind]
    strange = [file for file, kind in known if not kind]
    if strange and not (chosen and in_folder):
        suffix = strange[0].suffixes[0]
        if suffix in PACKED:
            raise ConfigError(
                f"{strange[0].path}: {suffix} files are not read; unpack it first, or compress it as "
                f"{', '.join(COMPRESSIONS)}"
            )
        raise ConfigError(
            f"{strange[0].path}: no format is known for the extension {suffix!r}; "
            f"say which it is: --format {'|'.join(FORMATS)} (extensions known: {', '.join(EXTENSIONS)})"
        )
    if strange:
        notice(f"{text}: passed over {len(strange)} files of unknown format, such as {strange[0].path}")
    return chosen


def _cut(
    files: Sequence[tuple[SourceFile, str]], fields: Fields, separator: bytes | None, size: int, damaged: OnDamage
) -> Iterator[Part]:
    texts: list[SourceFile] = []
    waiting = 0
    for file, kind in files:
        if kind == "text" and fields.whole:
            raise ConfigError(f"{file.path}: plain text holds no conversations; due: JSON lines, Parquet or Arrow")
        if kind == "text":
            texts.append(file)
            waiting += file.size_bytes
            if waiting >= size:
                yield TextPart(tuple(texts), fields, separator)
                texts, waiting = [], 0
            continue
        if texts:
            yield TextPart(tuple(texts), fields, separator)
            texts, waiting = [], 0
        yield from _cut_file(file, kind, fields, size, damaged)
    if texts:
        yield TextPart(tuple(texts), fields, separator)


def _cut_file(file: SourceFile, kind: str, fields: Fields, size: int, damaged: OnDamage) -> Iterator[Part]:
    if kind in ("parquet", "arrow") and file.compression:
        raise ConfigError(f"{file.path}: {kind} files are not read while they are compressed; decompress it first")
    if kind == "parquet":
        yield from cut_parquet(file, fields, size, damaged)
    elif kind == "arrow":
        yield ArrowPart(file, fields)
    elif fields.whole and holds_values(file):
        yield from cut_values(file, size)
    elif file.compression:
        yield JsonlPart(file, fields, 0, file.size_bytes)
    else:
        for begin in range(0, max(file.size_bytes, 1), size):
            yield JsonlPart(file, fields, begin, min(begin + size, file.size_bytes))
