"""Models whose parameters take no memory yet (torch's meta device), while buffers are computed.

Buffers (frequencies of rotary embeddings, the scale of an embedding) are not stored with the
weights, so nothing could fill them later; they are small.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters of modules that this thread makes in the block are moved to the meta device, each
    as soon as it is made: at most one has memory, and it is not written to.
    """
    thread = threading.get_ident()

    def moved(_: nn.Module, __: str, weight: nn.Parameter | None) -> Any:
        if weight is None or weight.is_meta or threading.get_ident() != thread:
            return None
        return nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)

    hook = register_module_parameter_registration_hook(moved)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def all_on_meta(module: nn.Module) -> Iterator[None]:
    """Buffers too are on the meta device in the block, so that the module runs there; afterwards
    they are as before.
    """
    before: list[tuple[nn.Module, str, Tensor]] = []
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            before.append((part, name, buffer))
            part._buffers[name] = buffer.to("meta")
    try:
        yield
    finally:
        for part, name, buffer in before:
            part._buffers[name] = buffer
