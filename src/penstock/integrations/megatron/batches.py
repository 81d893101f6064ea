"""Microbatches for Megatron's schedules: one rank of a tensor-parallel group loads, and sends to
the others.

Every rank of a data-parallel group has its own rows, those of a tensor-parallel group the same. So
only the first rank of each tensor-parallel group has a loader; a microbatch travels in two
broadcasts, sizes first, then all arrays in one block of bytes. The state after a step travels with
its last microbatch, so every rank can save it, without another collective. An error of the loading
rank is raised on all ranks of its group, so none waits for ever.

Ranks without a loader cannot say whether they agree, and pipeline stages in the middle may have no
`Batches` at all. So those that load compare their plans by the store of torch.distributed, which
needs no process group.
"""

import json
from collections.abc import Iterator
from typing import Any, NoReturn, final

import numpy as np
import torch
import torch.distributed as dist

from penstock.core.errors import ConfigError, DistributedError, StateError
from penstock.core.json_values import JsonObject
from penstock.integrations.megatron.layout import TARGETS, Packed, pack_rows
from penstock.integrations.plain_targets import empty_row, require_fields
from penstock.plan.loader import Step
from penstock.plan.loader.agreement import check_ranks, store_gather
from penstock.plan.loader.loader import Loader

_ARRAYS = ("tokens", "labels", "position_ids", "loss_mask", "cu_seqlens", "cu_seqlens_padded")
_DTYPES = (torch.int64, torch.int64, torch.int64, torch.float32, torch.int32, torch.int32)
_BATCH, _END, _FAILED, _READY = 0, 1, 2, 3
_HEAD = 8
"""What comes, slots, borders, longest document, microbatches of a step, data-parallel ranks, those
left, text bytes.
"""


