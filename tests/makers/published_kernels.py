"""Stand-ins for fla 0.6, mamba-ssm 2.3 and causal-conv1d 1.7: their signatures, their demands, slow
arithmetic.

Each demands of its arguments what the published function demands on a GPU, records them, and
computes token by token.
"""

import sys
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from makers.recurrences import by_document, slow_convolution, slow_delta_rule, slow_state_space
from penstock.models.recurrent.packages import Package

CALLS: list[tuple[str, dict[str, Any]]] = []
"""(function, its arguments), in order."""


def install(
    monkeypatch: pytest.MonkeyPatch, anywhere: bool = True
) -> list[tuple[str, dict[str, Any]]]:
    """Put the stand-ins into `sys.modules`; with `anywhere`, the backends also compute on the
    CPU.
    """
    functions = {
        "fla.ops.gated_delta_rule": (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule),
        "fla.ops.kda": (chunk_kda,),
        "fla.modules.causal_conv1d": (causal_conv1d,),
        "mamba_ssm.ops.triton.ssd_combined": (mamba_chunk_scan_combined,),
        "mamba_ssm.ops.selective_scan_interface": (selective_scan_fn,),
        "mamba_ssm.ops.triton.selective_state_update": (selective_state_update,),
        "causal_conv1d": (causal_conv1d_fn, causal_conv1d_update),
    }
    for module in functions:
        for name in accumulate(module.split("."), "{}.{}".format):
            made = ModuleType(name)
            made.__path__ = []
            monkeypatch.setitem(sys.modules, name, made)
    for module, members in functions.items():
        for member in members:
            setattr(sys.modules[module], member.__name__, member)
    if anywhere:
        monkeypatch.setattr(Package, "refusal", lambda self, device, dtype: None)
    CALLS.clear()
    return CALLS


def _keep(name: str, **given: Any) -> None:
    CALLS.append((name, given))


def _lengths(cu_seqlens: Tensor, total: int) -> list[int]:
    assert cu_seqlens.dtype == torch.int64
    assert cu_seqlens.ndim == 1
    assert cu_seqlens[0] == 0
    assert cu_seqlens[-1] == total
    return cu_seqlens.diff().tolist()


def _numbered(seq_idx: Tensor, total: int) -> list[int]:
    assert seq_idx.dtype == torch.int32
    assert seq_idx.shape == (1, total)
    assert seq_idx.is_contiguous()
    return torch.unique_consecutive(seq_idx, return_counts=True)[1].tolist()


def _delta(q, k, v, decay, beta, scale, state, lengths):
    assert q.shape == k.shape
    assert q.shape[0] == 1
    assert scale == q.shape[-1] ** -0.5
    assert decay.dtype == torch.float32
    assert q.dtype == k.dtype == v.dtype == beta.dtype
    assert state is None or (state.dtype == torch.float32 and len(state) == len(lengths))
    if state is None:
        state = torch.zeros(len(lengths), q.shape[2], q.shape[3], v.shape[3])
    wide = [x[0].float() for x in (q, k, v, decay, beta)]
    out, after = by_document(slow_delta_rule, wide, lengths, state)
    return out.to(q.dtype)[None], after


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    cp_context=None,
    **kwargs,
):
    _keep("chunk_gated_delta_rule", q=q, g=g, initial_state=initial_state, cu_seqlens=cu_seqlens)
    assert g.ndim == 3
    return _delta(q, k, v, g, beta, scale, initial_state, _lengths(cu_seqlens, q.shape[1]))


def fused_recurrent_gated_delta_rule(
    q,
    k,
    v,
    g=None,
    gk=None,
    gv=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
    **kwargs,
):
    _keep(
        "fused_recurrent_gated_delta_rule",
        q=q,
        g=g,
        gk=gk,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )
    assert not torch.is_grad_enabled(), "it has no backward pass"
    decay = g if gk is None else gk
    return _delta(q, k, v, decay, beta, scale, initial_state, _lengths(cu_seqlens, q.shape[1]))


def chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    safe_gate=False,
    lower_bound=None,
    disable_recompute=False,
    return_intermediate_states=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    cp_context=None,
    use_graph=False,
    max_num_seqs=None,
    **kwargs,
):
    _keep("chunk_kda", q=q, g=g, initial_state=initial_state, cu_seqlens=cu_seqlens)
    assert g.shape == q.shape
    return _delta(q, k, v, g, beta, scale, initial_state, _lengths(cu_seqlens, q.shape[1]))


def _convolve(
    row: Tensor, weight: Tensor, bias: Tensor | None, lengths: list[int], activation: str | None
) -> Tensor:
    assert bias is None or bias.dtype == weight.dtype
    channels, taps = weight.shape
    zeros = row.new_zeros(len(lengths), taps - 1, channels)
    out, _ = slow_convolution(row, weight, bias, lengths, zeros)
    return silu(out) if activation else out


def causal_conv1d(
    x,
    weight=None,
    bias=None,
    residual=None,
    initial_state=None,
    output_final_state=False,
    activation=None,
    backend="triton",
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    cp_context=None,
    **kwargs,
):
    _keep("causal_conv1d", x=x, cu_seqlens=cu_seqlens)
    assert x.shape[0] == 1
    return _convolve(x[0], weight, bias, _lengths(cu_seqlens, x.shape[1]), activation)[None], None


def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    _keep("causal_conv1d_fn", x=x, seq_idx=seq_idx)
    assert x.stride(1) == 1, "seq_idx is only supported for channel last layout"
    assert x.shape[1] % 8 == 0
    assert x.stride(2) % 8 == 0
    assert 2 <= weight.shape[1] <= 4
    assert not return_final_states
    assert initial_states is None
    return _convolve(x[0].T, weight, bias, _numbered(seq_idx, x.shape[2]), activation).T[None]


def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    return_varlen_states=False,
):
    _keep("mamba_chunk_scan_combined", x=x, dt=dt, A=A, seq_idx=seq_idx, chunk_size=chunk_size)
    total, heads = x.shape[1:3]
    assert dt.shape == (1, total, heads)
    assert A.shape == (heads,)
    assert A.dtype == dt.dtype == torch.float32
    assert B.shape == C.shape
    lengths = _numbered(seq_idx, total)
    zeros = torch.zeros(len(lengths), heads, x.shape[3], B.shape[3])
    out, _ = by_document(
        slow_state_space, [one[0].float() for one in (x, dt, B, C)], lengths, zeros, A
    )
    return out.to(x.dtype)[None]


def selective_scan_fn(
    u,
    delta,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    return_last_state=False,
):
    _keep("selective_scan_fn", u=u, A=A, B=B)
    assert A.dtype == torch.float32
    assert u.dtype == delta.dtype == B.dtype == C.dtype
    assert all(one.stride(-1) == 1 or one.shape[-1] == 1 for one in (u, delta, B, C))
    assert B.shape == C.shape == (len(u), A.shape[1], u.shape[2])
    state, outs = torch.zeros(len(u), *A.shape), []
    for t in range(u.shape[2]):
        step = delta[:, :, t, None]
        state = (step * A).exp() * state + step * u[:, :, t, None] * B[:, None, :, t]
        outs.append((state * C[:, None, :, t]).sum(-1))
    return torch.stack(outs, -1)


def selective_state_update(*args: Any, **given: Any) -> Any:
    """Not called here, but by transformers."""
    raise NotImplementedError


def causal_conv1d_update(*args: Any, **given: Any) -> Any:
    """Not called here, but by transformers."""
    raise NotImplementedError
