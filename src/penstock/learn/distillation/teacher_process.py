"""The child process of a `ProcessTeacher`: loads a model and answers one row after another until
its caller is gone.

A thread reads what the caller sends, so the caller never waits for that. When the caller's end of
the pipe closes, however the caller ended, the process ends at once. Ctrl-C is left to the caller.

    caller → child:   the teacher's `Description`, once; then
                      ("buffer", number) and a descriptor; ("drop", number)
                      ("row", generation, number of the lent buffer or None, ModelInput)
    child → caller:   ("ready", vocabulary, dtype, whether outputs stay on the GPU), once; then for each row, in order
                      ("done", generation, None, or the handles by which torch opens tensors of
                      another process's GPU) ("failed", generation, the error's traceback)
"""  # noqa: E501

import io
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle
from typing import Any, final

import torch
import torch.multiprocessing

from penstock.core.errors import PenstockError
from penstock.learn.distillation.outputs import Shapes, SharedBuffer, TeacherOutputs, Wanted
from penstock.learn.distillation.teachers import ModelTeacher
from penstock.models import LanguageModel, PackedRows
from penstock.plan.inputs.model_input import ModelInput
from penstock.tokenizers import Tokenizer

Load = Callable[[], tuple[LanguageModel, Tokenizer]]
"""Opens a model and its tokenizer in the process that runs it; must be picklable."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a child needs before its first row."""

    load: Load
    wanted: Wanted
    threads: int
    cuda: bool
    """Whether the caller wants outputs on a GPU, and so can open GPU tensors of the child."""
    packed: PackedRows | None
    """See `ModelTeacher`."""


def main() -> None:
    """Serve the pipe; its descriptor is the process's only argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    sent: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_read, args=(connection, sent), daemon=True).start()
    try:
        child = _Child(sent.get(), connection)
    except Exception as error:
        # Whatever the user's load raises must reach the caller; our own errors need no traceback.
        connection.send(
            (
                "failed",
                0,
                str(error) if isinstance(error, PenstockError) else traceback.format_exc(),
            )
        )
        return
    while True:
        child.serve(sent.get())


def _read(connection: Connection, sent: "queue.Queue[Any]") -> None:
    try:
        while True:
            message = pickle.loads(connection.recv_bytes())
            if isinstance(message, tuple) and message[0] == "buffer":
                message = *message, recv_handle(connection)
            sent.put(message)
    except Exception as error:
        if not isinstance(error, EOFError | OSError):
            # The description cannot be unpickled: nothing else here runs foreign code.
            connection.send(("failed", 0, traceback.format_exc()))
    os._exit(0)


@final
class _Child:
    """A model and the buffers lent to it."""

    def __init__(self, description: Description, connection: Connection) -> None:
        torch.set_num_threads(description.threads)
        model, tokenizer = description.load()
        self._teacher = ModelTeacher(
            model, tokenizer, description.wanted, packed=description.packed
        )
        self._wanted, self._vocab_size = description.wanted, tokenizer.vocab_size
        self._dtype = torch.promote_types(model.compute_dtype, torch.float32)
        self._on_gpu = description.cuda and model.device.type == "cuda"
        self._connection, self._buffers = connection, dict[int, SharedBuffer]()
        connection.send(("ready", self._vocab_size, self._dtype, self._on_gpu))

    def serve(self, message: tuple[Any, ...]) -> None:
        """Handle a message."""
        kind, *rest = message
        if kind == "buffer":
            number, descriptor = rest
            self._buffers[number] = SharedBuffer(descriptor)
        elif kind == "drop":
            self._buffers.pop(rest[0]).close()
        else:
            self._answer(*rest)

    def _answer(self, generation: int, buffer: int | None, row: ModelInput) -> None:
        message: tuple[str, int, Any]
        try:
            message = "done", generation, self._run(buffer, row)
        except Exception:
            message = "failed", generation, traceback.format_exc()
        self._connection.send(message)

    def _run(self, buffer: int | None, row: ModelInput) -> bytes | None:
        if buffer is None:
            return _handles(self._teacher.run(row))
        shapes = Shapes(
            slots=len(row.tokens),
            vocab_size=self._vocab_size,
            wanted=self._wanted,
            dtype=self._dtype,
        )
        self._teacher.run(row, self._buffers[buffer].outputs(shapes))
        return None


def _handles(outputs: TeacherOutputs) -> bytes:
    """Handles by which another process opens GPU tensors (CUDA IPC); torch keeps them until that
    process lets go.
    """
    written = io.BytesIO()
    ForkingPickler(written, pickle.HIGHEST_PROTOCOL).dump(outputs.tensors())
    return written.getvalue()


if __name__ == "__main__":
    main()
