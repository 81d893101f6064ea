"""Steps of one token a sequence as CUDA graphs: the whole step is recorded once, and started with
one call.

A step of a small batch computes for microseconds in each of hundreds of kernels, and the host
cannot start them as fast. A recorded step has fixed shapes and fixed memory. So batches are padded
to 1, 2, 4, … rows; positions, pages and tables are written into the same memory each time, in one
copy; and attention is told that sequences may be as long as the cache allows. Rows without a
sequence read and write page 0, which belongs to nobody.

A size is recorded once it has been used some times without: recording costs several steps. If a
model cannot be recorded, as code that asks the device for a number cannot, that is said once, and
its steps run as before.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.arrays import Int64
from penstock.models.attention import AttentionLayer
from penstock.models.paged_cache import PagedCache, attend_pages

USES = 8
"""Steps of a size before it is recorded."""
_log = logging.getLogger("penstock.models")


class Growing(Protocol):
    """What a model's step takes of an extension."""

    positions: Tensor

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`LayerAttend`."""


SingleStep = Callable[[Tensor, Growing], Tensor]
"""(tokens [B, 1], growth) → logits [B, vocab]."""


class Recorder(Protocol):
    """Records work of a device."""

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Run it, and record it; returns what repeats it, and its result, which each repetition
        writes.
        """


