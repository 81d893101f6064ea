"""What people read in a terminal: nothing that comes from data moves the cursor, clears the screen or hides.

File names, records and texts may hold any character. All that this package shows goes through `visible` or through a
console made here.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

MARKS = {"\n": "⏎", "\t": "→", "\r": "␍"}
"""Stand-ins for characters that would break the view."""


def visible(text: str, *, lines: bool = False) -> str:
    r"""`text` on one line: marks for line ends and tabs, escapes such as `\x1b` for all else that does not print.

    Args:
        text: Any text.
        lines: Leave line ends and tabs as they are.
    """
    if text.isprintable():
        return text
    marks = {"\n": "\n", "\t": "\t"} if lines else MARKS
    return "".join(marks.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in text)


def safe_console(**options: Any) -> "Console":
    """A `rich.console.Console` that shows control characters of what it prints as escapes.

    Args:
        options: Of `rich.console.Console`. It highlights only on request.
    """
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        """Colours are added to segments later, so only what is printed itself is looked at."""

        def render(self, *arguments: Any, **keywords: Any) -> Iterable[Segment]:
            for segment in super().render(*arguments, **keywords):
                text, style, control = segment
                yield segment if control else Segment(visible(text, lines=True), style)

    return SafeConsole(**{"highlight": False, **options})
