"""The figures of a run: `RUN/metrics.jsonl`, one record per line; the progress line, TensorBoard,
Weights & Biases.

Each line is in the file when `see` returns, so a killed run loses none. A resumed run first removes
the records after its starting step, so no step appears twice and curves have no loops. Records hold
what the trainer gives (`loss`, its parts such as `loss.source.web`, `loss.task.R` and
`loss.distance.2`, and more: see `Trainer.train`), plus `percent` done, `tokens_per_second` (without
padding, waiting for data included) and `seconds_left`.

Progress goes to standard error, so that standard output stays machine-readable: a live line in a
terminal, with evaluations above it; elsewhere a plain line from time to time. TensorBoard and W&B
are imported only when requested.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from textwrap import indent
from types import MappingProxyType
from typing import Any, Protocol, Self, final

import yaml

from penstock.core.errors import FormatError, MissingExtraError, OutputError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.core.terminal import PLAIN_SECONDS, clock, time_columns, visible

SOURCE, TASK, DISTANCE = "loss.source.", "loss.task.", "loss.distance."
"""Prefixes of the parts of a step's loss; a source, a task or a target distance follows. See
`loss_groups`.
"""
PARTS = (SOURCE, TASK, DISTANCE)


def is_evaluation(name: str) -> bool:
    """Whether a figure belongs to an evaluation (`name/figure`) and not to a step; source names may
    have a slash.
    """
    return "/" in name and not name.startswith(PARTS)


BESIDES = 47
"""Columns of the live line without the bar and the note: "training", percent, two times with words,
and spaces.
"""


@final
class ProgressLine:
    """Shows records as they come.

    Args:
        total: Steps of the whole run.
        done: Steps that are done already.
    """

    def __init__(self, total: int, done: int) -> None:
        self._total, self._done = total, done
        self._live: Any = None
        self._shown = -PLAIN_SECONDS

    def start(self) -> None:
        """Start the live line, if standard error is a terminal."""
        if sys.stderr.isatty():
            self._live = _bar()
            self._live.start()
            self._task = self._live.add_task(
                "training", total=self._total, completed=self._done, note=""
            )

    def show(self, record: JsonMapping) -> None:
        """Show a record."""
        step, last = record["step"], record["step"] == self._total
        evaluations = evaluation_lines(record)
        if self._live is not None:
            room = (
                self._live.console.width
                - BESIDES
                - _bar_width(self._live.console.width)
                - len(f"step {step} · ")
            )
            self._live.update(
                self._task, completed=step, note=f"step {step} · {note(record, room)}"
            )
            for line in evaluations:
                self._live.console.print(f"step {step}: {line}", markup=False, highlight=False)
            return
        if last or evaluations or time.monotonic() - self._shown >= PLAIN_SECONDS:
            self._shown = time.monotonic()
            left = "" if last else f" · {clock(record['seconds_left'])} left"
            texts = [f"step {step}/{self._total} ({record['percent']:.0f}%): {note(record)}{left}"]
            texts += [f"step {step}: {line}" for line in evaluations]
            print("\n".join(texts), file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Leave the line as it is."""
        if self._live is not None:
            self._live.stop()


def note(record: JsonMapping, room: int | None = None) -> str:
    """`loss 3.214 · distill 0.42 · rate 1.0e-03 · 12.3 k tok/s · data 2%`: those parts that a
    record has.

    If it is longer than `room`, parts are dropped: first the share of waiting, then rate, speed and
    distillation.
    """
    seconds = record["seconds"] + record["wait_seconds"]
    parts = {}
    if "loss" in record:
        parts["loss"] = f"loss {record['loss']:.4f}"
    if "distillation" in record:
        parts["distillation"] = f"distill {record['distillation']:.4f}"
    if "learning_rate" in record:
        parts["rate"] = f"rate {record['learning_rate']:.1e}"
    if "tokens_per_second" in record:
        parts["speed"] = f"{record['tokens_per_second'] / 1000:.3g} k tok/s"
    if seconds > 0 and record["wait_seconds"] / seconds >= 0.01:
        parts["data"] = f"data {100 * record['wait_seconds'] / seconds:.0f}%"
    for name in ("data", "rate", "speed", "distillation"):
        if room is None or len(" · ".join(parts.values())) <= room:
            break
        parts.pop(name, None)
    return " · ".join(parts.values())


def evaluation_lines(record: Mapping[str, object]) -> list[str]:
    """`held loss 1.2558 · targets 13,002`: a line for each evaluator's numbers, and one for each of
    its texts.
    """
    numbers: dict[str, list[str]] = {}
    texts = []
    for name, value in record.items():
        if not is_evaluation(name):
            continue
        evaluator, figure = name.split("/", 1)
        if isinstance(value, int | float):
            numbers.setdefault(evaluator, []).append(f"{figure} {_number(value)}")
        else:
            texts.append(f"{name} {visible(str(value), lines=True)}")
    return [f"{evaluator} {' · '.join(figures)}" for evaluator, figures in numbers.items()] + texts


