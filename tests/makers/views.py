"""What the terminal shows of views."""

import io
from typing import Any

from rich.console import Console


def console_of(width: int = 100, **terminal: Any) -> Console:
    """A console that keeps what it prints: `console.file.getvalue()`."""
    return Console(file=io.StringIO(), width=width, highlight=False, **terminal)


def printed(*views: Any, width: int = 100, **terminal: Any) -> str:
    console = console_of(width, **terminal)
    console.print(*views)
    return console.file.getvalue()  # type: ignore[attr-defined]
