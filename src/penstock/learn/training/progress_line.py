"""The progress of a run on standard error, so that standard output stays machine-readable.

A live line in a terminal and in a notebook, with a line for each evaluation; elsewhere a plain line
from time to time.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any, final

from penstock.core.json_values import JsonMapping
from penstock.core.live_line import LiveLine, in_notebook
from penstock.core.terminal import (
    NOTEBOOK_SECONDS,
    PLAIN_SECONDS,
    clock,
    short_number,
    time_columns,
    visible,
)
from penstock.learn.training.figure_names import is_evaluation

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
        self._line: LiveLine | None = None
        self._shown = -PLAIN_SECONDS

    def start(self) -> None:
        """Start the live line, in a notebook or if standard error is a terminal."""
        if in_notebook():
            self._line = LiveLine()
        elif sys.stderr.isatty():
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
        pause = PLAIN_SECONDS if self._line is None else NOTEBOOK_SECONDS
        if last or evaluations or time.monotonic() - self._shown >= pause:
            self._shown = time.monotonic()
            left = "" if last else f" · {clock(record['seconds_left'])} left"
            text = f"step {step}/{self._total} ({record['percent']:.0f}%): {note(record)}{left}"
            if self._line is not None:
                self._line.show(text, step / self._total)
            texts = [f"step {step}: {line}" for line in evaluations]
            texts = [text, *texts] if self._line is None else texts
            if texts:
                print("\n".join(texts), file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Leave the line as it is."""
        if self._live is not None:
            self._live.stop()


def note(record: JsonMapping, room: int | None = None) -> str:
    """`loss 3.214 · distill 0.42 · rate 1.0e-03 · 12.3 k tok/s · MFU 43% · 4.1 GB · data 2%`: those
    parts that a record has; `data` is the share of the time that the step waited for its rows.

    If it is longer than `room`, parts are dropped: first memory and waiting, then rate, MFU, speed
    and distillation.
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
        parts["speed"] = f"{short_number(record['tokens_per_second']).strip()} tok/s"
    if record.get("mfu", 0) >= 0.005:
        parts["mfu"] = f"MFU {100 * record['mfu']:.0f}%"
    if "peak_memory" in record:
        parts["memory"] = f"{record['peak_memory'] / 1e9:.3g} GB"
    if seconds > 0 and record["wait_seconds"] / seconds >= 0.01:
        parts["data"] = f"data {100 * record['wait_seconds'] / seconds:.0f}%"
    for name in ("memory", "data", "rate", "mfu", "speed", "distillation"):
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