def _number(value: float) -> str:
    """Whole numbers, such as counts, as they are; others with four digits after the point."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4f}"


def _bar_width(width: int) -> int:
    return 20 if width >= 120 else 6


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=_bar_width(console.width)),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        *time_columns(),
        console=console,
    )


@final
class TensorBoard:
    """Event files in a folder. After a resume TensorBoard hides the records after the starting
    step.

    Args:
        folder: The files' folder.
        done: Steps that are done already.
        config: The run file's values, shown as text.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(
        self, folder: Path, done: int, config: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "tensorboard") from None
        self._writer: Any = SummaryWriter(str(folder), purge_step=done + 1 if done else None)
        if config:
            # Four spaces make it code, as TensorBoard reads Markdown.
            text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
            self._writer.add_text("run file", indent(text, "    "), done)

    def see(self, record: JsonMapping) -> None:
        """Write the numbers and texts of a record."""
        for name, value in _figures(record):
            self._writer.add_scalar(name, value, record["step"])
        for name, value in record.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, record["step"])

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


@final
class WandB:
    """A run of Weights & Biases, the same one after a resume: its id is in `RUN/wandb-id`.

    Args:
        run: The run's folder.
        project: Project of Weights & Biases.
        config: The run file's values, to find and compare runs there.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(
        self, run: Path, project: str, config: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        try:
            wandb: Any = import_module("wandb")
        except ImportError:
            raise MissingExtraError("wandb", "wandb") from None
        kept = run / "wandb-id"
        known = kept.read_text(encoding="utf-8").strip() if kept.is_file() else None
        self._run: Any = wandb.init(
            project=project,
            name=run.name,
            dir=str(run),
            id=known,
            resume="allow",
            config=dict(config),
        )
        if known is not None:
            # Without this permission a resumed run keeps its old values.
            self._run.config.update(dict(config), allow_val_change=True)
        kept.write_text(str(self._run.id) + "\n", encoding="utf-8")

    def see(self, record: Mapping[str, object]) -> None:
        """Send all numbers of a record."""
        self._run.log(dict(_figures(record)), step=record["step"])

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def _figures(record: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name != "step" and isinstance(value, int | float):
            yield name, float(value)


METRICS = "metrics.jsonl"
MEMORY = 0.95
"""Weight of the previous average in the running average of seconds per step."""

Record = Mapping[str, Any]


class Writer(Protocol):
    """A destination of records."""

    def see(self, record: Record) -> None:
        """Take a record; its `step` is the number of steps done."""

    def close(self) -> None:
        """Write what is left."""


@final
class Metrics:
    """Takes a record per step, and passes it on; use as a context manager.

    Args:
        run: The run's folder.
        total_steps: Steps of the whole run.
        done: Steps that are done already, 0 at the beginning.
        every: Steps between records to write; the last record and those with an evaluation are
            always written.
        tensorboard: Also write TensorBoard's files, in `RUN/tensorboard`.
        wandb: Also send records to this project of Weights & Biases.
        config: The run file's values, which TensorBoard and W&B show next to the curves.
        shown: Whether to write and show anything; with several processes, only on rank 0.
        progress: Whether to show progress.

    Raises:
        OutputError: The file cannot be written.
        MissingExtraError: TensorBoard or W&B is requested and not installed.
    """

    def __init__(
        self,
        run: Path,
        *,
        total_steps: int,
        done: int = 0,
        every: int = 1,
        tensorboard: bool = False,
        wandb: str | None = None,
        config: Mapping[str, object] = MappingProxyType({}),
        shown: bool = True,
        progress: bool = True,
    ) -> None:
        self.last: JsonObject = {}
        self._total, self._every, self._shown = total_steps, every, shown and progress
        self._usual: float | None = None
        self._tokens: int | None = None
        self._writers: list[Writer] = []
        if not shown:
            return
        if tensorboard:
            self._writers.append(TensorBoard(run / "tensorboard", done, config))
        if wandb is not None:
            self._writers.append(WandB(run, wandb, config))
        self._writers.append(JsonLines(run / METRICS, done))
        self._line = ProgressLine(total_steps, done)

    def __enter__(self) -> Self:
        if self._shown:
            self._line.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._line.stop()
        for writer in self._writers:
            writer.close()

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
            for writer in self._writers:
                writer.see(self.last)
        return self.last

    def _completion(self, record: Record) -> JsonObject:
        seconds = record["seconds"] + record["wait_seconds"]
        self._usual = (
            seconds if self._usual is None else MEMORY * self._usual + (1 - MEMORY) * seconds
        )
        added: JsonObject = {
            "percent": round(100 * record["step"] / self._total, 3),
            "seconds_left": round(self._usual * (self._total - record["step"]), 1),
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
            self._file.write(
                json.dumps({name: _plain(value) for name, value in record.items()}) + "\n"
            )
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


def _plain(value: object) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
