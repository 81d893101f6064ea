"""One epoch of a library that streams rows, as all peers of bench_remote are timed."""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any


def answer_lines(
    batches_of: Callable[[str, int], Iterable[Any]], close: Callable[[], None] = lambda: None
) -> None:
    """Read an epoch for each line of the input, a number of workers, and print what it took as a
    line of JSON.

    Args:
        batches_of: Folder for copies, and number of workers → integer tensors; called within the
            time.
        close: Called after each epoch, when its batches are let go; neither is timed.
    """
    for line in sys.stdin:
        local = tempfile.mkdtemp()
        begun, cpu = time.monotonic(), _cpu_seconds()
        first, early, count, check = 0.0, 0, 0, 0
        batches = batches_of(local, int(line))
        for batch in batches:
            check += int(batch.sum())
            count += batch.numel()
            if not first:
                first, early = time.monotonic() - begun, count
        seconds = time.monotonic() - begun
        answer = {
            "seconds": seconds,
            "tokens": count,
            "first": first,
            "rest": count - early,
            "cpu": _cpu_seconds() - cpu,
        }
        print(json.dumps(answer), flush=True)
        del batches, batch
        close()
        shutil.rmtree(local, ignore_errors=True)


def _cpu_seconds() -> float:
    """Of this process and of the workers that have ended."""
    return sum(os.times()[:4])
