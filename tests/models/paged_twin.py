"""A slow kernel for torch's FlashAttention over pages, so that its callers run on the CPU; and a
recorder that repeats by running again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def attend(
    q: Tensor, keys: Tensor, values: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
    window_size: tuple[int, int], seqused_k: Tensor, block_table: Tensor, enable_gqa: bool = False,
    return_aux: Any = None,
) -> Any:  # fmt: skip
    """As `varlen_attn` with a block table, in float64."""
    assert enable_gqa == (q.shape[1] != keys.shape[2])
    assert window_size[1] == 0
    kinds = {x.dtype for x in (cu_q, cu_k, seqused_k, block_table)}
    assert kinds == {torch.int32}
    assert cu_k.diff().tolist() == seqused_k.tolist()
    assert int(cu_q.diff().max()) <= max_q
    assert int(seqused_k.max()) <= max_k
    out, sums = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
    for row, used in enumerate(seqused_k.tolist()):
        begin, end = cu_q[row : row + 2].tolist()
        if begin == end:
            continue
        k, v = (x[block_table[row].long()].flatten(0, 1)[:used].double() for x in (keys, values))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), k) * q.shape[-1] ** -0.5
        own = torch.arange(used - (end - begin), used)[:, None]
        seen = torch.arange(used) <= own
        if window_size[0] >= 0:
            seen &= torch.arange(used) >= own - window_size[0]
        scores = scores.masked_fill(~seen, -torch.inf)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
        sums[:, begin:end] = scores.logsumexp(-1).float()
    return (out, sums) if return_aux is not None else out


class Again:
    """Records by keeping what was run; a repetition runs it, and writes into the same result."""

    def __init__(self) -> None:
        self.runs = 0

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        out = run().clone()

        def repeat() -> None:
            self.runs += 1
            out.copy_(run())

        return repeat, out


class Refusing:
    """A device that cannot record."""

    def record(self, run: Callable[[], Tensor]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")
