"""What several test files of prepare share."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path inside."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def slowly(record: dict[str, Any]) -> dict[str, Any]:
    """A transform that takes its time, and stops for good where STOP_AT says (folder:parts), waiting to be killed."""
    time.sleep(0.0007)
    folder, _, parts = os.environ.get("STOP_AT", "").rpartition(":")
    while folder and len(list(Path(folder).glob(".prepare/part-*.json"))) >= int(parts):
        time.sleep(0.01)
    return record


def shout(record: dict[str, Any]) -> dict[str, Any] | None:
    """A transform that changes most records and drops some."""
    if "stops" in record["text"]:
        return None
    return {**record, "text": record["text"].upper()}


def mistaken(record: dict[str, Any]) -> dict[str, Any]:
    """A transform that spoils a record."""
    return {**record, "text": ""} if record["text"].endswith(" 7") else record


def failing(record: dict[str, Any]) -> dict[str, Any]:
    """A transform with a bug."""
    return {"text": record["absent"]}


class Killed(BaseException):
    """Stands for the end of the process."""


def dying(function: Callable[..., Any], steps: list[int]) -> Callable[..., Any]:
    """`function`, which dies when it is called for the `steps[1]`-th time; `steps[0]` counts the calls."""

    def call(*arguments: Any, **options: Any) -> Any:
        steps[0] += 1
        if steps[0] == steps[1]:
            raise Killed
        return function(*arguments, **options)

    return call
