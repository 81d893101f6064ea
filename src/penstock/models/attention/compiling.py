"""What torch's compiler must know of a row, said without importing it: that takes seconds, which
only a run that compiles should wait.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor


def any_number(x: Tensor) -> Tensor:
    """The same; the length of its first dimension differs from row to row, so no graph is made for
    one of them.
    """
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.maybe_mark_dynamic(x, 0)
    return x


def uncompiled() -> AbstractContextManager[object]:
    """Within the block, what is compiled runs as if it were not.

    Trials, evaluations and generation have other lengths than training, and no gradients: each
    would take some of the few graphs that a block may have.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    found: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return found


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a module that does something else in each row or layer: compiled code calls it
    as it is, between two graphs.
    """
    return _outside(function) if "torch._dynamo" in sys.modules else function


@cache
def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    # The same object each time, or compiled code would be made again for each.
    found: Callable[..., Any] = sys.modules["torch._dynamo"].disable(function)
    return found