@final
class CudaRecorder:
    """CUDA graphs that share one pool of memory, of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """As `Recorder`."""
        with torch.cuda.device(self._device):
            # Libraries make their workspaces in the first run, outside of the graph.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                out = run()
            self._pool = graph.pool()
            return graph.replay, out


@final
class Steps:
    """The recorded steps of one model and one cache.

    Args:
        cache: The cache; it has a kernel.
        recorder: What records.
        uses: Steps of a size before it is recorded.
    """

    def __init__(self, cache: PagedCache, recorder: Recorder, uses: int = USES) -> None:
        self._cache, self._recorder, self._uses = cache, recorder, uses
        self._counts: dict[int, int] = {}
        self._sizes: dict[int, _Size] = {}
        self._moved = cache.moved
        self.reason = ""
        """Why nothing is recorded any more; empty: it is."""

    @property
    def recorded(self) -> tuple[int, ...]:
        """Numbers of rows for which a step is recorded."""
        return tuple(sorted(self._sizes))

    def run(
        self, step: SingleStep, tokens: Tensor, lengths: Tensor, sequences: Tensor | None
    ) -> Tensor | None:
        """A step by a recording: logits [B, vocab], as `extend` gives them. None: it must run
        without; it is not of one token a row, or not recorded yet.
        """
        if self.reason or tokens.shape[1] != 1 or not bool((lengths == 1).all()):
            return None
        size = 1 << (len(tokens) - 1).bit_length()
        if self._cache.moved != self._moved:
            self._sizes.clear()
            self._moved = self._cache.moved
        if size not in self._sizes:
            self._counts[size] = self._counts.get(size, 0) + 1
            if self._counts[size] <= self._uses:
                return None
        given = self._cache.make_room_for_one(tokens, lengths, sequences)
        if self._cache.moved != self._moved:
            self._sizes.clear()
            self._moved = self._cache.moved
        try:
            found = self._sizes.get(size)
            if found is None:
                found = _Size(self._cache, size)
                found.fill(tokens, given)
                found.record(step, self._recorder)
                self._sizes[size] = found
            else:
                found.fill(tokens, given)
            logits = found.repeat()[: len(tokens)].clone()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.reason = str(error).strip().splitlines()[0] if str(error).strip() else "unknown"
            self._sizes.clear()
            _log.warning(
                "steps of this model are not recorded as CUDA graphs, so small batches are slower: "
                "%s",
                self.reason,
            )
            return None
        self._cache.lengths[given] += 1
        return logits


@final
class _Size:
    """Memory and recording of steps of so many rows; it is the growth of each of them."""

    def __init__(self, cache: PagedCache, rows: int) -> None:
        self._cache, self._rows, self._width = cache, rows, cache.pages_of_all
        # Tokens are on the device already.
        self._host = torch.zeros(self._numbers, dtype=torch.int64)
        device = cache.device_of_keys
        if device.type == "cuda":
            self._host = self._host.pin_memory()
        self._sent: Any = None
        self._device = torch.zeros(self._numbers, dtype=torch.int64, device=device)
        self._narrow = torch.zeros(self._numbers, dtype=torch.int32, device=device)
        self._tokens = torch.zeros((rows, 1), dtype=torch.int64, device=device)
        self.positions = self._part(self._device, 0).view(rows, 1)
        self._into = (self._part(self._device, 1), self._part(self._device, 2))
        self._used = self._part(self._narrow, 3)
        at = 4 * rows
        self._queries = self._narrow[at : at + rows + 1]
        self._keys = self._narrow[at + rows + 1 : at + 2 * (rows + 1)]
        self._table = self._narrow[at + 2 * (rows + 1) :].view(rows, self._width)
        self._replay: Callable[[], None] | None = None
        self._out: Tensor | None = None

    @property
    def _numbers(self) -> int:
        return 4 * self._rows + 2 * (self._rows + 1) + self._rows * self._width

    def _part(self, whole: Tensor, number: int) -> Tensor:
        return whole[number * self._rows : (number + 1) * self._rows]

    def fill(self, tokens: Tensor, sequences: Tensor) -> None:
        """Write the inputs of a step: one copy to the device, which the host does not wait for."""
        if self._sent is not None:
            # The last step has read its numbers: its ids were read after it.
            self._sent.synchronize()
        count, rows, cache = len(tokens), self._rows, self._cache
        starts = cache.lengths[sequences].numpy()
        table = np.zeros((rows, self._width), np.int64)
        table[:count] = cache.table(sequences.tolist(), self._width)
        positions, used = np.zeros(rows, np.int64), np.ones(rows, np.int64)
        positions[:count], used[:count] = starts, starts + 1
        pages = table[np.arange(rows), positions // cache.page]
        bounds = np.arange(rows + 1)
        keys = np.concatenate([[0], np.cumsum(used)])
        numbers: Int64 = np.concatenate(
            [positions, pages, positions % cache.page, used, bounds, keys, table.ravel()]
        )
        self._host.numpy()[:] = numbers
        self._device.copy_(self._host, non_blocking=True)
        if self._device.is_cuda:
            self._sent = torch.cuda.Event()
            self._sent.record()
        self._tokens[:count].copy_(tokens)

    def record(self, step: SingleStep, recorder: Recorder) -> None:
        """Record the step with what was filled in."""

        def run() -> Tensor:
            self._narrow.copy_(self._device)
            return step(self._tokens, self)

        self._replay, self._out = recorder.record(run)

    def repeat(self) -> Tensor:
        """Run the recorded step; logits of all rows, which the next step overwrites."""
        assert self._replay is not None
        assert self._out is not None
        self._replay()
        return self._out

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`LayerAttend` of [rows, 1, heads, dim]."""
        cache = self._cache
        assert cache.kernel is not None
        keys, values = cache.keys[layer.place], cache.values[layer.place]
        keys[self._into], values[self._into] = k[:, 0], v[:, 0]
        longest = self._width * cache.page
        found = attend_pages(
            cache.kernel,
            q[:, 0],
            keys,
            values,
            self._queries,
            self._keys,
            1,
            longest,
            self._used,
            self._table,
            cache.windows[layer.place],
            layer.sinks,
        )
        return found[:, None]


def steps_of(model: Any, cache: object) -> Steps | None:
    """The recorded steps of a cache; None: a cache or a model that has none.

    Sharded weights are gathered by calls that no graph holds, and recurrent layers choose states on
    the host.
    """
    if not isinstance(cache, PagedCache) or cache.kernel is None or cache.recurrent:
        return None
    is_sharded = hasattr(model, "reshard")
    if cache.steps is None and cache.device_of_keys.type == "cuda" and not is_sharded:
        cache.steps = Steps(cache, CudaRecorder(cache.device_of_keys))
    return cache.steps if isinstance(cache.steps, Steps) else None
