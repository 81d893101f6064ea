"""A teacher in another process of this machine, which works ahead while the student trains.

The child loads the model itself. It is a plain child process, as in preparation: no program with
threads is forked, and the user's main script does not run again. Outputs come through shared memory
or, if both are on GPUs, as tensors of the child's GPU that are opened here (CUDA IPC).

Guarantees: the same bits as `ModelTeacher` with the same number of threads. A child that dies or
cannot load is an error with its traceback, never an endless wait. A child ends when its caller
does, even by kill -9, and leaves nothing behind. Costs: memory for the model, for the outputs of
the rows worked ahead, and for those that the caller holds.
"""

import os
import pickle
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle
from typing import Any, final

import torch
import torch.multiprocessing

from penstock.core.errors import ConfigError, PenstockError
from penstock.learn.distillation.outputs import (
    Shapes,
    SharedBuffer,
    TeacherOutputs,
    Wanted,
    bytes_of,
)
from penstock.learn.distillation.teacher_process import Description, Load
from penstock.learn.distillation.teacher_rows import TeacherRow
from penstock.learn.distillation.teachers import ANY_ROWS
from penstock.models import PackedRows
from penstock.plan.inputs.model_input import ModelInput

_PATIENCE = 5.0
"""Seconds that a child has to end by itself."""


