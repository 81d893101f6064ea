"""One error of all ranks: which rank prints it, and what torchrun's summary says.

When a rank fails, others fail with it: some have the same error, some only see that a connection
was closed. The rank that knows the cause prints it, once; where several do, it is rank 0 if that is
among them. They agree by the store of torchrun's agent, which outlives the ranks. The cause is also
what torchrun's summary names: its error file is written as
`torch.distributed.elastic.multiprocessing.errors.record` writes it, but by that rank alone, and
other ranks wait to be ended, since torchrun takes the first rank that ends for the cause.
"""

import functools
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from penstock.core.errors import DistributedError, PenstockError
from penstock.core.json_values import JsonObject
from penstock.core.terminal import visible

FIRST_SECONDS = 2.0
"""How long other ranks let rank 0 come first: it usually has the same error."""
CAUSE_SECONDS = 15.0
"""How long a rank that lost a connection waits for the rank that knows why."""
END_SECONDS = 20.0
"""How long a rank that prints nothing waits until torchrun ends it."""
_CAUSE = "cause"
_BROKEN = re.compile(
    r"[Cc]onnection (closed|reset|refused|aborted)|Broken pipe|gloo/transport|remote process "
    r"exited|Socket Timeout|Timed out waiting|wait timeout|Connection was likely closed"
    r"|failed to pass monitoredBarrier"
)
"""What gloo, NCCL and stores say when another rank is gone."""

P = ParamSpec("P")
R = TypeVar("R")


def one_error(function: Callable[P, R]) -> Callable[P, R]:
    """A program's main function, of whose ranks one prints the error that ends them; for `ps.train`
    under torchrun.

    ```python
    @ps.training.one_error
    def main():
        ps.train(model, loader, output="runs/first")

    if __name__ == "__main__":
        main()
    ```

    A single process raises its error as usual.

    Raises:
        SystemExit: With code 1, on each of several ranks, when there is an error on any.
    """

    @functools.wraps(function)
    def guarded(*arguments: P.args, **keywords: P.kwargs) -> R:
        try:
            return function(*arguments, **keywords)
        except Exception as error:
            if not among_ranks():
                raise
            raise SystemExit(end_together(error)) from None

    return guarded


def among_ranks() -> bool:
    """Whether this process is one of several that torchrun (or another launcher) started."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") not in ("", "1")


def end_together(error: Exception, message: str | None = None) -> int:
    """Print an error if it is this rank's turn, else wait to be ended; gives the exit code. Call it
    while handling it.

    Args:
        error: That ends this rank.
        message: What to say in place of the error's own words.
    """
    rank = int(os.environ["RANK"])
    told = message or (
        str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
    )
    store = _agent_store()
    cause = {"rank": rank, "message": told}
    if store is None:
        # Nobody can be asked. What another rank has raised, that one prints.
        speaks = not (isinstance(error, DistributedError) and error.failed_rank is not None)
    else:
        seconds = CAUSE_SECONDS if is_consequence(error) else FIRST_SECONDS if rank else 0.0
        found = _known(store, seconds) or json.loads(
            store.compare_set(_CAUSE, "", json.dumps(cause))
        )
        speaks, cause = found["rank"] == rank, found
    if speaks:
        if not isinstance(error, PenstockError):
            traceback.print_exception(error)
        text = told if re.match(r"rank \d", told) else f"rank {rank}: {told}"
        print("penstock:", visible(text, lines=True), file=sys.stderr, flush=True)
        _record(error)
        return 1
    if store is not None:
        time.sleep(END_SECONDS)
        # Nobody has ended it, as on another machine: its own torchrun names the cause, too.
        _record(DistributedError(f"rank {cause['rank']} failed: {cause['message']}"))
    return 1


def is_consequence(error: BaseException) -> bool:
    """Whether an error says no more than that another rank has failed."""
    if isinstance(error, DistributedError):
        return error.failed_rank is not None
    if isinstance(error, PenstockError):
        return False
    distributed = sys.modules.get("torch.distributed")
    kinds = getattr(distributed, "DistError", ())
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError | OSError) and bool(_BROKEN.search(str(error)))
    )


def _agent_store() -> Any:
    """The store of torchrun's agent, seen by all ranks of this attempt; None: there is no torchrun,
    or it has ended.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    host, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "0"))
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))
    except RuntimeError:
        return None
    return PrefixStore(
        f"penstock-failure-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store
    )


def _known(store: Any, seconds: float) -> JsonObject | None:
    """The cause, if a rank says it within some seconds."""
    if not seconds:
        return None
    try:
        store.wait([_CAUSE], timedelta(seconds=seconds))
        found: JsonObject = json.loads(store.get(_CAUSE))
    except RuntimeError:
        return None
    return found


def _record(error: Exception) -> None:
    """Write the error where torchrun's summary finds it; without its traceback, which the rank has
    printed.
    """
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    try:
        raise type(error).__new__(type(error), str(error)) from None
    except Exception as raised:
        handler.record_exception(raised)
