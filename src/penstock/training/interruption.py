"""SIGTERM and Ctrl-C during training: finish the step, save, and stop; a second Ctrl-C stops at once."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self, final


@final
class Interruption:
    """Remembers that the process was asked to stop; use as a context manager around the loop.

    Only the main thread may install handlers; elsewhere it never says stop.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        """The signal that asked, once one did."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
