"""Cross entropy and its gradient without ever holding the logits of a whole row.

Logits are the largest tensor of a small model's step: 8,192 positions of a vocabulary of 128k are 4
GiB in float32, several times over in a plain backward pass. So `chunked_cross_entropy` takes only
the positions that have a target, in chunks. For each chunk it computes the logits, the loss and *at
once the gradient*, while the logits are still in the cache. It keeps only the gradients of the
hidden states and of the head's parameters, which the backward pass scales by the incoming gradient
(a scalar). So nothing is computed twice: the cost is that of the plain formula, minus positions
without a target. The idea is that of fused linear cross entropy (Liger Kernel, Hsu et al. 2024,
arXiv:2410.10989). The head may be any function of its own parameters, because autograd computes
each chunk's gradient through it. The result has no second derivative; asking for one raises.

**Weights** are cast once a pass (`models/head.py`), and their gradients are summed in float32 over
chunks. Where logits are a matrix and nothing else, each chunk's product is added to the sum
directly.

**On a GPU** a kernel of ours turns the logits of a chunk into their gradient in place
(`cross_entropy_kernel.py`). It is tried once a device, against torch's operations, which are used
where it does not run.
"""

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.models.gradients import FoundGradients, accumulator
from penstock.models.head import Head, Logits, no_loss
from penstock.models.products import PRODUCT, add_product, product

_log = logging.getLogger("penstock.training")

LEAST_POSITIONS = 256
"""Minimum positions per chunk: each chunk adds a gradient as large as the head to a sum."""
ELEMENTS_CPU = 1 << 19
"""Target number of logits per chunk on the CPU: 2 MiB in float32, near the second-level cache."""
BYTES_GPU, SHARE_GPU = 1 << 30, 1 / 32
"""Target bytes per chunk on a GPU, and maximum share of its memory. Each chunk reads and writes the
head's gradient, 8 bytes a weight, and computes 6 × positions operations a weight. By arithmetic for
an H100 (989 TFLOP/s, 3.35 TB/s), that traffic is at most 10 % of the time of the products at 4,096
positions, which 1 GiB holds of 128k logits in bfloat16; at 1,024 positions it would be 39 %.
"""
TILE = 128
"""Positions of a tile of a matrix product."""
FRESH = frozenset(f"{name}Backward0" for name in ("Mm", "Addmm", "Add", "Div", "Mul", "ToCopy"))
"""Operations whose result is new memory that autograd does not keep, so it may be overwritten."""

Fused = Callable[..., tuple[Tensor, Tensor]]
"""`fused_cross_entropy`."""


