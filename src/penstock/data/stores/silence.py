"""Says which requests a store has not answered for half a minute: a line in the log instead of a
run that stands still.

One thread looks at the requests that are under way, as long as there are any.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

_log = logging.getLogger("penstock.stores")

SILENCE_SECONDS = 30.0
"""How long a request may take before this is said; then again after twice, four times, … as
long.
"""
_LOOK_SECONDS = 1.0


@final
@dataclass(eq=False, slots=True)
class _Request:
    """A request that is under way, with its repetitions."""

    where: str
    store: str
    writes: bool
    begun: float = field(default_factory=time.monotonic)


class _Watch:
    """Requests under way in this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.requests: dict[_Request, None] = {}
        self.said: dict[str, float] = {}
        """Store → after how many seconds silence is reported next, while it lasts."""
        self.runs = False

    def add(self, request: _Request) -> None:
        with self.lock:
            self.requests[request] = None
            if self.runs:
                return
            self.runs = True
        try:
            threading.Thread(target=self._look, name="penstock-silence", daemon=True).start()
        except RuntimeError:  # the process ends, or has no more threads: then nothing is said
            self.runs = False

    def remove(self, request: _Request) -> None:
        with self.lock:
            del self.requests[request]

    def _look(self) -> None:
        while True:
            time.sleep(min(_LOOK_SECONDS, SILENCE_SECONDS / 4))
            with self.lock:
                if not self.requests:
                    self.runs = False
                    self.said.clear()
                    return
                lines = self._lines()
            for line in lines:
                _log.warning("%s", line)

    def _lines(self) -> list[str]:
        """Lines to log now, one for each store."""
        now, oldest, counts = time.monotonic(), dict[str, _Request](), dict[str, int]()
        for request in self.requests:  # in the order in which they began
            if now - request.begun >= SILENCE_SECONDS:
                oldest.setdefault(request.store, request)
                counts[request.store] = counts.get(request.store, 0) + 1
        self.said = {store: after for store, after in self.said.items() if store in oldest}
        found = []
        for store, request in oldest.items():
            seconds = now - request.begun
            if seconds >= self.said.get(store, SILENCE_SECONDS):
                self.said[store] = 2 * seconds
                others = counts[store] - 1
                more = (
                    f", and for {others} other request{'s' if others > 1 else ''}" if others else ""
                )
                what = "taken it" if request.writes else "answered"
                where = (
                    f"waiting to write {request.where}"
                    if request.writes
                    else f"waiting for {request.where}"
                )
                found.append(f"{where} since {seconds:.0f} s{more}: the store has not {what} yet")
        return found


_watch = _Watch()


@contextmanager
def watched(where: str, store: str, *, writes: bool = False) -> Iterator[None]:
    """Report it if the block, a request, is not done in time.

    Args:
        where: The URL of the file, as it is shown.
        store: The URL of the store; each has one line at a time.
        writes: It writes the file.
    """
    request, watch = _Request(where, store, writes), _watch
    watch.add(request)
    try:
        yield
    finally:
        watch.remove(request)


def waiting_seconds() -> float:
    """How long the oldest request that is under way has been; 0 if there is none."""
    with _watch.lock:
        oldest = next(iter(_watch.requests), None)
        return 0.0 if oldest is None else time.monotonic() - oldest.begun


def _begin_again() -> None:
    """In a forked process, no request is under way, and no thread looks."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_begin_again)
