"""What `prepare` reads: its parts, what identifies them, and what the source must not be."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, OutputError, RecordError
from penstock.core.json_values import JsonObject
from penstock.data.prepare.folder import input_changes
from penstock.data.prepare.probe import say
from penstock.data.prepare.settings import PrepareSettings
from penstock.data.reports.report import describe_changes
from penstock.data.sources import Part, open_records, open_sources
from penstock.data.sources.formats import list_files
from penstock.data.sources.hub_datasets import Choice

Paths = str | os.PathLike[str]


def open_parts(
    source: Any, settings: PrepareSettings, progress: bool
) -> list[Part] | Iterator[Part]:
    """The parts of paths, as a list; those of an iterable, as they come."""
    if paths_of(source) is not None:
        return open_sources(
            source,
            format=settings.format,
            fields=settings.fields,
            separator=settings.separator,
            delimiter=settings.delimiter,
            part_bytes=settings.part_bytes,
            subset=settings.subset,
            split=settings.split,
            notice=say if progress else None,
            damaged=settings.on_damage([]),
        )
    settings.refuse_choice()
    return open_records(source, fields=settings.fields, part_bytes=settings.part_bytes)


def identity_of(parts: list[Part] | Iterator[Part]) -> JsonObject:
    """The identity of the input: what the parts read, and the versions of their files."""
    if not isinstance(parts, list):
        return {"inputs": ["<python>"], "files": {}}
    files = {file.key: file.version for part in parts for file in part.sources}
    return {"inputs": [part.identity for part in parts], "files": files}


def refuse_output(source: object, output: Path) -> None:
    """Refuse an output path that Arrow cannot open, or that lies inside a source and would be read
    as input.
    """
    try:
        str(output).encode()
    except UnicodeEncodeError:
        raise OutputError(
            f"{str(output)!a}: the path is not UTF-8, which Arrow needs; choose another folder"
        ) from None
    if output.is_file():
        return
    for one in paths_of(source) or ():
        if os.path.isdir(one) and output.resolve().is_relative_to(Path(one).resolve()):
            raise ConfigError(
                f"{output}: lies inside the source {os.fspath(one)}; choose a folder outside"
            )


def paths_of(source: object) -> Sequence[Paths] | None:
    """The paths in a source; None if it is an iterable of records."""
    listed = [source] if isinstance(source, (str, os.PathLike)) else source
    if isinstance(listed, (list, tuple)) and all(
        isinstance(one, (str, os.PathLike)) for one in listed
    ):
        return listed
    return None


def refuse_changes(plan: JsonObject, source: object, settings: PrepareSettings) -> None:
    """Raise if the input has changed since the work began."""
    again = "run it again: unchanged parts are kept"
    try:
        paths = paths_of(source) or ()
        choice = Choice(settings.subset, settings.split)
        listed = [file for path in paths for file in list_files(path, settings.format, choice)]
        if {file.key: file.version for file in listed} == plan["files"]:
            return  # the same files give the same parts; looking at each again takes much longer
        now = identity_of(open_parts(source, settings, False))
    except (RecordError, ConfigError) as error:
        raise RecordError(f"the input changed while it was prepared: {error}; {again}") from error
    if now != {name: plan[name] for name in now}:
        changes = input_changes(plan, now)
        raise RecordError(
            f"the input changed while it was prepared: {describe_changes(changes)}; {again}"
        )
