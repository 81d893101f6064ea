"""A progress bar for replaying the plan, which is shown only when it takes long enough to wonder."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from penstock.progress import PLAIN_SECONDS, Progress

SHOW_AFTER = 1.0
"""Seconds until the bar appears in a terminal; elsewhere plain lines begin after `PLAIN_SECONDS`."""

Watch = Callable[[int, int | None], None]
"""(rows planned so far, rows to plan or None when that is not known)."""


@contextmanager
def replay_progress(title: str, *, enabled: bool = True) -> Iterator[Watch]:
    """Gives a function to be told how far it is; costs a look at the clock each time.

    Args:
        title: What is being done, a few words.
        enabled: False shows nothing; let one rank show it.
    """
    began, wait = time.monotonic(), SHOW_AFTER if sys.stderr.isatty() else PLAIN_SECONDS
    bar: Progress | None = None
    before = 0
    with ExitStack() as stack:

        def watch(done: int, total: int | None) -> None:
            nonlocal bar, before
            if bar is None:
                if not enabled or time.monotonic() - began < wait:
                    return
                bar = stack.enter_context(Progress(title, total=None if total is None else total - done, unit=" rows"))
                before = done
            bar.advance(done - before - bar.done)

        yield watch
