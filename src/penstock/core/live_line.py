"""A line of progress in a notebook, which changes in place."""

import sys
from html import escape
from importlib import import_module
from typing import Any, final

MONOSPACE = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
"""Notebooks show a plain `<pre>` of HTML in the font of running text."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows HTML and can change what it
    showed.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "ipykernel" in sys.modules and hasattr(shell, "kernel")


@final
class LiveLine:
    """A line of a notebook's output that is replaced by the next one."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str, share: float | None = None) -> None:
        """Show a line.

        Args:
            text: Its text.
            share: What is done, 0 to 1, as a bar before the text; None: no bar.
        """
        display: Any = import_module("IPython.display").display
        bar = "" if share is None else _meter(share)
        html = f'<pre style="margin:0;{MONOSPACE}">{bar}{escape(text)}</pre>'
        content = {"text/plain": text, "text/html": html}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def _meter(share: float) -> str:
    width = 100 * min(max(share, 0.0), 1.0)
    return (
        '<span style="display:inline-block;width:12em;height:.7em;margin-right:1em;'
        f'border:1px solid #8886"><span style="display:block;width:{width:.0f}%;height:100%;'
        f'background:#3b7dd8"></span></span>'
    )
