"""A pool's child process: takes tasks from a pipe until the pipe closes, and sends back reports and
results.

The parent handles Ctrl-C. If the parent dies, its end of standard input closes, and the worker ends
at once.
"""

import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from penstock.core.errors import PenstockError


def main() -> None:
    """Serve the pipe with the file descriptor in the argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lifeline = os.dup(0)
    os.set_inheritable(lifeline, False)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    try:
        state = pickle.loads(connection.recv_bytes())
        while True:
            _serve(connection, state)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _serve(connection: Connection, state: object) -> None:
    function, argument = pickle.loads(connection.recv_bytes())

    def report(*figures: object) -> None:
        connection.send_bytes(pickle.dumps(("report", figures)))

    message: tuple[str, Any]
    try:
        message = ("done", function(state, argument, report))
    except PenstockError as error:
        message = ("failed", error)
    except MemoryError:
        message = (
            "failed",
            PenstockError("out of memory; use fewer processes, or a smaller part_bytes"),
        )
    connection.send_bytes(pickle.dumps(message))


def _end_with_parent(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
