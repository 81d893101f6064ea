"""Puts the borders of documents into transformers' recurrent layers and masks.

Models of transformers call their recurrences, convolutions and mask makers by name in their own
modules. Functions of the same names stand in front of them. While a row of documents runs
(`bordered`), the recurrent ones compute with our operations, which stop at borders, and the mask
makers get the positions that some models do not pass on. At all other times they call what was
there before, so models that are used in other ways do not change.

Replaced are `causal_conv1d_fn`, `torch_chunk_gated_delta_rule`, `chunk_kimi_delta_attention`,
`mamba2_chunk_scan` and `mamba_selective_scan`; the fused short cuts of Mamba return None, so that
its layers take the path through these.
"""

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from penstock.models.attention.compiling import outside_graphs
from penstock.models.recurrent import Borders
from penstock.models.recurrent.operations import TORCH, Operations
from penstock.models.recurrent.packages import PACKAGES, is_installed
from penstock.models.theirs.attention import with_our_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("penstock.models")
_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")


@final
class _Row:
    """The row that runs now, and which replaced functions it has called."""

    def __init__(self, inner: object, borders: Borders, ours: bool, operations: Operations) -> None:
        self.inner, self.borders, self.ours, self.operations = inner, borders, ours, operations
        self.called: set[str] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Calls of the model within the block are for this row."""
        token = _ROW.set(self)
        try:
            with with_our_attention(self.inner) if self.ours else nullcontext():
                yield
        finally:
            _ROW.reset(token)


_ROW: ContextVar[_Row | None] = ContextVar("penstock_row_borders", default=None)


@contextmanager
def bordered(
    inner: object, borders: Borders, *, ours: bool = False, operations: Operations = TORCH
) -> Iterator[set[str]]:
    """Within the block, calls of a model on one row keep its documents apart.

    Gradient checkpoints of the model run their layers again with the same borders, in whatever
    thread.

    Args:
        inner: A model of transformers.
        borders: The documents of the row.
        ours: Whether layers that attend use our attention; the call then gives `penstock_attend`.
        operations: What computes the recurrent ones.

    Returns:
        The names of the functions that were replaced and called; filled while the model runs.
    """
    replace_functions(inner)
    row = _Row(inner, borders, ours, operations)
    if _has_checkpoints(inner):
        _keep_in_checkpoints(inner)
    with row.running():
        yield row.called


def running_row() -> Callable[[], AbstractContextManager[None]] | None:
    """What puts the row that runs now back in place, for what is computed again; None: no row."""
    row = _ROW.get()
    return None if row is None else row.running


def is_recurrence(name: str) -> bool:
    """Whether a replaced function is a recurrence or a convolution, not a maker of masks."""
    return name not in _MASKS


def _has_checkpoints(inner: object) -> bool:
    found = getattr(inner, "is_activation_checkpointing", None)
    # Its name before transformers 5.
    return bool(getattr(inner, "is_gradient_checkpointing", False) if found is None else found)


def _keep_in_checkpoints(inner: "PreTrainedModel") -> None:
    """Give the layers that are computed again in the backward pass the borders of their first
    pass.
    """
    for module in inner.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None and not isinstance(checkpoint, _Checkpoint):
            module._gradient_checkpointing_func = _Checkpoint(checkpoint)


@final
class _Checkpoint:
    """transformers' checkpoint function, with the row of its call in both passes."""

    def __init__(self, checkpoint: Callable[..., object]) -> None:
        self._checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: object, **given: object) -> Any:
        row = _ROW.get()

        def again(*args: object, **given: object) -> object:
            with row.running() if row else nullcontext():
                return function(*args, **given)

        return self._checkpoint(again, *args, **given)


def replace_functions(inner: "PreTrainedModel") -> None:
    """Put ours in front of the named functions in the modules of a model's classes; once for each
    module.
    """
    for name in {type(module).__module__ for module in inner.modules()}:
        if not name.startswith("torch.") and name in sys.modules:
            _replace_in(sys.modules[name])


