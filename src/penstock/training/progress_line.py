"""How training goes, for whoever watches: a live line in a terminal, elsewhere a plain line now and then.

On standard error, so that standard output stays machine-readable. Evaluations are printed above the live line.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any, final

from penstock.progress import PLAIN_SECONDS
from penstock.terminal import visible
from penstock.training.figure_names import is_evaluation

BESIDES = 34
"""Columns of the live line besides the bar and the note: "training", percent, two times, and spaces."""


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
        """Begin to show."""
        if sys.stderr.isatty():
            self._live = _bar()
            self._live.start()
            self._task = self._live.add_task("training", total=self._total, completed=self._done, note="")

    def show(self, record: Mapping[str, Any]) -> None:
        """Show where the run is."""
        step, last = record["step"], record["step"] == self._total
        evaluations = [f"{name} {_text(value)}" for name, value in record.items() if is_evaluation(name)]
        if self._live is not None:
            room = self._live.console.width - BESIDES - _bar_width(self._live.console.width) - len(f"step {step} · ")
            self._live.update(self._task, completed=step, note=f"step {step} · {note(record, room)}")
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


def note(record: Mapping[str, Any], room: int | None = None) -> str:
    """`loss 3.214 · distil 0.42 · rate 1.0e-03 · 12.3 k tok/s · data 2%`: what a record has of it.

    Where it is longer than `room`, it loses parts: first the share of waiting, then rate, speed and distillation.
    """
    seconds = record["seconds"] + record["wait_seconds"]
    parts = {}
    if "loss" in record:
        parts["loss"] = f"loss {record['loss']:.4f}"
    if "distillation" in record:
        parts["distillation"] = f"distil {record['distillation']:.4f}"
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


def clock(seconds: float) -> str:
    """3725 → '1:02:05'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _text(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else visible(str(value), lines=True)


def _bar_width(width: int) -> int:
    return 20 if width >= 120 else 6


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = Console(stderr=True)
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=_bar_width(console.width)),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("·"),
        Remaining(),
        console=console,
    )