@final
class Batches:
    """An iterator over microbatches, for Megatron's `forward_backward_func(data_iterator=batches,
    …)`.

    Each is a dict: `tokens`, `labels` (shifted, 0 = none), `position_ids` int64 and `loss_mask`
    float32, [1, S]; `cu_seqlens`, `cu_seqlens_padded` int32 [n + 1]; `max_seqlen`, `denominator`
    (of the whole step over all ranks), `num_microbatches` and `data_parallel_size`, numbers;
    `attention_mask`, None. Rows are joined end to end.

    Args:
        loader: This data-parallel rank's; None on all ranks of `group` but the first, which get
            what that one has.
        rows_per_microbatch: Rows that are joined; their number times Megatron's number of
            microbatches is that of this rank's rows in a step.
        group: The tensor-parallel process group; None: this process loads for itself. Pipeline
            stages load each for themselves: they have the same data-parallel rank, so they get the
            same.
        device: Where batches go; of the group's backend, so a GPU for NCCL.
        document_multiple: Slots of each document are a multiple of this: twice the context-parallel
            ranks.
        slots: S of every microbatch; None: the slots of the rows, or with a multiple what the
            documents need.

    Raises:
        ConfigError: Rows do not divide into microbatches, Megatron does not express the loader's
            data, or ranks have other data or settings.
        DistributedError: The loading rank has no loader, or another has one; or the loading rank
            failed.
    """

    def __init__(
        self,
        loader: Loader | None,
        *,
        rows_per_microbatch: int = 1,
        group: Any = None,
        device: torch.device | str = "cpu",
        document_multiple: int = 1,
        slots: int | None = None,
    ) -> None:
        self._group, self._device = group, torch.device(device)
        self._rank = 0 if group is None else dist.get_rank(group)
        self._shares = group is not None and dist.get_world_size(group) > 1
        if (loader is None) == (self._rank == 0):
            raise DistributedError(
                f"this is rank {self._rank} of its tensor-parallel group, and has "
                f"{'no' if loader is None else 'a'} loader; give one to rank 0 of each group, "
                "and None to the others"
            )
        self._loader, self._multiple, self._slots = loader, document_multiple, slots
        self._state: JsonObject | None = None
        self._left = 0
        self._made: Iterator[tuple[Packed, float, int, JsonObject | None]] | None = None
        if loader is None:
            self._await_ready()
            return
        try:
            self._begin(loader, rows_per_microbatch)
        except Exception as error:
            self._send_text(_FAILED, f"{type(error).__name__}: {error}")
            raise
        self._send_text(_READY, "")

    def _begin(self, loader: Loader, rows_per_microbatch: int) -> None:
        """Check the loader, alone and against those of other ranks."""
        TARGETS.check(loader)
        require_fields(
            "Megatron", {"the loader": loader}, "loss_weights", "positions", "cu_seqlens"
        )
        begin, end = loader.data_parallel.rows(loader.settings.constant_rows("Megatron"))
        self._rows, self._size = end - begin, rows_per_microbatch
        if rows_per_microbatch < 1 or self._rows % rows_per_microbatch:
            raise ConfigError(
                f"Megatron: rows_per_microbatch={rows_per_microbatch} does not divide this "
                f"rank's {self._rows} rows of a step"
            )
        check_ranks(
            loader,
            store_gather(loader.data_parallel, "Megatron"),
            {"rows_per_microbatch": self._size},
        )
        self._state = loader.state_dict()

    @property
    def num_microbatches(self) -> int | None:
        """Microbatches of a step, for Megatron's schedules; None on ranks without a loader: their
        batches say it.
        """
        return None if self._loader is None else self._rows // self._size

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> dict[str, Any]:
        """The next microbatch; a collective over the group."""
        if self._loader is None:
            return self._receive()
        try:
            if self._made is None:
                self._made = self._microbatches(self._loader)
            found = next(self._made, None)
        except Exception as error:
            self._send_text(_FAILED, f"{type(error).__name__}: {error}")
            raise
        if found is None:
            self._send_text(_END, "")
            raise StopIteration
        return self._send(*found)

    # -- state
    # ----------------------------------------------------------------------------------------------

    def state_dict(self) -> JsonObject:
        """State after the last step, the same on all ranks, however many there are.

        Raises:
            StateError: Only a part of the step's microbatches was taken; or nothing was, on a rank
                without a loader.
        """
        if self._left:
            raise StateError(
                f"Megatron saves in the middle of a step: {self._left} microbatches of it are "
                "not taken; the number of microbatches of Megatron must be `num_microbatches`"
            )
        if self._state is None:
            raise StateError(
                "this rank has no loader and got no microbatch yet, so it knows no state; "
                "save it on the first rank of the tensor-parallel group"
            )
        return self._state

    def load_state_dict(self, state: JsonObject) -> None:
        """Go on after the step that the state was saved from; call it on all ranks.

        Raises:
            StateError: The state was made from other data or settings.
        """
        if self._loader is not None:
            self._made = None
            self._loader.load_state_dict(state)
        self._state, self._left = state, 0

    # -- making
    # ----------------------------------------------------------------------------------------------

    def _microbatches(
        self, loader: Loader
    ) -> Iterator[tuple[Packed, float, int, JsonObject | None]]:
        """(arrays, denominator, microbatches left in the step, state after the last) of all
        steps.
        """
        for step in loader:
            rows = self._rows_of(step)
            for begin in range(0, self._rows, self._size):
                left = (self._rows - begin) // self._size - 1
                made = pack_rows(
                    rows[begin : begin + self._size],
                    document_multiple=self._multiple,
                    slots=self._slots,
                )
                yield made, step.loss_denominator, left, step.resume_state if not left else None

    def _rows_of(self, step: Step) -> list[Any]:
        """This rank's rows; a short last step is filled up with rows without targets."""
        rows = list(step)
        return rows + [empty_row(rows[0])] * (self._rows - len(rows))

    # -- sending
    # ----------------------------------------------------------------------------------------------

    def _send(
        self, made: Packed, denominator: float, left: int, state: JsonObject | None
    ) -> JsonObject:
        assert self._loader is not None
        text = b"" if state is None else json.dumps(state).encode()
        size = self._loader.data_parallel.size
        head = [
            _BATCH,
            len(made.tokens),
            len(made.cu_seqlens),
            made.max_seqlen,
            self._rows // self._size,
            size,
            left,
            len(text),
        ]
        arrays = [np.ascontiguousarray(getattr(made, name)) for name in _ARRAYS]
        ending = [np.array([denominator]), np.frombuffer(text, np.uint8)]
        block = torch.from_numpy(
            np.concatenate([one.view(np.uint8) for one in (*ending[:1], *arrays, ending[1])])
        )
        block = block.to(self._device)
        if self._shares:
            self._broadcast(torch.tensor(head, device=self._device))
            self._broadcast(block)
        return self._take(head, block)

    def _send_text(self, what: int, text: str) -> None:
        if self._shares:
            data = text.encode()[:4000]
            self._broadcast(
                torch.tensor([what, *[0] * (_HEAD - 2), len(data)], device=self._device)
            )
            if data:
                self._broadcast(
                    torch.from_numpy(np.frombuffer(data, np.uint8).copy()).to(self._device)
                )

    def _await_ready(self) -> None:
        """Wait for the loading rank of the group.

        Raises:
            DistributedError: It failed.
        """
        head = self._head()
        if head[0] == _FAILED:
            self._raise_failure(head[-1])

    def _head(self) -> list[int]:
        first = torch.zeros(_HEAD, dtype=torch.int64, device=self._device)
        self._broadcast(first)
        found: list[int] = first.tolist()
        return found

    def _receive(self) -> dict[str, Any]:
        head = self._head()
        if head[0] == _END:
            raise StopIteration
        if head[0] == _FAILED:
            self._raise_failure(head[-1])
        return self._take(head, self._bytes(_bytes_of(head)))

    def _bytes(self, size: int) -> torch.Tensor:
        block = torch.empty(size, dtype=torch.uint8, device=self._device)
        if size:
            self._broadcast(block)
        return block

    def _raise_failure(self, size: int) -> NoReturn:
        text = self._bytes(size).cpu().numpy().tobytes().decode(errors="replace")
        raise DistributedError(f"the loading rank of this tensor-parallel group failed: {text}")

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=dist.get_global_rank(self._group, 0), group=self._group)

    def _take(self, head: list[int], block: torch.Tensor) -> dict[str, Any]:
        """A batch of the bytes that were sent: views, without another copy."""
        _, slots, borders, longest, microbatches, ranks, left, text = head
        batch: dict[str, Any] = {"attention_mask": None}
        at = 8
        for name, dtype in zip(_ARRAYS, _DTYPES, strict=True):
            count = borders if name.startswith("cu_") else slots
            part = block[at : at + count * dtype.itemsize].view(dtype)
            batch[name] = part if name.startswith("cu_") else part[None]
            at += count * dtype.itemsize
        if text:
            self._state = json.loads(block[at:].cpu().numpy().tobytes())
        self._left = left
        return {
            **batch,
            "max_seqlen": longest,
            "denominator": float(block[:8].view(torch.float64).item()),
            "num_microbatches": microbatches,
            "data_parallel_size": ranks,
        }


def _bytes_of(head: list[int]) -> int:
    sizes = (
        (head[2] if name.startswith("cu_") else head[1]) * dtype.itemsize
        for name, dtype in zip(_ARRAYS, _DTYPES, strict=True)
    )
    return 8 + sum(sizes) + head[-1]
