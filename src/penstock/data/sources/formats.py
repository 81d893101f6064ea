"""Decides the format and the compression of each file: by the setting, by its name, and by its
first bytes.

The first bytes of local files are read. Where they are certain, they decide, and a notice says what
the name does not; where they contradict the setting, that is an error. A file whose name says that
it is compressed, and that is plain text, is read as text, as `datasets` does. Of remote files, only
those are looked at whose name says nothing, with one small request; others are as their names say,
and reading notices where that is wrong (`files.Stream`).
"""

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal, get_args

from penstock.core.errors import ConfigError
from penstock.core.urls import shown_url
from penstock.data.sources.arrow_files import find_saved
from penstock.data.sources.compression import COMPRESSIONS, PACKED
from penstock.data.sources.files import SourceFile, open_stream, read_head
from penstock.data.sources.finding import find_files
from penstock.data.sources.hub_datasets import Choice, card_settings, choose_files
from penstock.data.sources.signatures import (
    HEAD_BYTES,
    PAGE,
    Signature,
    begins_json,
    is_page,
    is_text,
    recognise,
    refuse_content,
)
from penstock.data.sources.tar_files import IMAGES
from penstock.data.stores.hub import CARD, is_whole, name_in
from penstock.data.stores.remote_files import Unreadable

EXTENSIONS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "webdataset",
    **dict.fromkeys((".txt", ".text", ".md", ".rst"), "text"),
    ".csv": "csv",
    **dict.fromkeys((".tsv", ".tab"), "tsv"),
}
"""File name extension → format; `format=` overrides it."""

Format = Literal["jsonl", "parquet", "text", "csv", "tsv", "arrow", "webdataset", "imagefolder"]
FORMATS: tuple[Format, ...] = get_args(Format)

_LINES = ("jsonl", "text", "csv", "tsv")
"""Formats of text, which may be compressed."""
_BINARY = ("parquet", "arrow", "webdataset")
"""Formats that no text is in."""

_CARD_BYTES = 1 << 20
"""The most that is read of a dataset's README.md on the Hub; its settings stand at the top."""

Notice = Callable[[str], None]
Found = tuple[SourceFile, str, str]
"""A file, its format (empty: unknown), and what its name does not say of it, in words (empty:
nothing).
"""


def with_formats(
    specs: Sequence[str | os.PathLike[str]],
    format: str | None,
    notice: Notice,
    choice: Choice = Choice(),  # noqa: B008  (it is frozen)
) -> list[tuple[SourceFile, str]]:
    """The files that users name, each with its format.

    Args:
        specs: Paths, folders, globs or URLs.
        format: One of `FORMATS`; None: by names and first bytes.
        notice: Called with a message about files that are skipped, and about wrong names.
        choice: What to read of whole datasets on the Hub.

    Raises:
        RecordError: There is no such file.
        ConfigError: The format of a file is unknown or not read, or its content contradicts
            `format`; a dataset on the Hub has several subsets or splits, and none is chosen.
    """
    if choice != Choice() and not any(is_whole(os.fspath(spec)) for spec in specs):
        raise ConfigError(
            "subset and split choose the files of a whole dataset on the Hub, such as "
            "hf://datasets/OWNER/NAME, and no source is one; leave them out"
        )
    found = [one for spec in specs for one in _found_at(spec, format, notice, choice)]
    remarks: dict[str, list[str]] = {}
    for file, _, remark in found:
        if remark:
            remarks.setdefault(remark, []).append(file.path)
    for remark, paths in remarks.items():
        more = f"; so are {len(paths) - 1:,} more files" if len(paths) > 1 else ""
        notice(f"{paths[0]}: {remark}{more}")
    return [(file, kind) for file, kind, _ in found]


def list_files(
    spec: str | os.PathLike[str],
    format: str | None,
    choice: Choice = Choice(),  # noqa: B008  (it is frozen)
) -> list[SourceFile]:
    """All files at a place, as they are now; none of them is opened.

    Raises:
        RecordError: There is none.
    """
    return _saved_at(spec, format) or _chosen_at(spec, format, lambda _: None, choice)


def _chosen_at(
    spec: str | os.PathLike[str], format: str | None, notice: Notice, choice: Choice
) -> list[SourceFile]:
    """All files at a place; of a whole dataset on the Hub, those of the chosen subset and split."""
    files = find_files(spec)
    where = os.fspath(spec).rstrip("/")
    if not is_whole(where):
        return files
    by_name = {name_in(file.path): file for file in files}
    card = _card(by_name[CARD], where) if CARD in by_name else ""
    suffixes = EXTENSIONS if format is None else None
    names = choose_files(where, list(by_name), card, choice, suffixes, notice)
    return [by_name[name] for name in names]


def _card(file: SourceFile, where: str) -> str:
    """The README.md of a dataset, or its beginning with all its settings."""
    content = read_head(file, _CARD_BYTES)
    text = content.decode("utf-8-sig", "replace")
    # What is cut would look like a card without settings: all subsets would be read as one.
    if len(content) == _CARD_BYTES and text.startswith("---") and card_settings(text) is None:
        raise ConfigError(
            f"{where}/{CARD}: has more than {_CARD_BYTES >> 20} MiB of settings; name the files "
            f"instead: {where}/FOLDER/*"
        )
    return text


