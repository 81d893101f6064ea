"""Reads a benchmark's records: from a file, a folder that holds it, or the Hugging Face hub.

Files are JSON Lines, plain or gzipped, or Parquet. Nothing is fetched where a file or a folder is given.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pyarrow.parquet

from penstock.errors import ConfigError, RecordError
from penstock.evaluation.hub import hub_rows

_ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a benchmark's records are."""

    files: Sequence[str]
    """Names that its file begins with, in whatever case, best first."""
    hub: str
    """Its name on the hub."""
    configuration: str
    splits: Sequence[str] = ("test",)
    """Splits there that hold all its records."""


def read_records(data: str | None, origin: Origin, task: str) -> tuple[list[dict[str, Any]], str]:
    """All records, and what to call their place in errors.

    Args:
        data: A file, or a folder with such a file; None for the hub.
        origin: The names of the benchmark.
        task: The task, for errors.

    Raises:
        ConfigError: There is no such file, or the hub does not give it.
        RecordError: The file, or a record, cannot be read; there is none.
        MissingExtraError: The hub needs `datasets`, which is not installed.
    """
    if data is None:
        parts = [hub_rows(origin.hub, origin.configuration, split, task) for split in origin.splits]
        return [record for part in parts for record in part], f"{origin.hub} (hub)"
    path = _find(Path(data), origin)
    try:
        records = _from_file(path)
    except (OSError, EOFError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise RecordError(f"{path}: cannot be read ({error}); fetch the file again") from error
    if not records:
        raise RecordError(f"{path}: holds no record; fetch the file again")
    return records, str(path)


def _find(path: Path, origin: Origin) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(
            f"{path}: there is no such file or folder; leave `data` out to read {origin.hub} from the hub"
        )
    files = sorted(file for file in path.iterdir() if file.name.lower().endswith(_ENDINGS))
    for name in origin.files:
        for file in files:
            # The name goes on with a dot, or a dash and a version, so that mbpp does not find mbppplus.
            if file.name.lower().startswith((f"{name.lower()}.", f"{name.lower()}-")):
                return file
    raise ConfigError(
        f"{path}: no file {' or '.join(origin.files)} with an ending of {', '.join(_ENDINGS)}; "
        "complete the folder, or name a file"
    )


def _from_file(path: Path) -> list[dict[str, Any]]:
    if path.name.lower().endswith(".parquet"):
        records: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
        return records
    opened = gzip.open if path.suffix == ".gz" else open
    records = []
    with opened(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                records.append(_record(line, f"{path}: line {number}"))
    return records


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RecordError(f"{where}: this is no JSON ({error}); fetch the file again") from error
    if not isinstance(record, dict):
        raise RecordError(f"{where}: a JSON object is due, got {type(record).__name__}")
    return record
