"""Published kernels for recurrent layers, with borders of documents: flash-linear-attention,
mamba-ssm, causal-conv1d.

Each function here takes and gives what our own operation of that name does (`operations`), except
that states are None where the package cannot give them. How borders reach the kernels:

- fla: `cu_seqlens`, int64, without empty documents; states before and after the documents. Gated
  DeltaNet (arXiv 2412.06464), KDA (arXiv 2510.26692) and a convolution of any width.
- mamba_ssm: `seq_idx`, int32 [1, T], for Mamba-2's scan (arXiv 2405.21060); it takes and gives no
  states of several documents. Mamba-1's scan knows no borders: documents run side by side, with
  padding behind them that it cannot see.
- causal_conv1d: `seq_idx`, and the row channels-last; 2 to 4 taps, and a multiple of 8 channels.

All need CUDA, and compute in the dtype of the model, at most float32. Decays stay in float32.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.models.recurrent.borders import Borders, document_batches

CHUNK = 128
"""Slots of a chunk in Mamba-2's kernels. Longer ones lose digits of decays, which are differences
of their sums.
"""
STEP_BY_STEP = 64
"""Up to this many slots a document, without gradients: fla's kernel that goes slot by slot, which
needs no chunk.
"""
KINDS = (torch.float32, torch.bfloat16, torch.float16)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package with kernels of recurrent operations."""

    name: str
    """Name by which users choose it, and under which Python imports it."""
    distribution: str
    """Its name on PyPI."""
    cure: str
    """The command that installs it."""
    operations: Mapping[str, Callable[..., Any]]
    """The operations that it provides, by the names of `Operations`."""

    def refusal(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot compute with such tensors, as the end of a sentence that begins with its
        name; None: it can.
        """
        if not is_installed(self.name):
            return f"is not installed: {self.cure}"
        if device.type != "cuda":
            return f"runs on cuda only, not on {device.type}"
        if dtype not in KINDS:
            return (
                "computes in float32, bfloat16 and float16, not in "
                f"{str(dtype).removeprefix('torch.')}"
            )
        return None

    def broken(self) -> str | None:
        """Why it cannot be imported; None: it can. Kernels are compiled against one torch and one
        CUDA.
        """
        try:
            importlib.import_module(self.name)
        except Exception as error:
            return f"cannot be imported ({type(error).__name__}: {error})"
        return None


def is_installed(name: str) -> bool:
    """Whether Python can find a package, which may still fail to import."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        # A module without a specification, such as one made by hand.
        return True


def load(package: str, module: str, name: str, *arguments: str) -> Callable[..., Any]:
    """A function of a package, which must take these arguments.

    Raises:
        ConfigError: The package cannot be imported, or is of a version without them.
    """
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # kernels are compiled against one torch and one CUDA, and raise anything for others  # noqa: E501
        raise ConfigError(
            f"recurrent backend {package!r} cannot be used: {module}.{name} cannot be "
            f"imported ({type(error).__name__}: {error}); install a version of {package} for "
            f"torch {torch.__version__}"
        ) from error
    if missing := _missing(function, arguments):
        raise ConfigError(
            f"recurrent backend {package!r}: {module}.{name} of this version does not take "
            f"{', '.join(missing)}, so it cannot keep documents apart; install a newer "
            f"{package}"
        )
    return function


@functools.cache
def _missing(function: Callable[..., object], arguments: tuple[str, ...]) -> list[str]:
    known = inspect.signature(function).parameters
    return [one for one in arguments if one not in known]


def _fla_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    borders: Borders,
    state: Tensor | None,
    kind: torch.dtype,
) -> tuple[Tensor, Tensor]:
    cu_seqlens, real = borders.filled
    per_channel = log_decay.ndim == 3
    given = {"gk" if per_channel else "g": log_decay.float()[None]}
    if (
        not torch.is_grad_enabled()
        and int(np.diff(borders.cu_seqlens).max(initial=0)) <= STEP_BY_STEP
    ):
        function = load(
            "fla",
            "fla.ops.gated_delta_rule",
            "fused_recurrent_gated_delta_rule",
            *given,
            "cu_seqlens",
            "initial_state",
        )
    elif per_channel:
        function = load("fla", "fla.ops.kda", "chunk_kda", "g", "cu_seqlens", "initial_state")
        given = {"g": given["gk"]}
    else:
        function = load(
            "fla",
            "fla.ops.gated_delta_rule",
            "chunk_gated_delta_rule",
            "g",
            "cu_seqlens",
            "initial_state",
        )
    out, after = function(
        *(x.to(kind).contiguous()[None] for x in (q, k, v)),
        beta=beta.to(kind).contiguous()[None],
        scale=q.shape[2] ** -0.5,
        initial_state=None if state is None else state[real].float().contiguous(),
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        **given,
    )
    before = q.new_zeros(len(borders), *after.shape[1:]) if state is None else state
    return out[0].to(q.dtype), before.index_copy(0, real, after.to(before.dtype))


