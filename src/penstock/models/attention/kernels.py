"""torch's own attention on heads, given so that its slow kernel never runs unseen.

`scaled_dot_product_attention` has three kernels on CUDA. The third, `math`, makes all scores in
float32, heads × queries × keys of them, and keeps them for the backward pass. With fewer key heads
than query heads, torch's `enable_gqa` leaves only flash and math. So key heads are made the batch
instead: each has its group of query heads, and the keys are the same memory for all of the group
(stride 0). That needs no `enable_gqa`, no copy, and gives the same bits.

| on CUDA | without a mask | with a mask |
|---|---|---|
| float16, bfloat16 | flash or efficient | efficient |
| float32 | efficient | efficient |
| float64 | math | math |

On the CPU one kernel (flash for the CPU) takes all dtypes and masks. torch may refuse a kernel for
other reasons (the width of a head, old devices); on CUDA it is asked, and a warning says when only
math is left.
"""

import logging

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HALF = (torch.float16, torch.bfloat16)
_log = logging.getLogger("penstock.models")


def kernels_for(device_type: str, dtype: torch.dtype, *, masked: bool) -> tuple[str, ...]:
    """Which of torch's kernels may run `sdpa`, best first; the table above.

    Args:
        device_type: Such as cuda.
        dtype: Of queries, keys and values.
        masked: Whether there is a mask; grouped heads make no difference.
    """
    if device_type == "cpu":
        return ("flash",)
    if device_type != "cuda" or dtype == torch.float64:
        return ("math",)
    return ("efficient",) if masked or dtype not in HALF else ("flash", "efficient")


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """`scaled_dot_product_attention` with fewer key heads than query heads, without `enable_gqa`.

    Args:
        q: [rows, heads, queries, dim].
        k: [rows, kv_heads, keys, dim], kv_heads a divisor of heads.
        v: As `k`.
        mask: Added to the scores (float) or says which keys a query sees (bool); broadcast to
            [rows, 1, queries, keys].
        causal: Aligned top-left, so only right for equal numbers of keys and queries.

    Returns:
        [rows, heads, queries, dim].
    """
    rows, heads, queries, dim = q.shape
    _, kv_heads, keys, _ = k.shape
    if heads != kv_heads:
        group = heads // kv_heads
        if mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
            mask = mask.expand(rows, kv_heads, *mask.shape[2:]).flatten(0, 1)[:, None]
        q = q.reshape(rows * kv_heads, group, queries, dim)
        k, v = (x.reshape(rows * kv_heads, 1, keys, -1).expand(-1, group, -1, -1) for x in (k, v))
    if q.is_cuda and not torch.compiler.is_compiling():
        _warn_of_math(q, k, v, mask, causal)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    return out if heads == kv_heads else out.reshape(rows, heads, queries, -1)


def attend_heads(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Scaled dot-product attention of [tokens, heads, dim]; there may be fewer key heads than query
    heads.

    `mask` [queries, keys] is added to the scores (float) or says which keys a query sees (bool).
    torch converts bool to float, and keeps a copy for the backward pass in each layer. `causal` is
    aligned top-left in torch, so it is only right for equal numbers of keys and queries.
    """
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return sdpa(q, k, v, mask=mask, causal=causal).squeeze(0).transpose(0, 1)


def only_math(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> bool:
    """Whether torch has no kernel but math for these, asked of torch itself; only on CUDA.

    Args:
        q: [batch, heads, queries, dim].
        k: [batch, heads, keys, dim].
        v: As `k`.
        mask: As for `scaled_dot_product_attention`.
        causal: As there.
    """
    from torch.backends import cuda

    given = cuda.SDPAParams(q, k, v, mask, 0.0, causal, False)
    return not (cuda.can_use_flash_attention(given) or cuda.can_use_efficient_attention(given))


def _warn_of_math(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> None:
    kind = (q.dtype, q.shape[-1], mask is not None, q.requires_grad)
    if _unseen(kind) and only_math(q, k, v, mask, causal=causal):
        _log.warning(
            "attention in %s with heads of width %d%s runs on torch's slow kernel (math), whose "
            "memory is heads × tokens²; use bfloat16, or heads whose width is a multiple of 8",
            str(q.dtype).removeprefix("torch."),
            q.shape[-1],
            " and a mask" if mask is not None else "",
        )


_asked: set[object] = set()


def _unseen(kind: object) -> bool:
    """True the first time only: asking torch takes longer than a small call."""
    if kind in _asked:
        return False
    _asked.add(kind)
    return True
