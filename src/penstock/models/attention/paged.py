"""Attention over pages of keys and values: FlashAttention reads them where they are, through a
table of each sequence's pages; elsewhere they are gathered first.

The kernel is torch's `varlen_attn` with `block_table` (torch 2.13; FlashAttention 2 wants pages of
256 tokens). A trial of a few tokens compares it with the gathered way before it is used.
"""

import inspect
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.models.attention.kernels import HALF, sdpa
from penstock.models.attention.sinks import add_sinks
from penstock.models.attention.softcap import capped_attention
from penstock.models.attention.varlen import find_varlen, flash_name

PAGE = 256
"""Tokens of a page."""
TOLERANCE = 0.05
"""Largest difference in the trial; numbers are about 1, and half precision is 0.01 off."""


class Tables(NamedTuple):
    """Where the keys of sequences are; all int32 on the device."""

    queries: Tensor
    """[B + 1]: where each sequence's queries begin and end."""
    keys: Tensor
    """[B + 1]: the same of keys, as if they lay in a row."""
    lengths: Tensor
    """[B]: number of keys of each."""
    pages: Tensor
    """[B, pages]: of each sequence, in order; padding is page 0."""
    longest_queries: int
    longest_keys: int


def refusal(
    device: torch.device, dtype: torch.dtype, head_width: int, softcap: float | None
) -> str:
    """Why pages must be gathered; empty: FlashAttention may read them."""
    function = find_varlen()
    if device.type != "cuda" or dtype not in HALF:
        return f"{str(dtype).removeprefix('torch.')} on {device.type}"
    if softcap is not None:
        return "scores are capped"
    if head_width % 8 or head_width > 256:
        return f"heads are {head_width} wide"
    if function is None or "block_table" not in inspect.signature(function).parameters:
        return f"torch {torch.__version__} has no block_table"
    flash_name(device.type)
    return ""


def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    where: Tables,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention by FlashAttention, which reads pages in place.

    Args:
        q: [t, heads, dim], sequence by sequence; each sees keys up to its own, the last one all.
        keys: [pages, page, kv_heads, dim].
        values: As `keys`.
        where: The tables.
        window: Maximum tokens that a token sees, including itself; None: all before it.
        sinks: [heads]; None: there are none.

    Returns:
        [t, heads, dim].
    """
    left = -1 if window is None else window - 1
    # One query, the last, sees all keys in any case; and only without bounds does FlashAttention 2
    # read keys once for all heads of a group.
    right = -1 if left == -1 and where.longest_queries == 1 else 0
    found, sums, _ = torch.ops.torch_attn._varlen_attn(
        q,
        keys,
        values,
        where.queries,
        where.keys,
        where.longest_queries,
        where.longest_keys,
        (left, right) == (-1, 0),
        None,
        [left, right],
        q.shape[1] != keys.shape[2],
        where.lengths,
        where.pages,
    )
    return found if sinks is None else add_sinks(found, sums, sinks)[0]


def attend_gathered(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    seen: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention to pages that are gathered first.

    Args:
        q: [B, n, heads, dim].
        keys: [all pages, page, kv_heads, dim].
        values: As `keys`.
        pages: int32 [B, pages].
        seen: bool [B, 1, n, pages × page]: the keys that each query sees, at least one.
        softcap: Scores are kept within ± this number; None: they are as they come.
        sinks: [heads]; None: there are none.

    Returns:
        [B, n, heads, dim].
    """
    k, v = (x[pages].flatten(1, 2).transpose(1, 2) for x in (keys, values))
    queries = q.transpose(1, 2)
    if softcap is None and sinks is None:
        return sdpa(queries, k, v, mask=seen).transpose(1, 2)
    return capped_attention(queries, k, v, seen, softcap, sinks).transpose(1, 2)


def seen_keys(positions: Tensor, count: int, window: int | None) -> Tensor:
    """bool [B, 1, n, count]: the keys that queries at these positions [B, n] see."""
    own, keys = positions[:, None, :, None], torch.arange(count, device=positions.device)
    seen = keys <= own
    return seen if window is None else seen & (keys > own - window)


def try_pages(
    kv_heads: int, head_width: int, device: torch.device, dtype: torch.dtype, page: int = PAGE
) -> str:
    """Compare both ways on random numbers; returns why FlashAttention cannot be used, or
    nothing.
    """
    drawn = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=drawn).to(device, dtype)

    q, sink = made(2, 1, 2 * kv_heads, head_width), made(2 * kv_heads)
    keys, values = (made(4, page, kv_heads, head_width) for _ in range(2))
    cu_q, cu_k, lengths, pages = (
        torch.tensor(x, dtype=torch.int32).to(device)
        for x in ([0, 1, 2], [0, page + 3, page + 5], [page + 3, 2], [[3, 1], [2, 0]])
    )
    try:
        for window, sinks in ((None, None), (5, None), (None, sink)):
            found = attend_pages(
                q[:, 0],
                keys,
                values,
                Tables(cu_q, cu_k, lengths, pages, 1, 2 * page),
                window,
                sinks,
            )
            seen = seen_keys(lengths[:, None] - 1, 2 * page, window)
            expected = attend_gathered(q, keys, values, pages, seen, None, sinks)[:, 0]
            far = float((found.float() - expected.float()).abs().max())
            if not far <= TOLERANCE:
                return f"its numbers are {far:.2g} off"
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return " ".join(str(error).split())[:200]
    return ""