def _saved_at(spec: str | os.PathLike[str], format: str | None) -> list[SourceFile] | None:
    return find_saved(spec) if format in (None, "arrow") else None


def _found_at(
    spec: str | os.PathLike[str], format: str | None, notice: Notice, choice: Choice
) -> Iterator[Found]:
    saved = _saved_at(spec, format)
    if saved is not None:
        yield from ((file, "arrow", "") for file in saved)
        return
    text = shown_url(spec)
    in_folder = (
        not glob.has_magic(text) if "://" in text else os.path.isdir(os.path.expanduser(text))
    )
    files = _chosen_at(spec, format, notice, choice)
    by_name = [EXTENSIONS.get(file.suffixes[0], "") for file in files]
    # A folder with files of known names may hold others about them, which are no input.
    skips = in_folder and any(by_name) and format is None
    named = zip(files, by_name, strict=True)
    looked = [
        (file, "", "") if skips and not kind else _look_at(file, kind, format)
        for file, kind in named
    ]
    chosen, unknown = (
        [one for one in looked if one[1]],
        [file for file, kind, _ in looked if not kind],
    )
    if unknown and not (chosen and in_folder):
        _refuse_unknown(unknown[0])
    if unknown:
        _say_skipped(text, unknown, notice)
    yield from chosen


def _look_at(file: SourceFile, by_name: str, format: str | None) -> Found:
    """Decide what a file is; reads its first bytes, unless it is remote and its name says all."""
    if format == "imagefolder" or not file.size_bytes or (file.is_remote and by_name):
        return file, format or by_name, ""
    head = read_head(file, HEAD_BYTES)
    outer = recognise(head)
    file, remark = _with_codec(file, by_name, head, outer)
    if file.compression and (remark or not by_name):
        head = _inner_head(file)
        outer = recognise(head)
    kind, more = _with_kind(
        file, by_name, format, head, None if file.compression and not remark and by_name else outer
    )
    return file, kind, more or remark


def _with_codec(
    file: SourceFile, by_name: str, head: bytes, found: Signature | None
) -> tuple[SourceFile, str]:
    """The file with its compression, and what its name does not say of that."""
    named = file.compression
    if found is not None and found.codec is not None:
        if found.codec == named:
            return file, ""
        says = "it is not compressed" if named is None else f"{named}"
        return replace(
            file, codec=found.codec
        ), f"is {found.name}, although its name says {says}; read as what it is"
    is_plain = found is not None or (by_name in ("", *_LINES) and is_text(head))
    if named is None or not is_plain:
        return file, ""
    return replace(
        file, codec=""
    ), f"is not compressed, although its name says {named}; read as what it is"


def _inner_head(file: SourceFile) -> bytes:
    """The first bytes of a compressed file's content; none if it is damaged, which its reader
    reports.
    """
    with suppress(Unreadable), open_stream(file, ahead=False) as stream:
        return stream.read(HEAD_BYTES)
    return b""


def _with_kind(
    file: SourceFile, by_name: str, format: str | None, head: bytes, found: Signature | None
) -> tuple[str, str]:
    """The format of a file, and what its name does not say of that; `head` and `found` are of its
    content.
    """
    named = format or by_name
    if found is not None:
        refuse_content(file.path, found)
    if named != "text" and is_page(head):
        refuse_content(file.path, PAGE)
    if found is not None and found.format is not None and found.format != named:
        if format is not None:
            raise ConfigError(
                f"{file.path}: is {found.name}, but format is {format}; leave format out, or "
                f"set it to {found.format}"
            )
        says = f"although its name says {by_name}" if by_name else "which its name does not say"
        return found.format, f"is {found.name}, {says}; read as what it is"
    has_name = by_name or file.suffixes[0].lstrip(".0123456789")
    if (
        format is None
        and found is None
        and (by_name in _BINARY or not has_name)
        and begins_json(head)
    ):
        says = f"although its name says {by_name}" if by_name else "which its name does not say"
        return "jsonl", f"begins as JSON, {says}; read as JSON lines"
    return named, ""


def _refuse_unknown(file: SourceFile) -> None:
    suffix = file.suffixes[0]
    if suffix in PACKED:
        raise ConfigError(
            f"{file.path}: {suffix} files are not supported; unpack the file first, or "
            f"compress it as {', '.join(COMPRESSIONS)}"
        )
    raise ConfigError(
        f"{file.path}: unknown extension {suffix!r}, and its first bytes do not say what it "
        f"is; set format to one of {', '.join(FORMATS)} (known extensions: "
        f"{', '.join(EXTENSIONS)})"
    )


def _say_skipped(text: str, unknown: Sequence[SourceFile], notice: Notice) -> None:
    hint = ""
    if any(file.suffixes[0][1:] in IMAGES for file in unknown):
        hint = "; images with captions are read with format imagefolder"
    notice(
        f"{text}: skipped {len(unknown)} files of unknown format, such as {unknown[0].path}{hint}"
    )


def check_delimiter(delimiter: str | None) -> None:
    """Refuse what cannot separate the cells of CSV.

    Raises:
        ConfigError: It is more than one character, or one that records or quotes need.
    """
    if delimiter is not None and (len(delimiter.encode()) != 1 or delimiter in '"\r\n\0'):
        raise ConfigError(
            f"delimiter must be one ASCII character, no quote and no line end; got {delimiter!r}"
        )