def chunked_cross_entropy(
    logits_of: Logits,
    hidden: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    scale: float = 1.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
    each: Tensor | None = None,
    squares: Tensor | None = None,
    right: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`scale` times the sum over targets of weight × (cross entropy + z_loss × log² Z), Z being the
    sum of exp(logits).

    Args:
        logits_of: The head: hidden states [n, width] to logits [n, vocab], each position
            independent of the others. A `Head` shares cast weights with other losses of the pass.
        hidden: [n, width], of positions that have a target.
        targets: [n] int64, in 0 … vocab - 1.
        weights: [n] float32 loss weights.
        scale: Factor of the whole sum, usually 1 / the step's denominator.
        z_loss: Coefficient of the term that keeps log Z near 0 (PaLM, Chowdhery et al. 2022,
            section 5: 1e-4).
        chunk: Positions per chunk; None: chosen by vocabulary and device.
        each: [n] float64, filled with weight × cross entropy of each target; None: not wanted.
        squares: [n] float64, filled with weight × log² Z of each target if there is a z_loss; None:
            not wanted.
        right: bool [n], filled with whether no logit is larger than the target's, nor equal with a
            lower id; None: not wanted.

    Returns:
        The scaled loss, a scalar; and the unscaled sum of weight × cross entropy, float64, without
        gradient.
    """
    head = Head.of(logits_of)
    if not len(hidden):
        return no_loss(head, hidden), torch.zeros((), dtype=torch.float64, device=hidden.device)
    parts = head.parts(hidden)
    fused = fused_for(hidden.device, parts.dtype)
    if chunk is None:
        chunk = chunk_size(len(hidden), parts.vocab_size, parts.dtype, hidden.device, fused)
    work = _Work(head, targets, weights, scale, z_loss, chunk, each, squares, right, fused)
    if not torch.is_grad_enabled() or not (hidden.requires_grad or parts.weights):
        return work.sums(hidden)
    result: tuple[Tensor, Tensor] = _ChunkedCrossEntropy.apply(
        work, parts.used, hidden, *parts.weights
    )
    return result


def chunk_size(
    positions: int, vocab_size: int, dtype: torch.dtype, device: torch.device, fused: Fused | None
) -> int:
    """Positions per chunk.

    Args:
        positions: Of all chunks.
        vocab_size: Logits of a position.
        dtype: Of the logits.
        device: Where they are.
        fused: The kernel; None: torch's operations, with copies in float32 and of the gradient.
    """
    if device.type == "cpu":
        return max(LEAST_POSITIONS, ELEMENTS_CPU // vocab_size)
    each = dtype.itemsize if fused is not None else 2 * dtype.itemsize + 4
    room = BYTES_GPU
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        room = min(room, int(memory * SHARE_GPU))
    most = max(LEAST_POSITIONS, room // (each * vocab_size))
    # Chunks of one size: a small last one would move the gradient for little. In whole tiles.
    size = math.ceil(positions / math.ceil(positions / most))
    return math.ceil(size / TILE) * TILE


@functools.cache
def fused_for(device: torch.device, dtype: torch.dtype) -> Fused | None:
    """The kernel for logits of a dtype; None: torch's operations do the work."""
    if device.type != "cuda" or dtype == torch.float64:
        return None
    if find_spec("triton") is None:
        _log.info("cross entropy runs in torch's operations, which is slower: no triton here")
        return None
    try:
        # Imported late: it takes a second.
        from penstock.learn.training.cross_entropy_kernel import DTYPES, fused_cross_entropy

        if dtype not in DTYPES:
            return None
        reason = disagreement(fused_cross_entropy, device, dtype)
    except Exception as error:  # whatever a compiler or a driver raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if reason:
        _log.warning(
            "cross entropy runs in torch's operations, which is slower: the kernel of Triton "
            "fails here (%s); update triton, or install a C compiler if it names one",
            reason,
        )
        return None
    return fused_cross_entropy


def disagreement(fused: Fused, device: torch.device, dtype: torch.dtype) -> str:
    """In what a kernel differs from torch's operations on a small trial; empty: in nothing."""
    generator = torch.Generator().manual_seed(0)
    logits = (8 * torch.randn(3, 5000, generator=generator)).to(device, dtype)
    targets = torch.tensor([0, 4999, 77], device=device)
    weights = torch.tensor([1.0, 0.5, 2.0], device=device)
    found = torch.empty_like(logits)
    entropies, _ = fused(logits, targets, weights, scale=0.1, z_loss=1e-3, gradient=found)
    expected = _by_torch(logits, targets, weights, 0.1, 1e-3)
    pairs = {
        "cross entropy": (entropies, expected.entropies),
        "the gradient": (found, expected.gradient.to(dtype)),
    }
    for name, (one, other) in pairs.items():
        if not torch.allclose(one.float(), other.float(), rtol=2e-2, atol=1e-5):
            return f"{name} differs from torch's"
    return ""


@final
@dataclass(frozen=True, slots=True)
class _Found:
    """Of a chunk of n logits."""

    entropies: Tensor
    """[n]"""
    log_z: Tensor | None
    """[n], where it counts."""
    gradient: Tensor
    """[n, vocab]; the log-probabilities if it was not wanted."""


def _by_torch(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    scale: float,
    z_loss: float,
    *,
    gradient: bool = True,
) -> _Found:
    """By torch's operations; the gradient is float32 or wider."""
    logs = torch.log_softmax(logits, -1, dtype=accumulator(logits.dtype))
    of_targets = logs.gather(1, targets[:, None])[:, 0]
    log_z = None
    if z_loss:
        log_z = logits.gather(1, targets[:, None])[:, 0].to(logs.dtype) - of_targets
    if gradient:
        rows = weights.to(logs.dtype) * scale
        logs = logs.exp_()
        logs *= (rows if log_z is None else rows * (1 + 2 * z_loss * log_z))[:, None]
        logs.scatter_add_(1, targets[:, None], -rows[:, None])
    return _Found(-of_targets, log_z, logs)


@final
@dataclass(frozen=True, slots=True)
class _Work:
    """The arguments of `chunked_cross_entropy`, and its parts."""

    head: Head
    targets: Tensor
    weights: Tensor
    scale: float
    z_loss: float
    chunk: int
    each: Tensor | None
    squares: Tensor | None
    right: Tensor | None
    fused: Fused | None

    def parts(self, positions: int) -> list[slice]:
        """The chunks."""
        return [slice(begin, begin + self.chunk) for begin in range(0, positions, self.chunk)]

    def losses(
        self, logits: Tensor, part: slice, *, gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Loss and weighted cross entropy of a chunk, float64; and the gradient of its logits in
        their dtype, which may have taken their memory.
        """
        targets, weights = self.targets[part], self.weights[part]
        plain, out = logits.detach(), None
        if self.right is not None:
            # Before their memory is taken. Of equal logits, torch's argmax gives the first.
            torch.eq(plain.argmax(-1), targets, out=self.right[part])
        if self.fused is not None and plain.stride(1) == 1:
            if gradient:
                out = plain if _is_fresh(logits) else torch.empty_like(plain)
            entropies, logs = self.fused(
                plain, targets, weights, scale=self.scale, z_loss=self.z_loss, gradient=out
            )
            if out is plain:
                torch.autograd.graph.increment_version(logits)
            log_z = logs if self.z_loss else None
        else:
            found = _by_torch(plain, targets, weights, self.scale, self.z_loss, gradient=gradient)
            entropies, log_z = found.entropies, found.log_z
            out = found.gradient.to(logits.dtype) if gradient else None
        if self.each is not None:
            self.each[part].copy_(entropies).mul_(weights)
        cross_entropy = entropies.double() @ weights.double()
        loss = cross_entropy * self.scale
        if log_z is not None:
            squares = log_z.double().square()
            if self.squares is not None:
                torch.mul(squares, weights, out=self.squares[part])
            loss = self.scale * (cross_entropy + self.z_loss * (squares @ weights.double()))
        return loss, cross_entropy, out

    def sums(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and weighted cross entropy, without gradients."""
        sums = [
            torch.stack(self.losses(self.head(hidden[part]), part, gradient=False)[:2])
            for part in self.parts(len(hidden))
        ]
        loss, cross_entropy = torch.stack(sums).sum(0)
        return loss.to(accumulator(hidden.dtype)), cross_entropy


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, work: _Work, used: list[Tensor], hidden: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        of_hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        sums: list[Tensor] = []
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        cross_entropy = torch.zeros_like(loss)
        for part in work.parts(len(hidden)):
            with torch.enable_grad():
                states = hidden[part].detach().requires_grad_(hidden.requires_grad)
                logits = work.head(states)
            chunk_loss, chunk_entropy, gradient = work.losses(logits, part, gradient=True)
            loss += chunk_loss
            cross_entropy += chunk_entropy
            assert gradient is not None
            if of_hidden is not None and _is_product(logits, states, used):
                of_hidden[part] = product(gradient, used[0].detach().t())
                sums = [_add_product(sums[0] if sums else None, gradient, states.detach())]
                continue
            inputs = [*([] if of_hidden is None else [states]), *used]
            found = list(torch.autograd.grad(logits, inputs, gradient))
            if of_hidden is not None:
                of_hidden[part] = found.pop(0)
            if sums:
                for total, new in zip(sums, found, strict=True):
                    total += new
            else:
                sums = [new.to(accumulator(new.dtype)) for new in found]
        ctx.found = FoundGradients(of_hidden, sums, [weight.dtype for weight in weights])
        ctx.mark_non_differentiable(cross_entropy)
        return loss.to(accumulator(hidden.dtype)), cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weights = ctx.found.times(incoming)
        return None, None, hidden, *weights


def _is_fresh(logits: Tensor) -> bool:
    """True if nothing needs the memory of these logits once their gradient is known."""
    made_by = logits.grad_fn
    return made_by is not None and made_by.name() in FRESH and logits._base is None


def _is_product(logits: Tensor, states: Tensor, used: list[Tensor]) -> bool:
    """True if logits are states × matrixᵀ and nothing else, by their graph; the matrix is the only
    leaf that is used.
    """
    made_by = logits.grad_fn
    if len(used) != 1 or made_by is None or made_by.name() not in ("MmBackward0", PRODUCT):
        return False
    left, leaf = (node for node, _ in made_by.next_functions)
    if left is None or leaf is None:
        return False
    if made_by.name() != PRODUCT:
        if leaf.name() != "TBackward0":
            return False
        leaf = leaf.next_functions[0][0]
    return getattr(left, "variable", None) is states and getattr(leaf, "variable", None) is used[0]


def _add_product(total: Tensor | None, gradient: Tensor, states: Tensor) -> Tensor:
    """total + gradientᵀ × states, in place, in the dtype of sums; None: 0."""
    left, wanted = gradient.t(), accumulator(states.dtype)
    if states.dtype == wanted:
        return add_product(total, gradient, states)
    if _adds_into_float32(states.device, states.dtype):
        if total is None:
            return torch.mm(left, states, out_dtype=torch.float32)
        return torch.addmm(total, left, states, out_dtype=torch.float32, out=total)
    found = torch.mm(left, states)
    return found.to(wanted) if total is None else total.add_(found)


@functools.cache
def _adds_into_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """True if a product of half precision can be added to a float32 matrix in one call, without a
    copy of the product: on CUDA, by cuBLAS; tried once.
    """
    if device.type != "cuda":
        return False
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        total = torch.mm(ones, ones, out_dtype=torch.float32)
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return math.isclose(float(total.mean()), 32.0)