def _replace_in(python: object) -> None:
    for name, theirs in list(vars(python).items()):
        ours, own = _OURS.get(name), _own_code(theirs)
        if (ours is None and own is None) or not callable(theirs) or hasattr(theirs, "penstock"):
            continue
        if own is not None:
            theirs = _on_any_device(name, theirs, own)
        setattr(python, name, theirs if ours is None else _in_front(name, theirs, ours))


def _own_code(found: object) -> Callable[..., Any] | None:
    """transformers' code in torch, where it took the function of a package instead; None: it did
    not.
    """
    if not inspect.isfunction(found) or "is_new_implementation" not in found.__code__.co_freevars:
        return None
    place = found.__code__.co_freevars.index("is_new_implementation")
    taken = found.__closure__[place].cell_contents if found.__closure__ else False
    return getattr(found, "__wrapped__", None) if taken else None


def _on_any_device(
    name: str, theirs: Callable[..., object], own: Callable[..., object]
) -> Callable[..., object]:
    """A function of a package that needs CUDA, with transformers' own code for tensors on the
    CPU.
    """
    known = inspect.signature(own).parameters

    @functools.wraps(own)
    def function(*args: object, **given: object) -> object:
        on = next(
            (one.device.type for one in (*args, *given.values()) if isinstance(one, Tensor)), "cpu"
        )
        if on != "cpu":
            return theirs(*args, **given)
        if given.get("cu_seqlens") is not None or given.get("seq_idx") is not None:
            raise ValueError(
                f"{name}: transformers' own code in torch cannot keep documents of a row apart"
            )
        _tell_once()
        return own(*args, **{key: value for key, value in given.items() if key in known})

    function.penstock = True  # type: ignore[attr-defined]
    return function


@functools.cache
def _tell_once() -> None:
    _log.info(
        "%s: installed, but needs CUDA; on the CPU, models of transformers run its own code "
        "in torch instead",
        ", ".join(name for name in PACKAGES if is_installed(name)),
    )


def _in_front(
    name: str, theirs: Callable[..., object], ours: Callable[..., object]
) -> Callable[..., object]:
    """A function of the same signature that calls ours for a row with borders, else theirs."""
    signature = inspect.signature(theirs)

    def now(*args: object, **given: object) -> object:
        row = _ROW.get()
        if row is None:
            return theirs(*args, **given)
        bound = signature.bind(*args, **given)
        bound.apply_defaults()
        rest = bound.arguments.pop("kwargs", {})
        answer = ours(row, {**rest, **bound.arguments})
        if answer is NotImplemented:
            return theirs(*args, **given)
        row.called.add(name)
        return answer(theirs, args, given) if callable(answer) else answer

    held = [now]

    @functools.wraps(theirs)
    def function(*args: object, **given: object) -> object:
        return held[0](*args, **given)

    function.penstock = held  # type: ignore[attr-defined]
    return function


def leave_out_of_graphs(inner: "PreTrainedModel") -> None:
    """Let compiled code call the replaced functions as they are: they cut documents into chunks,
    which differ from row to row. For blocks that are compiled already.
    """
    for name in {type(module).__module__ for module in inner.modules()}:
        for function in list(vars(sys.modules[name]).values()):
            held = getattr(function, "penstock", None)
            if isinstance(held, list) and not hasattr(held[0], "_torchdynamo_disable"):
                held[0] = outside_graphs(held[0])


def _of_row(borders: Borders, values: Tensor, slots: int) -> bool:
    """Whether an argument [1, …] holds all slots of the row."""
    return values.shape[0] == 1 and slots == int(borders.cu_seqlens[-1])


def _precise(values: Tensor) -> Tensor:
    """[1, T, …] → [T, …], in float32 or wider: states lose much in half precision."""
    return values[0].to(torch.promote_types(values.dtype, torch.float32))


