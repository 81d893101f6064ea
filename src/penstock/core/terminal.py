"""Output to a terminal: text without control characters, and the progress of long work.

File names, records and texts may contain any character. Everything that penstock shows goes through
`visible` or a console made here, so no data can move the cursor, clear the screen or hide text.

Progress is a live bar in a terminal and in a notebook, an occasional plain line elsewhere, and
nothing if it is disabled. It goes to standard error, so that standard output stays
machine-readable. `rich` is imported only when a bar is drawn.
"""

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self, final

from penstock.core.live_line import LiveLine, in_notebook

if TYPE_CHECKING:
    import rich.progress
    from rich.console import Console

MARKS = {"\n": "⏎", "\t": "→", "\r": "␍"}
"""Replacements for characters that would break the layout."""

IN_NOTEBOOKS = {
    "red": "#d0455b",
    "green": "#2f9a4f",
    "yellow": "#b07a10",
    "blue": "#3b7dd8",
    "magenta": "#a35bd0",
    "cyan": "#12909c",
    "white": "#808890",
}
"""Colours of terminals → those that are readable on the light and the dark page of a notebook."""

PLAIN_SECONDS = 10.0
"""Seconds between plain lines when the output is not a terminal."""
NOTEBOOK_SECONDS = 0.25
"""Seconds between changes of the line in a notebook."""


def visible(text: str, *, lines: bool = False) -> str:
    r"""`text` on one line: marks for line ends and tabs, escapes such as `\x1b` for other
    unprintable characters.

    Args:
        text: Any text.
        lines: Keep line ends and tabs.
    """
    if text.isprintable():
        return text
    marks = {"\n": "\n", "\t": "\t"} if lines else MARKS
    return "".join(marks.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in text)


def safe_console(**options: Any) -> "Console":
    """A `rich.console.Console` that shows control characters of what it prints as escapes.

    Args:
        options: Options of `rich.console.Console`; highlighting is off by default.
    """
    from rich.console import Console
    from rich.segment import Segment
    from rich.style import Style

    class SafeConsole(Console):
        """Colours are added to segments later, so only the printed text itself is escaped."""

        def render(self, *arguments: Any, **keywords: Any) -> Iterable[Segment]:
            for segment in super().render(*arguments, **keywords):
                text, style, control = segment
                if self.is_jupyter and style is not None and style.color is not None:
                    style += Style(color=IN_NOTEBOOKS.get(style.color.name))
                yield segment if control else Segment(visible(text, lines=True), style)

    return SafeConsole(**{"highlight": False, **options})


@final
class Progress:
    """Counts work and shows its progress; use it as a context manager.

    ```python
    with Progress("preparing", total=size, unit="B") as progress:
        progress.advance(len(block), tokens=1200)
    ```

    Args:
        title: The task, in a few words.
        total: Amount of work, in `unit`; None: unknown.
        unit: "B" shows amounts as bytes; any other word is shown as it is.
        enabled: False shows nothing.
        rates: Figure → unit of its rate per second, shown next to the bar (for example `{"tokens":
            "tok/s"}`).
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
        self._said: float | None = None
        """`done` of the last plain line."""
        self.figures: dict[str, float] = {}
        self._rates = rates or {}
        self._live: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID
        self._line: LiveLine | None = None
        self._enabled = enabled
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> Self:
        self._started = self._shown = time.monotonic()
        if self._enabled and in_notebook():
            self._line = LiveLine()
        elif self._enabled and sys.stderr.isatty():
            self._live = self._make_bar()
            self._live.start()
            self._task = self._live.add_task(self.title, total=self.total, note="")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._live is not None:
            self._live.update(self._task, completed=self.done, note=self.note())
            self._live.stop()
        elif self._enabled and kind is None and self._said != self.done:
            self._print_line()

    def advance(self, amount: float, **figures: float) -> None:
        """Add finished work, and add to the named figures."""
        self.done += amount
        for name, value in figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + value
        if self._live is not None:
            self._live.update(self._task, completed=self.done, note=self.note())
        elif self._enabled and time.monotonic() - self._shown >= (
            PLAIN_SECONDS if self._line is None else NOTEBOOK_SECONDS
        ):
            self._print_line()

    def note(self) -> str:
        """The rates and figures, as shown next to the bar."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        parts = [f"{short_number(self.done / seconds)}{self.unit}/s"] if self.unit == "B" else []
        for name, value in self.figures.items():
            parts.append(
                f"{short_number(value / seconds).strip()} {self._rates[name]}"
                if name in self._rates
                else f"{short_number(value).strip()} {name}"
            )
        return " · ".join(parts)

    def _print_line(self) -> None:
        self._shown, self._said = time.monotonic(), self.done
        seconds = self._shown - self._started
        share = (
            f"{100 * self.done / self.total:3.0f}%"
            if self.total
            else f"{short_number(self.done)}{self.unit}".strip()
        )
        note = self.note()
        times = elapsed_and_left(seconds, self.done / self.total if self.total else None)
        line = f"{self.title}: {share}{' · ' + note if note else ''} · {times}"
        if self._line is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._line.show(line, self.done / self.total if self.total else None)

    def _make_bar(self) -> "rich.progress.Progress":
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bar

        return Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=28),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}"),
            *time_columns(),
            console=Console(stderr=True),
        )


def time_columns() -> "tuple[rich.progress.ProgressColumn, ...]":
    """The end of a bar: `0:00:11 elapsed · 0:01:12 left`."""
    from rich.progress import TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return TimeElapsedColumn(), TextColumn("elapsed ·"), TimeRemainingColumn(), TextColumn("left")


def elapsed_and_left(seconds: float, share: float | None) -> str:
    """`0:11 elapsed · 1:12 left`, the latter from the share that is done, 0 to 1; None: it is not
    known.
    """
    elapsed = f"{clock(seconds)} elapsed"
    return (
        f"{elapsed} · {clock(seconds / share - seconds)} left" if share and share < 1 else elapsed
    )


def short_number(value: float) -> str:
    """1234567 → '1.23 M'."""
    for size, suffix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        # From 999.5 of a unit on, three digits are 1 of the next.
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.0f} " if value >= 100 or value == int(value) else f"{value:.1f} "


def clock(seconds: float) -> str:
    """3725 → '1:02:05'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