@final
class ProcessTeacher:
    """A model in a process of its own.

    Args:
        load: Opens the model and its tokenizer in the child: a function of a module (not of the
            main script), or a `functools.partial` of one.
        wanted: What to keep of its distributions.
        threads: Torch's CPU threads in the child; None: the same number as here.
        ahead: Maximum rows sent before their outputs are fetched.
        device: Where outputs go.
        packed: See `ModelTeacher`. A refusal is raised by the first `ask`, even without rows.

    Raises:
        ConfigError: `load` cannot be pickled, or a number is out of range.
    """

    def __init__(
        self,
        load: Load,
        wanted: Wanted,
        *,
        threads: int | None = None,
        ahead: int = 2,
        device: torch.device | str = "cpu",
        packed: PackedRows | None = ANY_ROWS,
    ) -> None:
        threads = torch.get_num_threads() if threads is None else threads
        if threads < 1 or ahead < 1:
            raise ConfigError(f"threads and ahead must be at least 1, got {threads} and {ahead}")
        self._wanted, self._ahead, self._device = wanted, ahead, torch.device(device)
        self._asked: deque[TeacherRow] = deque()
        self._sent: deque[_Sent] = deque()
        self._buffers: dict[int, SharedBuffer] = {}
        self._made = 0
        self._gone = "the teacher was closed and cannot be asked any more"
        self._facts: tuple[int, torch.dtype, bool] | None = None
        cuda = self._device.type == "cuda"
        description = _pickled(
            Description(load=load, wanted=wanted, threads=threads, cuda=cuda, packed=packed)
        )
        self._process, self._connection = _start(threads)
        self._end = weakref.finalize(self, _end, self._process, self._connection, self._buffers)
        self._send_message(description)

    def ask(self, rows: Sequence[TeacherRow]) -> None:
        """Send the first of these rows once the child is ready; the others follow as outputs are
        fetched.

        Raises:
            PenstockError: The child could not load its model, or died.
        """
        self._check()
        self._known()
        for one in self._sent:
            one.row = None
        self._asked = deque(rows)
        self._send()

    def outputs(self, row: TeacherRow) -> TeacherOutputs:
        """Wait for the outputs of a row.

        On the CPU they are in shared memory, which is used again when no tensor on it is left.

        Raises:
            ConfigError: Another row was asked for first.
            PenstockError: The child died, or failed on the row (with its traceback).
        """
        self._check()
        if not self._asked and not any(one.row is not None for one in self._sent):
            self.ask([row])
        while self._sent and self._sent[0].row is None:
            self._receive()
            self._send()
        if self._sent[0].row is not row:
            raise ConfigError(
                "a teacher's outputs must be fetched in the order in which their rows were "
                "asked for"
            )
        found = self._receive()
        assert found is not None
        self._send()
        return found

    def close(self) -> None:
        """End the child."""
        self._end()

    def _send(self) -> None:
        """Send rows until `ahead` of them are in flight."""
        while self._asked and len(self._sent) < self._ahead:
            row = self._asked.popleft()
            buffer = self._lend(len(row.input.tokens))
            generation = self._made = self._made + 1
            self._send_message(("row", generation, buffer, _read_part(row.input)))
            self._sent.append(_Sent(row=row, generation=generation, buffer=buffer))

    def _lend(self, slots: int) -> int | None:
        """Number of a free buffer that is large enough for a row; None if outputs stay on a GPU."""
        if self._known()[2]:
            return None
        size = bytes_of(self._shapes(slots))
        lent = {one.buffer for one in self._sent}
        free = [
            number
            for number, buffer in self._buffers.items()
            if number not in lent and buffer.is_free
        ]
        for number in free:
            if self._buffers[number].size >= size:
                return number
        for number in free:
            self._send_message(("drop", number))
            self._buffers.pop(number).close()
        number = max(self._buffers, default=0) + 1
        self._buffers[number] = SharedBuffer.create(size)
        self._send_message(("buffer", number))
        send_handle(self._connection, self._buffers[number].descriptor, self._process.pid)
        return number

    def _receive(self) -> TeacherOutputs | None:
        """The outputs of the row that was sent first; None if they are no longer wanted."""
        one = self._sent[0]
        kind, generation, value = self._receive_message()
        self._sent.popleft()
        if generation != one.generation:
            raise PenstockError(
                f"the teacher's process answered row {generation}, expected row {one.generation}"
            )
        if one.row is None:
            return None
        if kind == "failed":
            raise PenstockError(f"the teacher's process failed on a row:\n{value}")
        if one.buffer is None:
            found = TeacherOutputs(temperature=self._wanted.temperature, **pickle.loads(value))
        else:
            found = self._buffers[one.buffer].outputs(self._shapes(len(one.row.input.tokens)))
        return found.to(self._device)

    def _known(self) -> tuple[int, torch.dtype, bool]:
        """Vocabulary size, dtype of outputs, and whether they stay on a GPU; waits until the child
        is ready.
        """
        if self._facts is None:
            kind, *facts = self._receive_message()
            if kind == "failed":
                raise PenstockError(f"the teacher's process could not load its model:\n{facts[1]}")
            self._facts = facts[0], facts[1], facts[2]
        return self._facts

    def _shapes(self, slots: int) -> Shapes:
        vocab_size, dtype, _ = self._known()
        return Shapes(slots=slots, vocab_size=vocab_size, wanted=self._wanted, dtype=dtype)

    def _send_message(self, message: bytes | tuple[Any, ...]) -> None:
        try:
            self._connection.send_bytes(
                message if isinstance(message, bytes) else pickle.dumps(message)
            )
        except OSError:
            raise self._died() from None

    def _receive_message(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> PenstockError:
        self.close()
        code = self._process.returncode
        cause = (
            "killed by signal 9, often because memory ran out"
            if code == -9
            else f"it ended with code {code}"
        )
        self._gone = f"the teacher's process died ({cause}); set process: here to see the error"
        return PenstockError(self._gone)

    def _check(self) -> None:
        if not self._end.alive:
            raise PenstockError(self._gone)


@final
class _Sent:
    """A row in flight."""

    __slots__ = ("buffer", "generation", "row")

    def __init__(self, *, row: TeacherRow, generation: int, buffer: int | None) -> None:
        self.row: TeacherRow | None = row
        self.generation, self.buffer = generation, buffer


def _read_part(row: ModelInput) -> ModelInput:
    """The part of a row that a model reads, without loss weights and the student's data."""
    return replace(row, loss_weights=None, distillation=None)


def _pickled(description: Description) -> bytes:
    try:
        return pickle.dumps(description)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            "load must be a function of a module, or a partial of one, to run in another "
            f"process: {error}"
        ) from None


def _start(threads: int) -> "tuple[subprocess.Popen[bytes], Connection]":
    """A child, and our end of its pipe."""
    ours, child = Pipe()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "OMP_NUM_THREADS": str(threads),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.learn.distillation.teacher_process", str(child.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=2,  # prints of a model must not mix with our JSON
        pass_fds=(child.fileno(),),
        env=environment,
    )
    child.close()
    return process, ours


def _end(
    process: "subprocess.Popen[bytes]", connection: Connection, buffers: dict[int, SharedBuffer]
) -> None:
    """Close the pipe, at which the child ends; kill it if it does not."""
    connection.close()
    try:
        process.wait(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for buffer in buffers.values():
        buffer.close()
    buffers.clear()
