"""Cross entropy of a chunk of logits and its gradient, as one kernel on a GPU.

One program takes one row of logits. It reads the row once for the largest logit and the sum of the
exponentials, which it corrects whenever a larger logit comes (online softmax: Milakov and
Gimelshein 2018, arXiv:1805.02867), and once more to write the gradient, usually over the logits.
So a chunk needs one buffer in the dtype of the logits; torch's operations need float32 copies of
it, and read and write each of them several times. Arithmetic is in float32.

Each row has its own program and a fixed order of additions, so results do not depend on the other
rows and are the same each time.

Triton comes with torch for CUDA. Without it this module can be imported, but not used; its
interpreter runs the kernel on the CPU, which is how it is tested.
"""

import torch
from torch import Tensor

try:
    import triton
    from triton import language as tl
except ImportError:
    triton = None

BLOCK = 4096
"""Logits of a row that a program holds at a time."""
WARPS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of logits; float64 is left to torch."""

if triton is not None:

    @triton.jit
    def _row(
        logits,
        stride,
        gradients,
        gradient_stride,
        targets,
        weights,
        entropies,
        logs,
        width,
        scale,
        z_loss,
        block: tl.constexpr,
        writes: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        start = logits + row * stride
        target = tl.load(targets + row)
        # An id that the vocabulary does not have gives NaN, never another row's logit.
        known = (target >= 0) & (target < width)
        of_target = tl.load(start + target, mask=known, other=float("nan")).to(tl.float32)
        columns = tl.arange(0, block)
        largest = float("-inf")
        total = 0.0
        for begin in range(0, width, block):
            at = begin + columns
            x = tl.load(start + at, mask=at < width, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(largest, tl.max(x, 0))
            # As long as all are -inf, there is nothing to subtract.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift), 0)
            largest = higher
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        log_z = shift + tl.log(total)
        tl.store(logs + row, log_z)
        # The difference first: large logits would swallow the logarithm.
        tl.store(entropies + row, tl.log(total) + (shift - of_target))
        if writes:
            weight = tl.load(weights + row) * scale
            factor = weight * (1.0 + 2.0 * z_loss * log_z) / total
            out = gradients + row * gradient_stride
            for begin in range(0, width, block):
                at = begin + columns
                x = tl.load(start + at, mask=at < width, other=float("-inf")).to(tl.float32)
                found = tl.exp(x - shift) * factor - tl.where(at == target, weight, 0.0)
                tl.store(out + at, found.to(gradients.dtype.element_ty), mask=at < width)


def fused_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    scale: float,
    z_loss: float,
    gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The cross entropy of each row, log Z of each row, and the gradient of `scale` × Σ weight ×
    (cross entropy + z_loss × log² Z) with respect to the logits.

    Args:
        logits: [n, vocab], of `DTYPES`; the logits of a row are neighbours in memory.
        targets: int64 [n]. One that is not in 0 … vocab - 1 gives NaN.
        weights: float [n].
        scale: Factor of the sum.
        z_loss: Coefficient of log² Z.
        gradient: [n, vocab] in the dtype of the logits, which is filled; may be the logits
            themselves. None: not wanted.

    Returns:
        Cross entropy and log Z, float32 [n].
    """
    count, width = logits.shape
    entropies = torch.empty(count, dtype=torch.float32, device=logits.device)
    logs = torch.empty_like(entropies)
    out = logits if gradient is None else gradient
    # Triton starts kernels on the current device, which need not be that of the logits.
    with torch.cuda.device_of(logits):
        _row[(count,)](
            logits,
            logits.stride(0),
            out,
            out.stride(0),
            targets.contiguous(),
            weights.to(torch.float32).contiguous(),
            entropies,
            logs,
            width,
            float(scale),
            float(z_loss),
            block=min(BLOCK, triton.next_power_of_2(width)),
            writes=gradient is not None,
            num_warps=WARPS,
        )
    return entropies, logs
