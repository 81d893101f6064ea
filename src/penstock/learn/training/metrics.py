"""The figures of a run: `RUN/metrics.jsonl`, one record per line, and who else gets the records.

Each line is in the file when `see` returns, so a killed run loses none. A resumed run first removes
the records after its starting step, so no step appears twice and curves have no loops. Records hold
what the trainer gives (`loss`, its parts such as `loss.source.web`, `loss.task.R` and
`loss.distance.2`, and more: see `Trainer.train`), plus `percent` done, `tokens_per_second` (without
padding, waiting for data included) and `seconds_left`.
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, final

from penstock.core.errors import FormatError, OutputError
from penstock.core.json_values import JsonObject, without_nan
from penstock.learn.training.figure_names import is_evaluation
from penstock.learn.training.progress_line import ProgressLine
from penstock.learn.training.trackers import Tracker, TrackerName, open_trackers

METRICS = "metrics.jsonl"
MEMORY = 0.95
"""Weight of the previous sum in the running mean of seconds per step."""

Record = Mapping[str, Any]


@final
class Metrics:
    """Takes a record per step, and passes it on; use as a context manager.

    Args:
        run: The run's folder.
        total_steps: Steps of the whole run.
        done: Steps that are done already, 0 at the beginning.
        every: Steps between records to write; the last record and those with an evaluation are
            always written.
        log: Trackers that get the records, too.
        log_project: Project of W&B and trackio, experiment of MLflow; see `open_trackers`.
        log_name: The run's name there; None: that of its folder.
        config: The run file's values, which trackers show next to the curves.
        shown: Whether to write and show anything; with several processes, only on rank 0.
        progress: Whether to show progress.

    Raises:
        OutputError: The file cannot be written.
        MissingExtraError: A tracker is requested and not installed.
        ConfigError: A tracker refuses to begin.
    """

    def __init__(
        self,
        run: Path,
        *,
        total_steps: int,
        done: int = 0,
        every: int = 1,
        log: Sequence[TrackerName] = (),
        log_project: str | None = None,
        log_name: str | None = None,
        config: Mapping[str, object] = MappingProxyType({}),
        shown: bool = True,
        progress: bool = True,
    ) -> None:
        self.last: JsonObject = {}
        self._total, self._every, self._shown = total_steps, every, shown and progress
        self._usual, self._weight, self._steps = 0.0, 0.0, 0
        self._tokens: int | None = None
        self._trackers: list[Tracker] = []
        self._lines: JsonLines | None = None
        if not shown:
            return
        # Before the file, whose lines a start that a tracker refuses must not change.
        self._trackers = open_trackers(
            log, run, done, project=log_project, name=log_name, config=config
        )
        try:
            self._lines = JsonLines(run / METRICS, done)
        except OutputError:
            self._close(failed=True)
            raise
        self._line = ProgressLine(total_steps, done)

    def __enter__(self) -> Self:
        if self._shown:
            self._line.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._shown:
            self._line.stop()
        self._close(failed=kind is not None)

    def _close(self, *, failed: bool) -> None:
        for tracker in self._trackers:
            tracker.close(failed)
        if self._lines is not None:
            self._lines.close()

    def see(self, record: Record) -> JsonObject:
        """Take a step's record, with `step` and cumulative `tokens`, and `seconds` and
        `wait_seconds` of the step.

        Returns:
            The record with the added figures.
        """
        self.last = {**record, **self._completion(record)}
        step = record["step"]
        if self._shown:
            self._line.show(self.last)
        if step % self._every == 0 or step == self._total or any(map(is_evaluation, record)):
            if self._lines is not None:
                self._lines.see(self.last)
            for tracker in self._trackers:
                tracker.see(self.last)
        return self.last

    def _completion(self, record: Record) -> JsonObject:
        seconds = record["seconds"] + record["wait_seconds"]
        self._steps += 1
        if self._steps == 2:
            # The first step of a start also compiles, measures and warms caches.
            self._usual = self._weight = 0.0
        self._usual = MEMORY * self._usual + (1 - MEMORY) * seconds
        self._weight = MEMORY * self._weight + (1 - MEMORY)
        usual = self._usual / self._weight
        added: JsonObject = {
            "percent": round(100 * record["step"] / self._total, 3),
            "seconds_left": round(usual * (self._total - record["step"]), 1),
        }
        if self._tokens is not None:
            added["tokens_per_second"] = round(
                (record["tokens"] - self._tokens) / max(seconds, 1e-9), 1
            )
        self._tokens = record["tokens"]
        return added


@final
class JsonLines:
    """A file with one JSON object per line; numbers that are not finite are written as null."""

    def __init__(self, path: Path, done: int) -> None:
        self.path, self._done = path, done
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _keep_until(path, done)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"{path}: cannot be written: {error.strerror}; choose another run folder"
            ) from error

    def see(self, record: Record) -> None:
        """Append a line; the record of the step that was done before takes the place of the former
        one.
        """
        try:
            if record["step"] == self._done:
                self._file.close()
                _keep_until(self.path, self._done - 1)
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(json.dumps(without_nan(record)) + "\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(
                f"{self.path}: cannot be written: {error.strerror}; make room, then resume"
            ) from error

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_metrics(run: Path) -> list[JsonObject]:
    """All records of a run, in order, without a last line that a kill truncated.

    Args:
        run: A run's folder, or the file itself.

    Raises:
        FormatError: There is no such file, or a line is not a record.
    """
    path = run / METRICS if run.is_dir() else run
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise FormatError(
            f"{path}: {error.strerror}; give the folder of a run of `penstock train`"
        ) from None
    records = []
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise FormatError(
                f"{path}:{number}: is not a record of metrics: {line[:60]!r}; remove the line"
            )
    return records


def _keep_until(path: Path, done: int) -> None:
    """Remove records after step `done`, and truncated lines; the file is replaced atomically."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [
        line for line in lines if (record := _record(line)) is not None and record["step"] <= done
    ]
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _record(line: str) -> JsonObject | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if isinstance(step, int) and not isinstance(step, bool) else None
