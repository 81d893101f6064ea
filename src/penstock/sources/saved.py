"""Reads Arrow files, and folders that `datasets` saved to disk, which are Arrow streams with a list of them."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import pyarrow as pa

from penstock.errors import RecordError
from penstock.sources.damage import Damage, OnDamage, Unreadable, stop_at_damage
from penstock.sources.files import Extent, SourceFile, local_file, open_random, whole_file
from penstock.sources.lines import BLOCK_LINES
from penstock.sources.objects import ObjectBlock, rows_as_objects
from penstock.sources.records import Fields, RecordBlock
from penstock.sources.rows import block_of_rows, require_columns

_FILE_MAGIC = b"ARROW1"


@final
@dataclass(frozen=True, slots=True)
class ArrowPart:
    """One Arrow file, of the stream or of the file format."""

    file: SourceFile
    fields: Fields

    @property
    def name(self) -> str:
        """For people."""
        return self.file.path

    @property
    def identity(self) -> str:
        """What it reads, whatever that holds."""
        return self.file.path

    @property
    def sources(self) -> tuple[SourceFile, ...]:
        """What it reads from."""
        return (self.file,)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that `RecordBlock.files` points into."""
        return (self.file.path,)

    @property
    def size_bytes(self) -> int:
        """Raw bytes, for progress."""
        return self.file.size_bytes

    def extents(self) -> tuple[Extent, ...]:
        """The bytes that decide what comes of it, of a local file."""
        return whole_file(self.file)

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """The rows, in order."""
        for table, row, size_bytes in self._tables(damaged):
            require_columns(table.schema, self.fields, self.file.path)
            yield block_of_rows(table, self.fields, self.file.path, row, size_bytes)

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """The rows with all their columns, in order."""
        for table, row, size_bytes in self._tables(damaged):
            yield rows_as_objects(table, self.file.path, row, size_bytes)

    def _tables(self, damaged: OnDamage) -> Iterator[tuple[pa.Table, int, int]]:
        """Some rows, the number of the first, and the raw bytes they took."""
        row = counted = 0
        with open_random(self.file) as stream:
            try:
                for batch in _batches(stream):
                    position = max(min(stream.tell(), self.size_bytes), counted)
                    for begin in range(0, batch.num_rows, BLOCK_LINES):
                        rows = batch.slice(begin, BLOCK_LINES)
                        yield pa.Table.from_batches([rows]), row + begin, position - counted
                        counted = position
                    row, counted = row + batch.num_rows, position
            except (pa.ArrowException, OSError, Unreadable) as error:
                damaged(
                    Damage(self.file.path, row, f"not sound Arrow: {error}", self.size_bytes, self.size_bytes - counted)
                )


def _batches(stream: Any) -> Iterator[pa.RecordBatch]:
    is_file = stream.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    stream.seek(0)
    if is_file:
        reader = pa.ipc.open_file(stream)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(stream)


def find_saved(folder: str | os.PathLike[str]) -> list[SourceFile] | None:
    """The data files of a folder that `datasets` saved, in its order; None when it is not such a folder.

    Raises:
        RecordError: It holds several splits, or rows chosen by an index file.
    """
    path = os.path.expanduser(os.fspath(folder))
    if os.path.isfile(os.path.join(path, "dataset_dict.json")):
        splits = _read_json(os.path.join(path, "dataset_dict.json")).get("splits", [])
        cures = ", ".join(os.path.join(path, split) for split in splits)
        raise RecordError(f"{path}: holds {len(splits)} splits of a `datasets` dictionary; name one: {cures}")
    state_path = os.path.join(path, "state.json")
    if not os.path.isfile(state_path) or not os.path.isfile(os.path.join(path, "dataset_info.json")):
        return None
    state = _read_json(state_path)
    if state.get("_indices_files"):
        raise RecordError(f"{state_path}: rows are chosen by an index file; save it again after .flatten_indices()")
    names = [entry["filename"] for entry in state.get("_data_files", [])]
    missing = next((name for name in names if not os.path.isfile(os.path.join(path, name))), None)
    if missing or not names:
        raise RecordError(f"{state_path}: names the data file {missing!r}, which is not there; the folder was cut")
    return [local_file(os.path.join(path, name)) for name in names]


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as stream:
            content: dict[str, Any] = json.load(stream)
    except ValueError as error:
        raise RecordError(f"{path}: not JSON: {error}") from error
    return content
