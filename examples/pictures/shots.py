"""Pictures of pages in a headless Chromium, and of sessions in a terminal."""

import base64
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[2]
MOST_BYTES = 150_000
"""Of a picture in the repository."""
COLOURS = 64
"""Of a picture; pages have few, and letters in four times as many pixels need no more."""
LINES = 60
"""Most lines of a session."""
THEME = TerminalTheme(
    (19, 27, 30),
    (216, 226, 229),
    [
        (42, 56, 61),
        (255, 138, 128),
        (127, 212, 145),
        (242, 185, 95),
        (132, 185, 249),
        (196, 165, 247),
        (82, 205, 214),
        (216, 226, 229),
    ],
    [
        (110, 128, 136),
        (255, 170, 160),
        (160, 230, 175),
        (255, 210, 130),
        (165, 205, 255),
        (215, 190, 255),
        (120, 225, 232),
        (255, 255, 255),
    ],
)


def find_chromium() -> str:
    """The browser.

    Raises:
        SystemExit: There is none; the message says what to install.
    """
    from makers.browser import NAMES, find_browser

    found = find_browser()
    if found is None:
        raise SystemExit(
            f"pictures: no Chromium ({', '.join(NAMES)}) on the path; install one (Debian: "
            "apt install chromium), or name its file in PENSTOCK_BROWSER"
        )
    return found


class Camera:
    """A browser that takes pictures."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def look(
        self, address: str, width: int, height: int, *steps: str, scheme: str = "light"
    ) -> None:
        """Open a page and prepare it.

        Args:
            address: A URL.
            width: Of the window; likewise `height`.
            steps: What is done then: `hover SELECTOR`, a script, or `until SCRIPT`, which waits
                until it is true.
            scheme: light or dark.
        """
        self.browser.look(width=width, height=height, scheme=scheme)
        self.browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2,
            mobile=False,
        )
        self.browser.call("Page.navigate", url="about:blank")
        self.browser.call("Page.navigate", url=address)
        for step in ("until document.documentElement?.dataset.ready", *steps):
            if step.startswith("hover "):
                self.browser.point(step.removeprefix("hover "))
            elif step.startswith("until "):
                self._wait(step.removeprefix("until "))
            else:
                self.browser.run(step)

    def _wait(self, code: str) -> None:
        end = time.monotonic() + 120
        while not self.browser.run(code):
            if time.monotonic() > end:
                raise SystemExit(
                    f"pictures: {code!r} did not become true: {self.browser.complaints()}"
                )
            time.sleep(0.05)

    def take(self, path: Path, address: str, width: int, height: int, *steps: str) -> None:
        """A picture of a page as `look` prepares it, and `NAME.dark.png` for readers who prefer
        dark.
        """
        for scheme, target in (("light", path), ("dark", path.with_suffix(".dark.png"))):
            self.look(address, width, height, *steps, scheme=scheme)
            self._save(target)

    def _save(self, path: Path) -> None:
        """Write what is seen, with few colours."""
        time.sleep(0.3)
        found = base64.b64decode(self.browser.call("Page.captureScreenshot", format="png")["data"])
        picture = Image.open(io.BytesIO(found)).convert("RGB")
        # The default method averages colours of few pixels away, such as those of a third document.
        picture.quantize(
            COLOURS, method=Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE
        ).save(path, optimize=True)
        check_size(path)


def check_size(path: Path) -> None:
    """Refuse what is too large for the repository."""
    if path.stat().st_size > MOST_BYTES:
        raise SystemExit(
            f"pictures: {path} has {path.stat().st_size:,} bytes, at most {MOST_BYTES:,} are wanted"
        )


@contextmanager
def camera() -> Iterator[Camera]:
    """A browser while it is needed."""
    from makers.browser import Browser

    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(find_chromium(), Path(profile))
        try:
            yield Camera(browser)
        finally:
            browser.close()


def session(path: Path, title: str, commands: Sequence[str], width: int = 100) -> None:
    """Run commands as in a terminal, and write what they print as an SVG without anything from
    elsewhere.

    Args:
        path: The SVG.
        title: Of its window.
        commands: As one types them; `penstock` is this Python's, and its notices of progress are
            left out.
        width: Columns.
    """
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for place, command in enumerate(commands):
        console.print(
            Text.assemble(("" if place == 0 else "\n"), ("$ ", "bold cyan"), (command, "bold"))
        )
        console.print(Text.from_ansi(_output(command, width)))
    text = console.export_svg(title=title, theme=THEME, code_format=_format(), unique_id=path.stem)
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
    check_size(path)


def _output(command: str, width: int) -> str:
    words = shlex.split(command)
    if words[0] != "penstock":
        raise ValueError(f"{command}: only penstock is run")
    colours = {"FORCE_COLOR": "1", "COLUMNS": str(width), "TERM": "xterm-256color"}
    environment = {
        name: value for name, value in os.environ.items() if name != "NO_COLOR"
    } | colours
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words[1:]],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"pictures: {command}: {done.stdout}{done.stderr}")
    lines = done.stdout.rstrip().splitlines()
    return "\n".join(lines if len(lines) <= LINES else [*lines[:LINES], "…"])


def _format() -> str:
    """rich's picture of a terminal, without the fonts that it would fetch."""
    plain = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return plain.replace(
        "Fira Code", "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono"
    )
