"""A teacher's outputs for a row, reduced to what a loss needs, and the memory that carries them
between processes.

`outputs_of` holds the final hidden states of the whole row, but logits only for a block of slots at
a time, so [slots, vocabulary] never exists unless it was asked for. Logits beyond the tokenizer's
vocabulary are cut off before any softmax. Padding is not computed: its slots hold zeros.

`SharedBuffer` carries outputs between processes. It is an anonymous memory file (`memfd_create`)
that is passed to the other process as a descriptor. So nothing is left behind, however the
processes end, and nothing must be unlinked; it does not count against /dev/shm, which is often 64
MiB in a container. Its pages are allocated when it is created, so a machine without enough memory
reports it then, and does not kill the writer later. The caller's process owns the buffers and lends
one with each row; the teacher writes only into it. A buffer is lent again when no tensor on it is
left.
"""

import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.arrays import Array, Int64
from penstock.core.errors import ConfigError, PenstockError
from penstock.models import LanguageModel
from penstock.models.head import Head
from penstock.models.without_dropout import evaluating
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.torch_tensors import on_device

LEAST_SLOTS = 64
"""Minimum slots in a block: each block reads the whole head."""
ELEMENTS_CPU, ELEMENTS_GPU = 1 << 19, 1 << 26
"""Logits in a larger block: 2 MiB and 256 MiB in float32."""
_LINE = 64
"""Arrays in a buffer begin at whole cache lines."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is kept of a teacher's distributions."""

    temperature: float = 1.0
    """Logits are divided by it before the softmax of `log_probs` and `top_log_probs`; all else is
    at 1.
    """
    top_k: int | None = None
    """Keep the k most likely tokens, or the whole vocabulary if it is smaller; None: all."""
    boundary: bool = False
    """Also keep the probability that the next token begins at a boundary; see `starts_boundary`."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"a teacher's temperature must be above 0, got {self.temperature!r}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(
                f"a teacher's top_k must be at least 1, got {self.top_k}; leave it out for "
                "all tokens"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherOutputs:
    """Predictions for a row of T slots; entry t is about the token after slot t. float32, or
    float64 from a float64 model.
    """

    log_probs: Tensor | None = None
    """[T, V]: log softmax(logits / temperature); V is the size of the teacher's tokenizer."""
    top_ids: Tensor | None = None
    """int64 [T, k]: the k most likely tokens in descending order, instead of `log_probs`."""
    top_log_probs: Tensor | None = None
    """[T, k]: their log-probabilities in the full softmax at that temperature."""
    token_log_probs: Tensor
    """[T], at temperature 1: log p(token t | those before it); 0 at the first slot of a document
    and in padding.
    """
    boundary_log_probs: Tensor | None = None
    """[T], at temperature 1: log P(the token after slot t begins at a boundary)."""
    entropy: Tensor
    """[T], nats, at temperature 1."""
    temperature: float

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by field."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> Self:
        """The same on a device."""
        place = torch.device(device)
        sent = {name: on_device(value, place) for name, value in self.tensors().items()}
        return type(self)(temperature=self.temperature, **sent)

    @classmethod
    def make(
        cls, shapes: "Shapes", tensor: Callable[[str, tuple[int, ...], torch.dtype], Tensor]
    ) -> Self:
        """Build outputs from the tensors that `tensor(field, shape, dtype)` returns."""
        made = {name: tensor(name, *kind) for name, kind in shapes.kinds().items()}
        return cls(temperature=shapes.wanted.temperature, **made)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Shapes and dtypes of a row's `TeacherOutputs`, known before the row is run."""

    slots: int
    """T."""
    vocab_size: int
    """V."""
    wanted: Wanted
    dtype: torch.dtype = torch.float32

    def kinds(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Field → shape and dtype."""
        line = (self.slots,), self.dtype
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "token_log_probs": line,
            "entropy": line,
        }
        if self.wanted.boundary:
            found["boundary_log_probs"] = line
        if self.wanted.top_k is None:
            found["log_probs"] = (self.slots, self.vocab_size), self.dtype
        else:
            shape = self.slots, min(self.wanted.top_k, self.vocab_size)
            found |= {"top_ids": (shape, torch.int64), "top_log_probs": (shape, self.dtype)}
        return found


def outputs_of(
    model: LanguageModel,
    row: ModelInput,
    wanted: Wanted,
    *,
    vocab_size: int,
    boundary: Tensor | None = None,
    block: int | None = None,
    into: TeacherOutputs | None = None,
) -> TeacherOutputs:
    """Run a model over a row, without gradients and dropout.

    Args:
        model: Its training mode is restored afterwards.
        row: Tokens of the model, with positions; its targets are not used.
        wanted: What to keep.
        vocab_size: Number of ids of the model's tokenizer; logits beyond them are cut off.
        boundary: bool [vocab_size], needed with `wanted.boundary`.
        block: Number of slots with logits at the same time; None: by vocabulary and device.
        into: Tensors to write to, on any device; None: new tensors on the model's device.

    Raises:
        ConfigError: The model has fewer logits than the tokenizer has ids, or the row has unknown
            ids or no positions.
    """
    if wanted.boundary and (boundary is None or len(boundary) != vocab_size):
        raise ConfigError(
            f"boundary probabilities need a bool for each of the {vocab_size} ids, got "
            f"{'none' if boundary is None else len(boundary)}; give starts_boundary(tokenizer)"
        )
    with evaluating(model):
        hidden = model(model.tensors(row))[0]
        return _write(model, hidden, row, wanted, vocab_size, boundary, block, into)


def _write(
    model: LanguageModel,
    hidden: Tensor,
    row: ModelInput,
    wanted: Wanted,
    vocab_size: int,
    boundary: Tensor | None,
    block: int | None,
    into: TeacherOutputs | None,
) -> TeacherOutputs:
    """Write the outputs of hidden states [T, width], a block of slots at a time."""
    head, device = Head.of_model(model), hidden.device
    after = on_device(_tokens_after(row), device)
    probe = head.wide(hidden[:1])
    if probe.shape[-1] < vocab_size:
        raise ConfigError(
            f"the teacher has logits for {probe.shape[-1]} ids, its tokenizer has "
            f"{vocab_size}; give the tokenizer that it was trained with"
        )
    if into is None:
        shapes = Shapes(slots=len(hidden), vocab_size=vocab_size, wanted=wanted, dtype=probe.dtype)
        into = TeacherOutputs.make(
            shapes, lambda _, shape, dtype: torch.empty(shape, dtype=dtype, device=device)
        )
    starts = boundary.to(device, probe.dtype) if boundary is not None and wanted.boundary else None
    if block is None:
        block = max(
            LEAST_SLOTS, (ELEMENTS_CPU if device.type == "cpu" else ELEMENTS_GPU) // vocab_size
        )
    for begin in range(0, row.num_tokens, block):
        part = slice(begin, min(begin + block, row.num_tokens))
        logits = head.wide(hidden[part])[:, :vocab_size]
        _keep(into, part, logits, after[part], starts)
    _clear(into, row.num_tokens)
    return into


def _keep(
    found: TeacherOutputs, part: slice, logits: Tensor, after: Tensor, starts: Tensor | None
) -> None:
    """Write one block's outputs.

    Args:
        found: Where to write.
        part: Slots of the block.
        logits: [n, V].
        after: int64 [n], the token after each slot, or −1.
        starts: [V], 1 for tokens that begin at a boundary.
    """
    logs = torch.log_softmax(logits, -1)
    # The token after slot t is token t + 1 of the same document.
    realised = logs.gather(1, after.clamp_min(0)[:, None])[:, 0].where(after >= 0, 0.0)
    into = found.token_log_probs[part.start + 1 : part.stop + 1]
    into.copy_(realised[: len(into)])
    probabilities = logs.exp()
    # Clamped, because 0 × −∞ is not 0.
    found.entropy[part] = -(probabilities * logs.clamp_min(torch.finfo(logs.dtype).min)).sum(-1)
    if starts is not None and found.boundary_log_probs is not None:
        tiny = torch.finfo(logs.dtype).tiny
        found.boundary_log_probs[part] = (probabilities @ starts).clamp(tiny, 1.0).log()
    if found.temperature != 1.0:
        logs = torch.log_softmax(logits / found.temperature, -1)
    if found.log_probs is not None:
        found.log_probs[part] = logs
    elif found.top_ids is not None and found.top_log_probs is not None:
        likeliest = logs.topk(found.top_ids.shape[1])
        found.top_log_probs[part], found.top_ids[part] = likeliest.values, likeliest.indices


def _clear(found: TeacherOutputs, used: int) -> None:
    """Write zeros where nothing was computed."""
    found.token_log_probs[:1] = 0.0
    for tensor in found.tensors().values():
        tensor[used:] = 0


def _tokens_after(row: ModelInput) -> Int64:
    """The next token of the same document after each slot, int64 [T]; −1 at a document's last slot
    and in padding.

    It is not read from the targets, because the teacher also reads tokens that are not trained.
    """
    if row.positions is None:
        raise ConfigError(
            "the row has no positions, which a teacher needs; make it with TeacherRows"
        )
    after = np.full(len(row.tokens), -1, np.int64)
    goes_on = np.flatnonzero(row.positions[1 : row.num_tokens] != 0)
    after[goes_on] = row.tokens[goes_on + 1]
    return after


@final
class SharedBuffer:
    """A mapped buffer, made with `create` or, in the other process, from its descriptor.

    Attributes:
        size: In bytes.
        descriptor: To pass to the other process.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.size = descriptor, os.fstat(descriptor).st_size
        self._block = np.frombuffer(mmap.mmap(descriptor, self.size), np.uint8)
        self._free = sys.getrefcount(self._block)

    @classmethod
    def create(cls, size: int) -> "SharedBuffer":
        """Create a buffer.

        Raises:
            ConfigError: The system has no `memfd_create`.
            PenstockError: There is not enough memory.
        """
        if not hasattr(os, "memfd_create"):
            raise ConfigError("a teacher in a process of its own needs Linux; set process: here")
        descriptor = os.memfd_create("penstock-teacher", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            os.close(descriptor)
            raise PenstockError(
                f"no memory for {size:,} bytes of a teacher's outputs: {error.strerror}; set "
                "top_k, use shorter rows, or set process: here"
            ) from error
        return cls(descriptor)

    @property
    def is_free(self) -> bool:
        """Whether nothing refers to it. Torch tensors refer to NumPy views, and those to the
        block.
        """
        return sys.getrefcount(self._block) == self._free

    def outputs(self, shapes: Shapes) -> TeacherOutputs:
        """The buffer's contents as the tensors of a row; while they exist, it is not lent again."""
        places = _places(shapes)

        def tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            begin, size = places[name]
            view: Array = self._block[begin : begin + size]
            return torch.from_numpy(view).view(dtype).view(shape)

        return TeacherOutputs.make(shapes, tensor)

    def close(self) -> None:
        """Close the descriptor; the memory is freed when nothing refers to it any more."""
        os.close(self.descriptor)


def bytes_of(shapes: Shapes) -> int:
    """Size in bytes that a buffer needs for the outputs of a row."""
    return max(sum(places) for places in _places(shapes).values())


def _places(shapes: Shapes) -> dict[str, tuple[int, int]]:
    """Field → first byte and number of bytes."""
    found, begin = {}, 0
    for name, (shape, dtype) in shapes.kinds().items():
        size = dtype.itemsize * int(np.prod(shape))
        found[name] = begin, size
        begin += -(-size // _LINE) * _LINE
    return found
