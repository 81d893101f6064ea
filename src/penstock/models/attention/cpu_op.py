"""Attention document by document as one operation of torch, with its own backward pass, on the CPU.

One operation, because documents are then data: a compiled model is not compiled anew for each row, and autograd has
one node instead of some for each document. Masks live no longer than their call, so memory is O(row). What it calls is
the kernel that `scaled_dot_product_attention` takes on the CPU, and results are the same bit for bit.
"""

import torch
from torch import Tensor

from penstock.models.attention.calls import calls

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _heads(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def _tokens(x: Tensor) -> Tensor:
    return x.squeeze(0).transpose(0, 1)


def _plain(x: Tensor) -> Tensor:
    """The kernel reads numbers of a head as if they were side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("penstock::attend_documents", mutates_args=(), device_types="cpu")
def attend_documents(q: Tensor, k: Tensor, v: Tensor, pieces: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of each document to itself.

    Args:
        q: [T, heads, dim].
        k: [T, kv_heads, dim].
        v: [T, kv_heads, dim].
        pieces: [documents, 3] int64: begin, end of the prefix, end; those of an `AttentionRule`.

    Returns:
        [T, heads, dim], and the logarithms of the sums of exponentials that the backward pass needs, [heads, T].
    """
    q, k, v = _plain(q), _plain(k), _plain(v)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    sums = _empty_sums(q)
    for call in calls(pieces.tolist(), q.device, q.dtype):
        keys, values = _heads(k[call.keys]), _heads(v[call.keys])
        found, logs = _flash(_heads(q[call.queries]), keys, values, 0.0, call.causal, attn_mask=call.mask)
        out[call.queries] = _tokens(found)
        sums[:, call.queries] = logs[0]
    return out, sums


def _empty_sums(q: Tensor) -> Tensor:
    return q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("penstock::attend_documents_backward", mutates_args=(), device_types="cpu")
def attend_documents_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, pieces: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; documents whose rest and prefix look at the same keys add theirs up."""
    gradient, q, k, v = gradient.contiguous(), _plain(q), _plain(k), _plain(v)
    q_gradient, k_gradient, v_gradient = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for call in calls(pieces.tolist(), q.device, q.dtype):
        of_q, of_k, of_v = _flash_backward(
            _heads(gradient[call.queries]),
            _heads(q[call.queries]),
            _heads(k[call.keys]),
            _heads(v[call.keys]),
            _heads(out[call.queries]),
            sums[None, :, call.queries],
            0.0,
            call.causal,
            attn_mask=call.mask,
        )
        q_gradient[call.queries] = _tokens(of_q)
        k_gradient[call.keys] += _tokens(of_k)
        v_gradient[call.keys] += _tokens(of_v)
    return q_gradient, k_gradient, v_gradient


@attend_documents.register_fake
def _(q, k, v, pieces):  # type: ignore[no-untyped-def]
    return torch.empty_like(q, memory_format=torch.contiguous_format), _empty_sums(q)


@attend_documents_backward.register_fake
def _(gradient, q, k, v, out, sums, pieces):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, pieces = inputs
    ctx.save_for_backward(q, k, v, *output, pieces)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, gradient, _):  # type: ignore[no-untyped-def]
    return *attend_documents_backward(gradient, *ctx.saved_tensors), None


attend_documents.register_autograd(_backward, setup_context=_remember)
