"""Paged caches on the CPU, and a recorder of steps that finds what a CUDA graph could not hold."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from makers.pretended_device import Pretended
from penstock.models.paged_cache import PagedCache
from penstock.models.static_steps import Graph


@final
class PlainGraph:
    """A step that is replayed by calling it: from and to the same memory, without the host."""

    def __init__(self) -> None:
        self._run: Callable[[], Tensor] | None = None
        self.replays = 0

    def record(self, run: Callable[[], Tensor]) -> Tensor:
        self._run, self._out = run, run()
        self._operations = self._called()[1]
        return self._out

    def replay(self) -> None:
        self.replays += 1
        found, operations = self._called()
        assert found.shape == self._out.shape
        assert operations == self._operations, "another step than the recorded one"
        self._out.copy_(found)

    def _called(self) -> tuple[Tensor, list[Any]]:
        """The result, and each operation with the shapes that it gets; the host must not look."""
        assert self._run is not None
        found: list[Any] = []

        class Watch(Pretended):
            def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
                for x in tensors:
                    self.mark(x)
                found.append((str(function), [tuple(x.shape) for x in tensors]))
                return super().__torch_function__(function, types, args, kwargs)

        with Watch() as watch:
            out = self._run()
        waits = watch.reads + watch.copies + watch.blocking
        assert not waits, f"a recorded step reads or waits: {waits}"
        return out, found


def paged(
    model: Any,
    sequences: int,
    capacity: int,
    *,
    page: int = 4,
    most: int | None = None,
    make_graph: Callable[[], Graph] | None = None,
) -> PagedCache:
    """A paged cache with the shape of a model's own."""
    like = model.new_cache(1, 1)
    layers, _, kv_heads, _, head_width = like._keys.shape
    return PagedCache(
        layers=layers if like._windows else 0,
        sequences=sequences,
        capacity=capacity,
        kv_heads=kv_heads,
        head_width=head_width,
        device=torch.device("cpu"),
        dtype=like._dtype,
        windows=like._windows,
        softcap=like._softcap,
        recurrent=like._recurrent,
        page=page,
        most=most,
        make_graph=make_graph,
    )