def _convolution(row: _Row, given: dict[str, Any]) -> object:
    states, weight, activation = given["hidden_states"], given["weight"], given["activation"]
    if not _of_row(row.borders, states, states.shape[2]) or activation not in (
        None,
        "silu",
        "swish",
    ):
        return NotImplemented
    out = row.operations.causal_convolution(
        states[0].T.to(weight.dtype), weight, given["bias"], row.borders
    )
    return (silu(out) if activation else out).T[None].to(states.dtype)


def _delta_rule(row: _Row, given: dict[str, Any]) -> object:
    query = given["query"]
    if given.get("initial_state") is not None or not _of_row(row.borders, query, query.shape[1]):
        return NotImplemented
    q, k, v, decay, beta = (
        _precise(x) for x in (query, given["key"], given["value"], given["g"], given["beta"])
    )
    if given.get("use_qk_l2norm_in_kernel"):
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    each = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(each, 1), k.repeat_interleave(each, 1)
    keeps = bool(given.get("output_final_state"))
    out, state = row.operations.gated_delta_rule(q, k, v, decay, beta, row.borders, keeps=keeps)
    return out[None].to(query.dtype), state if given.get("output_final_state") else None


def _state_space(row: _Row, given: dict[str, Any]) -> object:
    states = given["hidden_states"]
    if given.get("initial_states") is not None or not _of_row(row.borders, states, states.shape[1]):
        return NotImplemented
    x, dt, b, c = (_precise(one) for one in (states, given["dt"], given["B"], given["C"]))
    dt = _step_sizes(dt, given.get("dt_bias"), given.get("dt_softplus"))
    dt = dt.clamp(*given.get("dt_limit", (0.0, float("inf"))))
    keeps = bool(given.get("return_final_states"))
    out, state = row.operations.state_space_scan(
        x, dt, given["A"].to(x.dtype), b, c, row.borders, keeps=keeps
    )
    if given.get("D") is not None:
        out = out + given["D"][:, None] * x
    if given.get("z") is not None:
        out = out * silu(_precise(given["z"]))
    out = out[None].to(states.dtype)
    return (out, state) if keeps else out


def _selective_scan(row: _Row, given: dict[str, Any]) -> object:
    states = given["hidden_states"]
    if not _of_row(row.borders, states, states.shape[2]):
        return NotImplemented
    # [1, channels, T] → [T, channels]
    u, dt, b, c = (
        _precise(x.transpose(1, 2)) for x in (states, given["dt"], given["B"], given["C"])
    )
    dt = _step_sizes(dt, given.get("delta_bias"), given.get("delta_softplus"))
    keeps = bool(given.get("return_last_state"))
    out, state = row.operations.selective_scan(
        u, dt, given["A"].to(u.dtype), b, c, row.borders, keeps=keeps
    )
    if given.get("D") is not None:
        out = out + u * given["D"]
    if given.get("z") is not None:
        out = out * silu(_precise(given["z"].transpose(1, 2)))
    out = out.T[None].to(states.dtype)
    return (out, state) if keeps else out


def _step_sizes(dt: Tensor, bias: Tensor | None, positive: bool | None) -> Tensor:
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return softplus(dt) if positive else dt


def _no_short_cut(row: _Row, given: dict[str, object]) -> object:
    """None is what these functions return where they cannot run; the layer then calls the others
    one by one.
    """
    return lambda *_: None


def _mask(row: _Row, given: dict[str, Any]) -> object:
    """Masks are made by transformers, which keeps documents apart if it knows their positions."""
    states = given.get("inputs_embeds")
    if (
        given.get("position_ids") is not None
        or given.get("attention_mask") is not None
        or states is None
    ):
        return NotImplemented
    if not _of_row(row.borders, states, states.shape[1]):
        return NotImplemented
    positions = row.borders.positions[None]
    return lambda theirs, args, old: theirs(*args, **{**old, "position_ids": positions})


_OURS: dict[str, Callable[[_Row, dict[str, Any]], Any]] = {
    **dict.fromkeys(_MASKS, _mask),
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _selective_scan,
    "mamba2_split_conv1d_scan_combined": _no_short_cut,
    "mamba_inner_fn": _no_short_cut,
}
