"""The trajectories of a round that are over, one line each, in a file next to the output.

A line is given to the system at once, so a process that is killed loses nothing. It is written to
the disk at most once a second, since that takes milliseconds on some disks; a machine that dies may
lose the last few. What is lost, cut or damaged is sampled again.
"""

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from penstock.core.errors import StateError
from penstock.core.json_files import json_text
from penstock.core.json_values import JsonMapping, JsonObject

SYNC_SECONDS = 1.0
"""Time between two writes to the disk, at least."""
_log = logging.getLogger("penstock.runs")


@final
class Journal:
    """The file; its first line says what the trajectories are of.

    Attributes:
        finished: (prompt, sample) → the record.

    Args:
        path: The file.
        digest: Of prompts and settings.

    Raises:
        StateError: The file is of others, or its first line is damaged.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self.path, self._digest = path, digest
        self.finished: dict[tuple[int, int], JsonObject] = {}
        self._file: Any = None
        self._synced = 0.0
        if path.is_file():
            self._read()

    def _read(self) -> None:
        damaged = end = 0
        for number, (begin, line) in enumerate(_lines(self.path)):
            # A line that was cut by a kill is the last.
            if line.endswith(b"\n"):
                end = begin + len(line)
                if number == 0:
                    self._check(_parsed(line))
                elif (found := _trajectory(line)) is None:
                    damaged += 1
                else:
                    self.finished[found["prompt"], found["sample"]] = found
        os.truncate(self.path, end)
        if damaged:
            _log.warning(
                "%s: %d lines are damaged; what they held is sampled again", self.path, damaged
            )

    def _check(self, first: JsonObject) -> None:
        if "digest" not in first:
            raise StateError(
                f"{self.path}: its first line is damaged; expected what its trajectories are of; "
                "remove it, or choose another output"
            )
        if first["digest"] != self._digest:
            raise StateError(
                f"{self.path}: is of other prompts, settings or another model; remove it, or "
                "choose another output"
            )

    def __enter__(self) -> "Journal":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        begins = not self.path.is_file() or not self.path.stat().st_size
        self._file = self.path.open("a", encoding="utf-8")
        if begins:
            self._write({"digest": self._digest})
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def add(self, prompt: int, sample: int, record: JsonMapping) -> None:
        """Write one that is over.

        Raises:
            ConfigError, TypeError: JSON cannot hold it.
        """
        numbered = {"prompt": prompt, "sample": sample, **record}
        self._write(numbered)
        self.finished[prompt, sample] = numbered

    def _write(self, value: JsonMapping) -> None:
        self._file.write(json_text(value, self.path) + "\n")
        self._file.flush()
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(first byte, line) of each line."""
    begin = 0
    with path.open("rb") as file:
        for line in file:
            yield begin, line
            begin += len(line)


def _parsed(line: bytes) -> JsonObject:
    """The object of a line; empty: it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _trajectory(line: bytes) -> JsonObject | None:
    """The record of a line; None: it is damaged."""
    found = _parsed(line)
    numbers = [found.get("prompt"), found.get("sample")]
    return found if found.get("steps") and all(type(one) is int for one in numbers) else None
