"""Whether an evaluation shall stop, asked between its parts, and how far it is."""

import time
from collections.abc import Callable
from typing import Protocol, final

from penstock.core.terminal import PLAIN_SECONDS, elapsed_and_left


class Stop(Protocol):
    """Whether the run was asked to stop; all ranks must call it together and get the same
    answer.
    """

    def __call__(self, share: float | None = None) -> bool:
        """`share`: how much of the evaluation is done, 0 to 1; None: it does not know."""


def never(share: float | None = None) -> bool:
    """A `Stop` that is always false."""
    return False


@final
class Watched:
    """A `Stop` that reports how far an evaluation is: after 10 s, then whenever it has taken twice
    as long.

    Args:
        name: Name of the evaluation.
        say: Shows a line.
        asked: Whether the run was asked to stop.
    """

    def __init__(
        self, name: str, say: Callable[[str], None], asked: Callable[[], bool] = never
    ) -> None:
        self._name, self._say, self._asked = name, say, asked
        self._began, self._next = time.monotonic(), PLAIN_SECONDS

    def __call__(self, share: float | None = None) -> bool:
        """See `Stop`."""
        seconds = time.monotonic() - self._began
        if seconds >= self._next:
            self._next = 2 * seconds
            done = "" if share is None else f"{100 * share:.0f}% · "
            self._say(f"{self._name}: {done}{elapsed_and_left(seconds, share)}")
        return self._asked()
