"""Several processes fail or continue together while one of them writes; signals stop a run between steps.

SIGTERM or Ctrl-C during training finishes the step, saves and stops; a second Ctrl-C stops at once.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self, final

from penstock.core.errors import DistributedError


def is_first() -> bool:
    """Whether this process writes: it is the only one, or rank 0."""
    import torch.distributed as dist

    return not _several() or dist.get_rank() == 0


@contextmanager
def in_step() -> Iterator[None]:
    """All processes run the body and leave it together: an error in one is an error in each.

    Raises:
        DistributedError: The body failed in another process, which raises the original error.
    """
    import torch.distributed as dist

    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if _several():
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, None if error is None else str(error))
        failed = next((rank for rank, message in enumerate(found) if message is not None), None)
        if error is None and failed is not None:
            theirs = DistributedError(f"rank {failed} failed: {found[failed]}")
            theirs.failed_rank = failed
            raise theirs
    if error is not None:
        raise error


def _several() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@final
class Interruption:
    """Remembers that the process was asked to stop; use as a context manager around the loop.

    Only the main thread may install handlers; in other threads it never asks to stop.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        """Name of the signal that asked to stop; None: none yet."""
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
