"""A headless Chromium that tests drive over a pipe, with nothing but the standard library.

Source: the Chrome DevTools Protocol, "--remote-debugging-pipe": JSON messages that end in a zero
byte, commands read from file descriptor 3 and answers written to 4.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from patience import PATIENCE_SECONDS

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
    "about:blank",
)
SHIM = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Puts the two ends of the pipes where the browser looks for them."""
KEYS = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
}


def find_browser() -> str | None:
    """PENSTOCK_BROWSER, or a Chromium on the path."""
    return os.environ.get("PENSTOCK_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of one browser."""

    def __init__(self, binary: str, folder: Path) -> None:
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                SHIM,
                str(commands),
                str(answers),
                binary,
                f"--user-data-dir={folder}",
                *FLAGS,
            ],
            pass_fds=(commands, answers),
            # Chromium makes a language of the locale, and `C` gives none that scripts accept.
            env={**os.environ, "LC_ALL": "en_US.UTF-8"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = next(
            t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"
        )
        self._session = self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; events that come between are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], PATIENCE_SECONDS)
            part = os.read(self._read, 1 << 20) if ready else b""
            assert part, "the browser does not answer"
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, path: Path) -> int:
        """Open a page; milliseconds from the start of its loading until it is drawn and can be
        used.
        """
        self.call("Page.navigate", url=path.as_uri())
        end = time.monotonic() + PATIENCE_SECONDS
        while not (ready := self.run("document.documentElement?.dataset.ready")):
            assert time.monotonic() < end, f"the page is not ready: {self.complaints()}"
            time.sleep(0.02)
        return int(ready)

    def run(self, code: str) -> Any:
        """The value of a script."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]["exception"][
            "description"
        ]
        return found["result"].get("value")

    def key(self, *keys: str) -> None:
        """Press keys one after another."""
        for key in keys:
            more = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
            code = {"windowsVirtualKeyCode": KEYS[key]} if key in KEYS else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **more, **code)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def point(self, selector: str, *, click: bool = False) -> None:
        """Move the pointer to the middle of an element, and press there."""
        box = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{box}.scrollIntoView({{block: 'center'}})")
        x, y = self.run(
            "(b => [(b.left + b.right) / 2, (b.top + b.bottom) / "
            f"2])({box}.getBoundingClientRect())"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self.call(
                    "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
                )

    def text(self, selector: str) -> str:
        """The text of an element as it is seen."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def look(self, *, width: int = 1300, height: int = 850, scheme: str = "light") -> None:
        """Size of the window, and what the system prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def complaints(self) -> list[str]:
        """What the browser reported since it started: exceptions, and what its policy refused."""
        return [
            json.dumps(e["params"])
            for e in self.events
            if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")
        ]

    def requests(self) -> list[str]:
        """Addresses that pages asked for."""
        return [
            e["params"]["request"]["url"]
            for e in self.events
            if e["method"] == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(PATIENCE_SECONDS)
        os.close(self._read)
        os.close(self._write)
