"""Reads a benchmark's records from a file, a folder that holds it, or the Hugging Face Hub.

Files are JSON Lines, plain or gzipped, or Parquet. If a file or a folder is given, nothing is
downloaded.
"""

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pyarrow.parquet

from penstock.core.errors import ConfigError, MissingExtraError, RecordError
from penstock.core.json_values import JsonObject
from penstock.learn.evaluation.recognition import advice, task_of_file

_ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
Placed = tuple[str, dict[str, Any]]
"""Where a record is, for errors (its file and line), and the record."""


def hub_rows(name: str, config: str, split: str, task: str) -> list[JsonObject]:
    """All rows of a split of a dataset on the hub.

    Raises:
        MissingExtraError: `datasets` is not installed.
        ConfigError: The dataset cannot be fetched.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise MissingExtraError("datasets", "eval") from None
    try:
        return [dict(row) for row in load_dataset(name, config, split=split)]
    except Exception as error:  # the hub's errors share no base class
        raise ConfigError(
            f"task {task}: {name} ({config}, {split}) cannot be fetched from the hub: "
            f"{error}; set data to a folder that has it (--task-data {task}=PATH)"
        ) from error


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a benchmark's records are."""

    files: Sequence[str]
    """Beginnings of its file name, in any case, the preferred one first."""
    hub: str
    """Name of the dataset on the hub."""
    configuration: str
    splits: Sequence[str] = ("test",)
    """Splits on the hub that together hold all records."""


def read_records(data: str | None, origin: Origin, task: str) -> tuple[list[JsonObject], str]:
    """All records, and the name of their file or dataset, for errors; see `read_placed`."""
    placed, where = read_placed(data, origin, task)
    return [record for _, record in placed], where


def read_placed(data: str | None, origin: Origin, task: str) -> tuple[list[Placed], str]:
    """All records with their places, and the name of their file or dataset.

    Args:
        data: A file, or a folder with such a file; None: from the hub.
        origin: The names of the benchmark.
        task: The task, for errors.

    Raises:
        ConfigError: There is no such file, or the dataset cannot be fetched.
        RecordError: The file or a record cannot be read, or there are no records.
        MissingExtraError: The hub is needed, but `datasets` is not installed.
    """
    if data is None:
        where = f"{origin.hub} (hub)"
        parts = [hub_rows(origin.hub, origin.configuration, split, task) for split in origin.splits]
        rows = [record for part in parts for record in part]
        return [
            (f"{where}: record {number}", record) for number, record in enumerate(rows, 1)
        ], where
    path = _find(Path(data), origin)
    try:
        records = _from_file(path, task)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, pyarrow.ArrowException) as error:
        raise RecordError(f"{path}: cannot be read ({error}); fetch the file again") from error
    if not records:
        raise RecordError(f"{path}: has no records; fetch the file again")
    return records, str(path)


def _find(path: Path, origin: Origin) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(
            f"{path}: there is no such file or folder; leave out `data` to read {origin.hub} "
            "from the hub"
        )
    files = sorted(file for file in path.iterdir() if file.name.lower().endswith(_ENDINGS))
    for name in origin.files:
        for file in files:
            # The name must continue with a dot, or a dash and a version, so that mbpp does not
            # match mbppplus.
            if file.name.lower().startswith((f"{name.lower()}.", f"{name.lower()}-")):
                return file
    raise ConfigError(
        f"{path}: no file {' or '.join(origin.files)} that ends in {', '.join(_ENDINGS)}; "
        "complete the folder, or give a file"
    )


def _from_file(path: Path, task: str) -> list[Placed]:
    if path.name.lower().endswith(".parquet"):
        rows: list[JsonObject] = pyarrow.parquet.read_table(path).to_pylist()
        return [(f"{path}: record {number}", row) for number, row in enumerate(rows, 1)]
    opened = gzip.open if path.suffix == ".gz" else open
    records = []
    # Windows puts a byte order mark first.
    with opened(path, "rt", encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}: line {number}"
                records.append((where, _record(line, where, path, task)))
    return records


def _record(line: str, where: str, path: Path, task: str) -> JsonObject:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        cure = advice(task_of_file(path), task) or "; fetch the file again"
        raise RecordError(f"{where}: not valid JSON ({error}){cure}") from error
    if not isinstance(record, dict):
        raise RecordError(
            f"{where}: expected a JSON object, got {type(record).__name__}; fetch the file again"
        )
    return record
