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
from types import MappingProxyType
from typing import Any, final

from penstock.core.errors import StateError
from penstock.core.json_files import json_text
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.data.prepare.trajectories import DIGEST, ENVIRONMENT, SAMPLING

SYNC_SECONDS = 1.0
"""Time between two writes to the disk, at least."""
_log = logging.getLogger("penstock.runs")


@final
class Journal:
    """The file; its first line says what the trajectories are of.

    Attributes:
        finished: (prompt, sample) → the record.
        digest: Of prompts and settings.

    Args:
        path: The file.
        digest: Of prompts and settings.
        sampling: Settings of the sampler that filter.
        environment: Digest of the code that judges; None: unknown.

    Raises:
        StateError: The file is of others, or its first line is damaged.
    """

    def __init__(
        self,
        path: Path,
        digest: str,
        *,
        sampling: JsonMapping = MappingProxyType({}),
        environment: str | None = None,
    ) -> None:
        self.path, self.digest = path, digest
        self._more = {SAMPLING: dict(sampling), ENVIRONMENT: environment}
        self.finished: dict[tuple[int, int], JsonObject] = {}
        self._file: Any = None
        self._synced = 0.0
        if path.is_file():
            self._read()

    def _read(self) -> None:
        damaged = end = 0
        for number, (begin, line) in enumerate(_lines(self.path)):
            # A line that was cut by a kill is the last.
            if number == 0 and not line.endswith(b"\n"):
                self._check_begun(line)
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

    def _check_begun(self, line: bytes) -> None:
        """A first line that was cut; a file of another kind would be lost."""
        begin = json_text({DIGEST: self.digest}, self.path).rstrip("}").encode()
        if not begin.startswith(line) and not line.startswith(begin):
            raise StateError(self._is_another())

    def _is_another(self) -> str:
        return (
            f"{self.path}: its first line is damaged, or it is no file of a round of rollouts; "
            "move it away, or choose another output"
        )

    def _check(self, first: JsonObject) -> None:
        if DIGEST not in first:
            raise StateError(self._is_another())
        if first.get(ENVIRONMENT, self._more[ENVIRONMENT]) != self._more[ENVIRONMENT]:
            _log.warning(
                "%s: the environment's code has changed; trajectories that are over keep the "
                "rewards that they were given then; remove the file to sample all of them again",
                self.path,
            )
        if first[DIGEST] != self.digest:
            raise StateError(
                f"{self.path}: is of other prompts, settings or another model; remove it, or "
                "choose another output"
            )

    def __enter__(self) -> "Journal":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        begins = not self.path.is_file() or not self.path.stat().st_size
        self._file = self.path.open("a", encoding="utf-8")
        if begins:
            self._write({DIGEST: self.digest, **self._more})
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
