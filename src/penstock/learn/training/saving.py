"""Saves checkpoints while the training goes on: tensors are copied, and a thread writes the copies.

Training stands still for the copy alone. On a GPU it goes into pinned memory of the CPU, which is
taken once, at the first checkpoint, and kept: as many bytes as this process writes. One checkpoint
is written at a time; the next one waits for it, and so do the end of the run, SIGTERM and Ctrl-C.
A failure ends the run at the next step, on all ranks at the same one.
"""

import socket
import threading
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.learn.training.memory import device_memory
from penstock.learn.training.processes import gather, is_first
from penstock.learn.training.settings import CheckpointSettings
from penstock.models import LanguageModel
from penstock.models.tensor_files import Piece, local_part, own_pieces

ROOM = 0.6
"""Share of a machine's memory that copies may take; data and code need some, too."""


def copy_size(model: LanguageModel, *, sharded: bool, only_trained: bool) -> int:
    """About as many bytes as this process copies for a checkpoint: weights, and two running means
    of each that is trained.

    Args:
        model: As it is trained.
        sharded: Whether this process has a part of the model; else rank 0 copies all.
        only_trained: Whether checkpoints hold no frozen weights.
    """
    if not (sharded or is_first()):
        return 0
    return sum(
        local_part(one).nbytes * (3 if one.requires_grad else 1)
        for one in model.parameters()
        if one.requires_grad or not only_trained
    )


@final
class Saving:
    """The save that is under way; as a context manager around the training, it waits at the end.

    Args:
        beside: Whether the training goes on during a save; else it is done when `start` returns.
        say: Called with one sentence about a save that failed while another error ended the run.
    """

    def __init__(self, *, beside: bool, say: Callable[[str], None]) -> None:
        self.beside = beside
        self._say = say
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._memory: dict[str, _Copies] = {}

    @classmethod
    def of(
        cls,
        settings: CheckpointSettings,
        device: torch.device,
        say: Callable[[str], None],
        *,
        copies: int = 0,
        group: Any = None,
    ) -> Self:
        """As the settings say, or as it serves the device: on the CPU, the copy takes memory that
        the model may need. All ranks call it, and find the same.

        Args:
            settings: Of checkpoints.
            device: That trains.
            say: See `Saving`.
            copies: Bytes that this process would copy.
            group: Process group of checkpoints.

        Raises:
            ConfigError: The settings ask for copies, and a machine lacks the memory.
        """
        asked = settings.asynchronous
        beside = device.type != "cpu" if asked == "auto" else bool(asked)
        room = device_memory(torch.device("cpu"))
        here = gather((socket.gethostname(), copies if beside else 0, room), group)
        needed: dict[str, int] = {}
        for host, size, _ in here:
            needed[host] = needed.get(host, 0) + size
        lacking = next(
            ((needed[host], most) for host, _, most in here if needed[host] > ROOM * most), None
        )
        if lacking is None:
            return cls(beside=beside, say=say)
        size, most = lacking
        why = (
            f"a copy of weights and optimizer state takes {size / 1e9:,.1f} GB, more than "
            f"{ROOM:.0%} of a machine's {most / 1e9:,.1f} GB of memory"
        )
        if asked != "auto":
            raise ConfigError(f"checkpoints.asynchronous: {why}; set it to false")
        say(f"checkpoints are written at a standstill: {why}")
        return cls(beside=False, say=say)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and not issubclass(kind, Exception | GeneratorExit):
            # A second Ctrl-C ends at once: what is half written never becomes visible.
            return
        try:
            self.wait()
        except Exception as failure:
            if error is None or isinstance(error, GeneratorExit):
                raise
            # The error that ended the run is the one to raise.
            self._say(str(failure))
        finally:
            self._memory.clear()

    @property
    def failed(self) -> bool:
        """Whether the last save has failed, as `wait` will raise."""
        return self._failure is not None

    def copied(self, part: str, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Whole tensors as they are now, whatever becomes of them while they are written.

        Tensors that share memory share it in the copy. The memory of a part's last copy is taken
        again, so the last save must be over.

        Args:
            part: Of the checkpoint.
            tensors: Of the part.
        """
        return self._copies(part).of(tensors) if self.beside else tensors

    def copied_pieces(
        self, part: str, tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor | Piece]:
        """As `copied`, of what this rank writes of tensors that are sharded."""
        if not self.beside:
            return tensors
        mine = own_pieces(tensors, is_first=is_first())
        copies = self._copies(part).of({name: one.values for name, one in mine.items()})
        return {name: Piece(copies[name], one.begin) for name, one in mine.items()}

    def _copies(self, part: str) -> "_Copies":
        return self._memory.setdefault(part, _Copies())

    def start(self, write: Callable[[], object]) -> None:
        """Write a checkpoint; the one before must be over (`wait`).

        Raises:
            PenstockError: It cannot be written, and the training waits for it.
        """
        if not self.beside:
            write()
            return

        def run() -> None:
            try:
                write()
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=run, name="penstock-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save that is under way.

        Raises:
            PenstockError: It has failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


@final
class _Copies:
    """Memory of the CPU for copies of the same tensors again and again: one block, pinned for a
    GPU.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the tensors."""
        # Tied weights have several names.
        distinct = {_place(one): one.detach() for one in tensors.values()}
        size = sum(_aligned(one.nbytes) for one in distinct.values())
        if self._block.numel() != size:
            on_gpu = any(one.device.type == "cuda" for one in distinct.values())
            self._block = _block(size, pinned=on_gpu)
        copies, begin = {}, 0
        for place, one in distinct.items():
            block = self._block[begin : begin + one.nbytes]
            begin += _aligned(one.nbytes)
            copies[place] = block.view(one.dtype).view(one.shape)
            copies[place].copy_(one, non_blocking=True)
        if any(one.device.type != "cpu" for one in distinct.values()):
            torch.accelerator.synchronize()
        return {name: copies[_place(one)] for name, one in tensors.items()}


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def _block(size: int, *, pinned: bool) -> Tensor:
    """Bytes of memory; registered with CUDA as they are, since its allocator would take the next
    power of two.
    """
    try:
        block = torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:
        raise ConfigError(
            f"checkpoints: no {size / 1e9:,.1f} GB of memory for a copy that is written while the "
            "training goes on; set checkpoints.asynchronous to false"
        ) from error
    if pinned and size:
        runtime, address = torch.cuda.cudart(), block.data_ptr()
        # Without it, copies are slower, and as right.
        if int(runtime.cudaHostRegister(address, size, 0)) == 0:
            weakref.finalize(
                block.untyped_storage(), runtime.cudaHostUnregister, address
            ).atexit = False
    return block
