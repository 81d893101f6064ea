"""Several processes fail or continue together while one of them writes; signals stop a run between
steps.

SIGTERM or Ctrl-C during training finishes the step, saves and stops; a second Ctrl-C stops at once.
A step whose data are in a store that does not answer is not waited for.
"""

import gc
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, Self, TypeVar, final

from penstock.core.errors import DistributedError, StoreError
from penstock.data.stores.silence import waiting_seconds

T = TypeVar("T")
SAVE_PATIENCE = timedelta(days=1)
"""How long ranks wait for each other's files of a checkpoint."""
_LOOK_SECONDS = 0.2
_SILENT_SECONDS = 1.0
"""So long, a store may take to answer a run that was asked to stop."""


def is_first() -> bool:
    """Whether this process writes: it is the only one, or rank 0."""
    import torch.distributed as dist

    return not _several() or dist.get_rank() == 0


def rank_of() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if _several() else (0, 1)


def gather(value: T, group: Any = None) -> list[T]:
    """The values of all processes, in order of their ranks; all of them call it.

    Args:
        value: Of this process; it can be pickled.
        group: Process group of all of them, by gloo; None: the default one, of any kind.

    Raises:
        RuntimeError: A rank has ended, or, in a group that is given, has not come for a day.
    """
    import torch.distributed as dist

    if not _several():
        return [value]
    if group is not None:
        # It names the ranks that do not come, where other messages only run out of time.
        dist.monitored_barrier(group, SAVE_PATIENCE, wait_all_ranks=True)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group)
    return found


@contextmanager
def in_step(group: Any = None) -> Iterator[None]:
    """All processes run the body and leave it together: an error in one is an error in each.

    Args:
        group: Process group of all of them, in which they speak; None: the default one.

    Raises:
        DistributedError: The body failed in another process, which raises the original error.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    found = gather(None if error is None else str(error), group)
    failed = next((rank for rank, message in enumerate(found) if message is not None), None)
    if error is None and failed is not None:
        theirs = DistributedError(f"rank {failed} failed: {found[failed]}")
        theirs.failed_rank = failed
        raise theirs
    if error is not None:
        raise error


@contextmanager
def settled_objects(*, wanted: bool) -> Iterator[None]:
    """Python's collector leaves out what exists now, such as a million objects of imported
    packages, until the block ends.

    A full collection walks through all objects, at any moment of a step; a GPU waits for it, and on
    one rank of many all others do. It costs one such walk at first, so a single process on the CPU,
    where nobody waits, does without (`wanted=False`).
    """
    if not wanted:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _several() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@final
class Interruption:
    """Remembers that the process was asked to stop; use as a context manager around the loop.

    Only the main thread may install handlers; in other threads it never asks to stop. After the
    first signal, a thread looks whether a store is silent that the main thread waits for, and sends
    the signal again, which then is an error.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        """Name of the signal that asked to stop; None: none yet."""
        self._before: dict[signal.Signals, Any] = {}
        self._waits = self._is_silent = self._over = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for data; not for long if a signal has asked to stop, and a store does
        not answer.

        Raises:
            StoreError: Both.
        """
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._is_silent:
            self._is_silent = False
            if self._waits:
                raise StoreError(
                    f"stopped by {self.name} while a store has not answered for "
                    f"{waiting_seconds():.0f} s: the next step was not waited for; "
                    "resume=True (--resume) goes on from what is saved"
                )
            return
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.name is None:
            threading.Thread(target=self._look, name="penstock-stop", daemon=True).start()
        self.name = signal.Signals(number).name

    def _look(self) -> None:
        while not self._over:
            time.sleep(_LOOK_SECONDS)
            if self._waits and not self._is_silent and waiting_seconds() > _SILENT_SECONDS:
                self._is_silent = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
