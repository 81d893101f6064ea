"""A device that is not there: which tensors would be on it, what is copied to it, and what the host
reads of it.

On the CPU nothing waits. So tensors are marked: what is sent to the device is on it, and all that
is computed from what is on it. Each call of a marked tensor that would make a host wait is kept.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from penstock.learn.generation import choosing, engine, sampling
from penstock.models import cache as cache_module
from penstock.models import new_tokens, paged_cache, static_steps, text_cache
from penstock.plan.inputs import torch_tensors

READS = {
    "item", "tolist", "nonzero", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__",
    "masked_select", "is_nonzero", "unique", "equal", "allclose",
}  # fmt: skip
MODULES = [
    choosing, engine, sampling, new_tokens, text_cache, cache_module, paged_cache, static_steps,
]  # fmt: skip


@final
class Pretended(TorchFunctionMode):
    """While it is on, `reads` and `copies` grow: places in the package, with what they call."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self._there: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self.reads: list[str] = []
        self.copies: list[str] = []
        self.blocking: list[str] = []
        for model in models:
            for x in [*model.parameters(), *model.buffers()]:
                self.mark(x)

    def mark(self, x: Tensor) -> Tensor:
        """Put a tensor on the device."""
        self._there[id(x)] = x
        return x

    def has(self, x: object) -> bool:
        """Whether it is there."""
        return isinstance(x, Tensor) and self._there.get(id(x)) is x

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        name = getattr(function, "__name__", str(function))
        tensors = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor)]
        there = any(self.has(x) for x in tensors)
        if there and name in READS:
            self.reads.append(f"{name} in {_place()}")
        if name in ("__getitem__", "__setitem__") and self.has(args[0]):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            for place in places:
                if isinstance(place, Tensor) and place.dtype == torch.bool:
                    self.reads.append(f"a mask as an index in {_place()}")
                if isinstance(place, list) or (
                    isinstance(place, Tensor) and place.ndim and not self.has(place)
                ):
                    self.blocking.append(f"an index of the host in {_place()}")
        elif there and any(x.ndim and not self.has(x) for x in tensors):
            self.blocking.append(f"{name} of both sides in {_place()}")
        made = given.get("device") is not None
        if made and name in ("tensor", "as_tensor"):
            self.blocking.append(f"{name} in {_place()}")
        out = function(*args, **given)
        if (there and name not in READS) or made:
            for x in tree_leaves(out):
                if isinstance(x, Tensor):
                    self.mark(x)
        return out


def _place() -> str:
    own = [x for x in traceback.extract_stack() if "/src/penstock/" in x.filename]
    return f"{own[-1].filename.split('/penstock/')[-1]}:{own[-1].lineno}" if own else "a test"


@contextmanager
def pretended(monkeypatch: Any, *models: nn.Module) -> Iterator[Pretended]:
    """Within the block, what is sent by the package's own functions is on the device."""
    mode = Pretended(*models)

    def send(x: Any, _: torch.device) -> Tensor:
        x = x if isinstance(x, Tensor) else torch.from_numpy(x)
        with torch._C.DisableTorchFunction():
            x = x.clone()
        mode.copies.append(_place())
        return mode.mark(x)

    class Other:
        type = "pretended"

    def together(parts: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        found: dict[str, Tensor] = plain(parts, Other())
        return found

    plain = torch_tensors.together_on_device
    with monkeypatch.context() as patch:
        patch.setattr(torch_tensors, "on_device", send)
        # On the CPU NumPy sorts.
        patch.setattr(sampling, "_descending", lambda x: x.sort(-1, descending=True).values)
        for module in MODULES:
            for name, function in (("on_device", send), ("together_on_device", together)):
                if hasattr(module, name):
                    patch.setattr(module, name, function)
        with mode:
            yield mode