def _fla_convolution(
    row: Tensor, weight: Tensor, bias: Tensor | None, borders: Borders, kind: torch.dtype
) -> Tensor:
    function = load("fla", "fla.modules.causal_conv1d", "causal_conv1d", "cu_seqlens")
    given = None if bias is None else bias.to(kind).contiguous()
    out, _ = function(
        row.to(kind).contiguous()[None],
        weight.to(kind).contiguous(),
        given,
        cu_seqlens=borders.filled[0],
    )
    return _first(out).to(row.dtype)


def _state_space(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, borders: Borders, kind: torch.dtype
) -> Tensor:
    function = load(
        "mamba_ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", "seq_idx"
    )
    values, keys, queries = (one.to(kind).contiguous()[None] for one in (x, b, c))
    out = function(
        values,
        dt.float().contiguous()[None],
        a.float(),
        keys,
        queries,
        CHUNK,
        seq_idx=borders.numbers,
    )
    return _first(out).to(x.dtype)


def _selective(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, borders: Borders, _: torch.dtype
) -> Tensor:
    function = load("mamba_ssm", "mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")
    if torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled():
        raise ConfigError(
            "recurrent backend 'mamba_ssm': the gradients of selective_scan are summed in no "
            "fixed order; set training.deterministic: false, or leave the backend out"
        )
    inputs = [torch.cat([one, one.new_zeros(1, one.shape[1])]) for one in (u, dt, b, c)]
    parts, places = [], []
    for slots, inside in document_batches(borders.cu_seqlens[:-1], borders.cu_seqlens[1:], len(u)):
        index, kept = borders.place(slots), borders.place(inside)
        # [documents, slots, …] → [documents, …, slots]. Steps have the dtype of values here; half
        # would be too little.
        values, steps, keys, queries = (
            one[index].transpose(1, 2).float().contiguous() for one in inputs
        )
        out = function(values, steps, a.float().contiguous(), keys, queries)
        parts.append(out.transpose(1, 2)[kept])
        places.append(index[kept])
    return torch.cat(parts)[torch.argsort(torch.cat(places))].to(u.dtype)


def _convolution(
    row: Tensor, weight: Tensor, bias: Tensor | None, borders: Borders, kind: torch.dtype
) -> Tensor:
    channels, taps = weight.shape
    if not 2 <= taps <= 4 or channels % 8:
        raise ConfigError(
            "recurrent backend 'causal_conv1d' has convolutions of 2 to 4 taps over a "
            f"multiple of 8 channels; this one has {taps} over {channels}; take 'fla' or "
            "'torch'"
        )
    function = load("causal_conv1d", "causal_conv1d", "causal_conv1d_fn", "seq_idx")
    # [1, channels, T] with channels side by side in memory, which is the only layout that takes
    # `seq_idx`.
    channels_last = row.to(kind).contiguous().T[None]
    given = None if bias is None else bias.to(kind).contiguous()
    out: Tensor = function(
        channels_last, weight.to(kind).contiguous(), given, seq_idx=borders.numbers
    )
    return out[0].T.to(row.dtype)


def _first(out: Any) -> Tensor:
    found: Tensor = out[0]
    return found


PACKAGES = {
    package.name: package
    for package in (
        Package(
            name="fla",
            distribution="flash-linear-attention",
            cure="pip install flash-linear-attention",
            operations={
                "gated_delta_rule": _fla_delta_rule,
                "kimi_delta_rule": _fla_delta_rule,
                "causal_convolution": _fla_convolution,
            },
        ),
        Package(
            name="mamba_ssm",
            distribution="mamba-ssm",
            cure="pip install mamba-ssm --no-build-isolation",
            operations={"state_space_scan": _state_space, "selective_scan": _selective},
        ),
        Package(
            name="causal_conv1d",
            distribution="causal-conv1d",
            cure="pip install causal-conv1d --no-build-isolation",
            operations={"causal_convolution": _convolution},
        ),
    )
}
"""All packages by name."""
