"""Progress of long work: a live bar in a terminal, a plain line now and then elsewhere, nothing when silenced.

The bar goes to standard error, so that standard output stays machine-readable. `rich` is imported only when a bar
is really drawn.
"""

import sys
import time
from types import TracebackType
from typing import Any, Self, final

PLAIN_SECONDS = 10.0
"""Seconds between plain lines when the output is not a terminal."""


@final
class Progress:
    """Counts work and shows it; use as a context manager.

    ```python
    with Progress("preparing", total=size, unit="B") as progress:
        progress.advance(len(block), tokens=1200)
    ```

    Args:
        title: What is being done, a few words.
        total: Amount of work, in `unit`; None when it is not known.
        unit: "B" shows amounts as bytes; any other word is shown as it is.
        enabled: False shows nothing.
        rates: Names of figures whose rate per second is shown beside the bar (for example `{"tokens": "tok/s"}`).
    """

    def __init__(
        self,
        title: str,
        *,
        total: float | None = None,
        unit: str = "",
        enabled: bool = True,
        rates: dict[str, str] | None = None,
    ) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = 0.0
        self.figures: dict[str, float] = {}
        self._rates = rates or {}
        self._live: Any = None
        self._task: Any = None
        self._enabled = enabled
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> Self:
        self._started = self._shown = time.monotonic()
        if self._enabled and sys.stderr.isatty():
            self._live = self._make_bar()
            self._live.start()
            self._task = self._live.add_task(self.title, total=self.total, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self._task, completed=self.done, note=self.note())
            self._live.stop()
        elif self._enabled and kind is None:
            self._print_line()

    def advance(self, amount: float, **figures: float) -> None:
        """Add finished work, and add to the named figures."""
        self.done += amount
        for name, value in figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + value
        if self._live is not None:
            self._live.update(self._task, completed=self.done, note=self.note())
        elif self._enabled and time.monotonic() - self._shown >= PLAIN_SECONDS:
            self._print_line()

    def note(self) -> str:
        """The rates and figures, as shown beside the bar."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        parts = [f"{_short(self.done / seconds)}{self.unit}/s"] if self.unit == "B" else []
        for name, value in self.figures.items():
            parts.append(
                f"{_short(value / seconds)} {self._rates[name]}" if name in self._rates else f"{_short(value)} {name}"
            )
        return " · ".join(parts)

    def _print_line(self) -> None:
        self._shown = time.monotonic()
        seconds = self._shown - self._started
        share = f"{100 * self.done / self.total:3.0f}%" if self.total else f"{_short(self.done)}{self.unit}"
        left = ""
        if self.total and 0 < self.done < self.total:
            left = f" · {_clock(seconds * (self.total - self.done) / self.done)} left"
        note = self.note()
        print(
            f"{self.title}: {share}{' · ' + note if note else ''} · {_clock(seconds)}{left}",
            file=sys.stderr,
            flush=True,
        )

    def _make_bar(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        return Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=28),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("·"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )


def _short(value: float) -> str:
    """1234567 → '1.23 M'."""
    for size, suffix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.0f} " if value >= 100 or value == int(value) else f"{value:.1f} "


def _clock(seconds: float) -> str:
    """3725 → '1:02:05'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
