"""FlashAttention over all documents of a row in one call: torch's `varlen_attn`, which since 2.10
is in torch.

All windows are one function with another `window_size`, so a compiled block has one graph for each
window, whatever the row. Sinks take a call of the operation below it, whose backward pass they
need (see `sinks`).

torch can replace its FlashAttention 2 by version 3, which is made for H100s (torch 2.11 and later).
It is switched on where its package (`flash_attn_interface`) is installed; a choice that was made
before, such as version 4, stays.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, final

import torch
from torch import Tensor

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError
from penstock.models.attention.compiling import any_number
from penstock.models.attention.sinks import add_sinks, sink_gradients
from penstock.plan.inputs.torch_tensors import on_device

FLASH3 = "flash_attn_interface"
"""The module of FlashAttention 3."""


def find_varlen() -> Callable[..., Any] | None:
    """torch's function; None: this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def causal_settings(function: Callable[..., object]) -> dict[str, object]:
    """The keyword arguments for causal attention in this version of `varlen_attn`.

    Raises:
        ConfigError: It has neither of the known arguments.
    """
    known = inspect.signature(function).parameters
    if "window_size" in known:
        return {"window_size": (-1, 0)}
    if "is_causal" in known:
        return {"is_causal": True}
    raise ConfigError(
        f"varlen_attn of torch {torch.__version__} has neither window_size nor is_causal "
        f"({', '.join(known)}), which the attention backend 'varlen' needs for causal "
        "attention; take 'flex' or 'per_document'"
    )


def window_settings(function: Callable[..., object], window: int | None) -> dict[str, object]:
    """The keyword arguments for causal attention within a window; None: without.

    Raises:
        ConfigError: As `causal_settings`.
    """
    settings = causal_settings(function)
    return settings if window is None else {"window_size": (window - 1, 0)}


@final
@dataclass(frozen=True, slots=True)
class Bounds:
    """Where documents, or runs, begin and end."""

    queries: Tensor
    """int32 [n + 1] on the device, from 0 to the number of queries."""
    keys: Tensor
    """int32 [n + 1], that of keys; causal attention is aligned at the ends."""
    longest_queries: int
    longest_keys: int

    @classmethod
    def of(cls, queries: Array, keys: Array, device: torch.device) -> "Bounds":
        """Of cumulative lengths on the CPU; a GPU gets them without being waited for."""
        made = any_number(on_device(queries, device))
        longest = [int((bounds[1:] - bounds[:-1]).max()) for bounds in (queries, keys)]
        same = keys is queries
        return cls(made, made if same else any_number(on_device(keys, device)), *longest)


def prepare_varlen(
    function: Callable[..., Any], bounds: Bounds, window: int | None
) -> Callable[..., Tensor]:
    """Attention of q [t, heads, dim] to k and v [T, kv_heads, dim] between bounds, by torch's
    `varlen_attn`.
    """
    settings = window_settings(function, window)
    knows_groups = "enable_gqa" in inspect.signature(function).parameters
    left = -1 if window is None else window - 1

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and not knows_groups:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        given = (bounds.queries, bounds.keys, bounds.longest_queries, bounds.longest_keys)
        if sinks is not None:
            with_sinks: Tensor = attend_with_sinks(q, k, v, sinks, *given, left)[0]
            return with_sinks
        grouping = {"enable_gqa": True} if groups > 1 and knows_groups else {}
        out: Tensor = function(q, k, v, *given, **settings, **grouping)
        return out

    return attend


@torch.library.custom_op("penstock::attend_with_sinks", mutates_args=())
def attend_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    queries: Tensor,
    keys: Tensor,
    longest_queries: int,
    longest_keys: int,
    left: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention between bounds with sinks.

    Args:
        q: [t, heads, dim].
        k: [T, kv_heads, dim].
        v: As `k`.
        sinks: [heads].
        queries: int32 [n + 1].
        keys: int32 [n + 1].
        longest_queries: Of a run.
        longest_keys: Of a run.
        left: How many keys before its own a query sees; −1: all.

    Returns:
        [t, heads, dim]; log-sum-exps [heads, t]; the state that the kernel's backward pass wants.
    """
    operation = _operation("_varlen_attn", "enable_gqa")
    bounds = (queries, keys, longest_queries, longest_keys)
    grouped = q.shape[1] != k.shape[1]
    found, sums, state = operation(
        q, k, v, *bounds, left == -1, None, [left, 0], enable_gqa=grouped
    )
    out, joined = add_sinks(found, sums, sinks)
    return out, joined, state


@torch.library.custom_op("penstock::attend_with_sinks_backward", mutates_args=())
def attend_with_sinks_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    state: Tensor,
    queries: Tensor,
    keys: Tensor,
    longest_queries: int,
    longest_keys: int,
    left: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: the kernel's own backward pass, given outputs and sums with
    sinks.
    """
    operation = _operation("_varlen_attn_backward", "window_size")
    of_q, of_k, of_v = operation(
        gradient.contiguous(),
        q,
        k,
        v,
        out,
        sums,
        queries,
        keys,
        longest_queries,
        longest_keys,
        left == -1,
        state,
        None,
        [left, 0],
    )
    return of_q, of_k, of_v


@attend_with_sinks.register_fake
def _(q, k, v, sinks, queries, keys, longest_queries, longest_keys, left):  # type: ignore[no-untyped-def]
    sums = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    return torch.empty_like(q), sums, torch.empty(2, dtype=torch.uint64, device=q.device)


@attend_with_sinks_backward.register_fake
def _(gradient, q, k, v, *rest):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x) for x in (q, k, v))


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, sinks, queries, keys, *ctx.sizes = inputs
    ctx.save_for_backward(q, k, v, *output, queries, keys, sinks)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, gradient, *_):  # type: ignore[no-untyped-def]
    *given, sinks = ctx.saved_tensors
    found = attend_with_sinks_backward(gradient, *given, *ctx.sizes)
    of_sinks = sink_gradients(gradient, given[3], given[4], sinks)
    return *found, of_sinks, *[None] * 5


attend_with_sinks.register_autograd(_backward, setup_context=_remember)


def _operation(name: str, argument: str) -> Any:
    """torch's own operation below `varlen_attn`.

    Raises:
        ConfigError: This torch's has other arguments.
    """
    find_varlen()
    found = getattr(torch.ops.torch_attn, name).default
    if argument not in [each.name for each in found._schema.arguments]:
        raise ConfigError(
            f"attention backend 'varlen' has no sinks with torch {torch.__version__}, whose "
            f"{name} has no {argument}; take 'flex', or torch 2.13"
        )
    return found


@cache
def flash_name(device_type: str) -> str:
    """The FlashAttention that `varlen` runs on a device, after switching to version 3 where it is
    installed: "FlashAttention 3", or 2; empty: none.

    The switch holds for the whole process, until someone makes another.
    """
    if device_type != "cuda" or not torch.cuda.is_available():
        return ""
    from torch.nn import attention

    active = getattr(attention, "current_flash_attention_impl", lambda: None)()
    switch = getattr(attention, "activate_flash_attention_impl", None)
    # Version 3 is for H100s, whose major version is 9.
    fits = torch.cuda.get_device_capability()[0] == 9 and find_spec(FLASH3) is not None
    if active is None and switch is not None and fits:
        switch("FA3")
        active = "FA3"
    return f"FlashAttention {(active or 'FA2').removeprefix('FA')}"
