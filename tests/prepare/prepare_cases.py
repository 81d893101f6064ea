"""What several test files of prepare share."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.data.prepare.ray_tasks import RayTasks


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path inside."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def slowly(record: dict[str, Any]) -> dict[str, Any]:
    """A transform that takes its time, and stops for good where STOP_AT says (folder:parts),
    waiting to be killed.

    STOP_NOTE may be a file that says so, as long as it exists.
    """
    time.sleep(0.0007)
    while _is_time_to_stop():
        time.sleep(0.01)
    return record


def _is_time_to_stop() -> bool:
    stop_at, note = os.environ.get("STOP_AT", ""), os.environ.get("STOP_NOTE")
    if note and os.path.exists(note):
        stop_at = Path(note).read_text()
    folder, _, parts = stop_at.rpartition(":")
    return bool(folder) and len(list(Path(folder).glob(".prepare/part-*.json"))) >= int(parts)


def fatal_once(record: dict[str, Any]) -> dict[str, Any]:
    """A transform that kills its process at a certain record, once (FATAL: a file that notes
    it).
    """
    note = Path(os.environ["FATAL"])
    if "never" in record["text"] and record["text"].endswith(" 400") and not note.exists():
        note.touch()
        os.kill(os.getpid(), signal.SIGKILL)
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
    """`function`, which dies when it is called for the `steps[1]`-th time; `steps[0]` counts the
    calls.
    """

    def call(*arguments: Any, **options: Any) -> Any:
        steps[0] += 1
        if steps[0] == steps[1]:
            raise Killed
        return function(*arguments, **options)

    return call


def blind(patch: Any, sees: Callable[[int], bool] = lambda number: False) -> None:
    """Let Ray tasks not see the output folder, but for those of some numbers; `patch` is pytest's
    `MonkeyPatch`.
    """
    start = RayTasks.start

    def start_elsewhere(self: RayTasks, number: int, *work: Any) -> None:
        place = self._place
        if not sees(number):
            self._place = replace(place, marker=place.marker.with_name("none"))
        start(self, number, *work)
        self._place = place

    patch.setattr(RayTasks, "start", start_elsewhere)
