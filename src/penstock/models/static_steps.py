"""Decoding steps of fixed shapes, recorded once and replayed: on a GPU, launching the kernels of a
small step takes longer than running them.

A step of few sequences is padded to 1, 2, 4, 8, … rows, and reads all that changes from one buffer,
whose address stays. After a few runs it is recorded as a CUDA graph, which replays all kernels in
one call. A step that cannot be recorded runs as before, which is said once, with the reason.
"""

import logging
import os
from collections.abc import Callable, Hashable
from typing import Any, Protocol, final

import torch
from torch import Tensor

from penstock.plan.inputs.torch_tensors import on_device

WARM = 3
"""Runs of a shape before it is recorded: what is made at first use is there, and rare shapes take
no memory.
"""
VARIABLE = "PENSTOCK_CUDA_GRAPHS"
"""Variable of the environment; 0: steps are not recorded."""
_log = logging.getLogger("penstock.models")


def no_graphs() -> bool:
    """Whether the environment forbids graphs, such as to compare or to find a fault."""
    return os.environ.get(VARIABLE, "") == "0"


class Graph(Protocol):
    """A recorded step."""

    def record(self, run: Callable[[], Tensor]) -> Tensor:
        """Record what a function does, without doing it; its result will be where this one is."""

    def replay(self) -> None:
        """Do what was recorded, on what is in its inputs now."""


@final
class CudaGraph:
    """A CUDA graph; those of one process share the memory between their kernels."""

    _pool: Any = None

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def record(self, run: Callable[[], Tensor]) -> Tensor:
        """See `Graph`."""
        if CudaGraph._pool is None:
            CudaGraph._pool = torch.cuda.graph_pool_handle()
        # Libraries choose their memory by the stream, so the stream of the recording is tried out.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        # Other threads, such as a loader's, go on copying.
        with torch.cuda.graph(
            self._graph, pool=CudaGraph._pool, stream=stream, capture_error_mode="thread_local"
        ):
            return run()

    def replay(self) -> None:
        """See `Graph`."""
        self._graph.replay()


@final
class _Shape:
    """A step of one shape: its inputs, and once it is recorded, its graph and output."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs, self.runs = inputs, 0
        self.graph: Graph | None = None
        self.out: Tensor | None = None


@final
class StaticSteps:
    """The steps of one cache and model.

    Attributes:
        reason: Why steps are not recorded any more; empty: they are.
    """

    def __init__(self, make: Callable[[], Graph], device: torch.device) -> None:
        self._make, self._device = make, device
        self._shapes: dict[Hashable, _Shape] = {}
        self.reason = ""

    def forget(self) -> None:
        """Forget all graphs: memory that they read is no longer there."""
        self._shapes.clear()

    def run(self, shape: Hashable, inputs: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Run a step.

        Args:
            shape: What determines all shapes.
            inputs: int32 [n] on the host; all that changes from step to step.
            function: The step; its result has the same shape each time.

        Returns:
            Its result; the next step of the shape overwrites it.
        """
        held = self._shapes.get(shape)
        if held is None:
            # Also written outside of inference mode.
            with torch.inference_mode(False):
                held = _Shape(torch.empty(inputs.shape, dtype=inputs.dtype, device=self._device))
            self._shapes[shape] = held
        held.inputs.copy_(_pinned(inputs, self._device), non_blocking=True)
        held.runs += 1
        if held.graph is None and held.runs > WARM and not self.reason:
            self._record(held, function)
        if held.graph is None or held.out is None:
            return function(held.inputs)
        held.graph.replay()
        return held.out

    def _record(self, held: _Shape, function: Callable[[Tensor], Tensor]) -> None:
        graph = self._make()
        try:
            held.out = graph.record(lambda: function(held.inputs))
        except Exception as error:
            self.reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            _log.warning(
                "decoding runs without CUDA graphs, which is slower for few sequences: a step "
                "cannot be recorded (%s)",
                self.reason,
            )
            return
        held.graph = graph


def _pinned(inputs: Tensor, device: torch.device) -> Tensor:
    return inputs.pin_memory() if device.type == "cuda" else on_device(inputs, device)
