"""What benchmarks share: CPU time, turns between rivals, medians, peers in their own Python, and
text to work on.
"""

import argparse
import atexit
import json
import platform
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Work = Callable[[], Any]


def cpu_seconds(work: Work) -> float:
    """CPU time of this process, all threads: a shared machine lengthens waiting, not work."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def take_turns(rivals: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median seconds of each rival, run in turn; a rival returns its own seconds. The first turn is
    not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(repeats + 1):
        for name, run in rivals.items():
            spent = run()
            if turn:
                seconds[name].append(spent)
    return {name: statistics.median(values) for name, values in seconds.items()}


class Peer:
    """A peer library in its own Python: a script that gets arguments, and does one repeat for each
    line it reads.

    It answers each line with a line of JSON that holds at least `seconds`.
    """

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        path = Path(__file__).parent / "peers" / script
        self._process = subprocess.Popen(
            [python, str(path), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.last: dict[str, Any] = {}

    def __call__(self, line: str = "go") -> float:
        """One repeat, begun by a line of input; its seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                self.last = json.loads(line)
                return float(self.last["seconds"])
        raise RuntimeError(f"{self._process.args!r} ended without an answer")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The flags that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--peers", metavar="PYTHON", help="a Python in which the peers are installed"
    )
    return with_json(parser)


def with_json(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flag that keeps what `against` and `table` get."""
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        action=_Kept,
        help="also write comparisons and tables there",
    )
    return parser


_BARS: list[dict[str, Any]] = []
_TABLES: list[dict[str, Any]] = []


class _Kept(argparse.Action):
    """Writes what was compared when the benchmark has ended without an error."""

    def __call__(
        self, parser: Any, options: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(options, self.dest, values)
        atexit.register(_write, values)


def against(group: str, what: str, peer: str, *, ours: float, theirs: float) -> None:
    """A comparison with a peer, in seconds for the same work; `bars.py` draws it.

    Args:
        group: Its picture: Data, Chats and tokenizers, Training, Generation or Recurrent layers.
        what: The work.
        peer: Name and version of the peer.
        ours: Our seconds.
        theirs: The peer's.
    """
    _BARS.append({"group": group, "what": what, "peer": peer, "seconds": [ours, theirs]})


def _write(path: Path) -> None:
    if hasattr(sys, "last_value"):
        return
    words = [Path(word).name if word.startswith(("/", "~")) else word for word in sys.argv]
    found = {
        "command": f"python benchmarks/{' '.join([Path(words[0]).name, *words[1:]])}",
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "entered": time.strftime("%Y-%m-%d"),
        "source": "measured",
        "bars": _BARS,
        "tables": _TABLES,
    }
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def standard_library(most_bytes: int) -> list[str]:
    """Sources of Python's standard library, a file a document."""
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts and size < most_bytes:
            texts.append(path.read_text(encoding="utf-8", errors="ignore"))
            size += len(texts[-1])
    return [text for text in texts if text]


def lognormal_lengths(
    count: int, mean: float = 775.0, sigma: float = 1.0, largest: int = 4096
) -> Any:
    """Document lengths as in web text, int64."""
    lengths = np.exp(np.random.default_rng(0).normal(np.log(mean) - sigma**2 / 2, sigma, count))
    return np.clip(lengths, 1, largest).astype(np.int64)


def table(title: str, rows: list[tuple[str, str, str]]) -> None:
    """Print (what, figure, note) lines."""
    _TABLES.append({"title": title, "rows": rows})
    print(f"\n{title}")
    for what, figure, note in rows:
        print(f"  {what:44} {figure:>14}  {note}")
