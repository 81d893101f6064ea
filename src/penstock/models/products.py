"""Products of linear layers on the CPU, by the faster of torch's two libraries.

torch computes float32 products with MKL, which takes slower kernels on processors of other makers
than Intel. oneDNN, which torch also has (for bfloat16 and for compiled models), does not: a Zen 5
core does 102 GFLOP/s with MKL and 205 to 250 with oneDNN, and one to eight rows, where reading the
weights is most of the work, take 0.7 of the time. So on AMD's processors products of training and
of generation (in inference mode) are oneDNN's. The choice depends on processor and shape alone, not
on a measurement, so a resumed run makes it again, and a text is the same in every run.

Elsewhere, as in scores and teachers, torch's own bits are kept. What is small, in another dtype, on
another device, sharded, compiled or under autocast is torch's, too.
"""

import functools
import logging
import platform
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

SMALLEST = 1 << 22
"""Multiplications of a product of training from which on oneDNN is used: for smaller ones, calling
it costs more than it saves, and it takes half a millisecond to make the code for a new shape.
"""
SMALLEST_READ, SMALLEST_WRITTEN = 1 << 18, 1 << 20
"""Numbers of a matrix, or multiplications, from which on generation uses it: a call takes 10 µs
more.
"""
PART = 4096
"""Rows of a sum to which a product is added at once."""
PRODUCT = "_ProductBackward"
"""Name of the node of such a product in autograd's graph; its inputs are x and the weight."""
TOLERANCE = 1e-5
"""Difference between the two, relative to the largest number, that a trial allows; their rounding
is 1e-6.
"""
_log = logging.getLogger("penstock.models")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: x [..., inputs] × weight [outputs, inputs]ᵀ + bias [outputs] →
    [..., outputs]; by oneDNN where that is faster.
    """
    # Asked first: torch.compile must see nothing else of this.
    if torch.compiler.is_compiling():
        return functional.linear(x, weight, bias)
    if torch.is_inference_mode_enabled():
        if not _generation_takes_onednn(x, weight):
            return functional.linear(x, weight, bias)
        found = by_onednn(x, weight)
    else:
        if not _training_takes_onednn(x, weight):
            return functional.linear(x, weight, bias)
        rows: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight)
        found = rows.view(*x.shape[:-1], len(weight))
    return found if bias is None else found + bias


def _generation_takes_onednn(x: Tensor, weight: Tensor) -> bool:
    large = weight.numel() >= SMALLEST_READ or x.numel() * len(weight) >= SMALLEST_WRITTEN
    return large and weight.is_contiguous() and _suits_onednn(x, weight)


def _training_takes_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and (x.requires_grad or weight.requires_grad)
        and not torch.is_autocast_enabled("cpu")
        and takes_onednn(x, weight)
    )


def takes_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is the faster way to x [..., inputs] × weight [outputs, inputs]ᵀ in a step of
    training.
    """
    return x.numel() * len(weight) >= SMALLEST and _suits_onednn(x, weight)


def _suits_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and weight.ndim == 2
        and x.shape[-1] == weight.shape[1]
        # Not shards, nor what else computes in its own way.
        and type(x) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and uses_onednn()
    )


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, inputs] × weight [outputs, inputs]ᵀ in a backward pass, without a gradient of its
    own.
    """
    return by_onednn(x, weight) if takes_onednn(x, weight) else x @ weight.t()


def add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total [m, n] += left [p, m]ᵀ × right [p, n], in place; None: 0."""
    if not takes_onednn(left.t(), right.t()):
        return left.t() @ right if total is None else total.addmm_(left.t(), right)
    if total is None:
        total = left.new_zeros(left.shape[1], right.shape[1])
    # A sum as large as a head is written once, where each part is still in the cache.
    for part, rows in zip(total.split(PART), left.split(PART, 1), strict=True):
        part += by_onednn(rows.t(), right.t())
    return total


@functools.cache
def uses_onednn() -> bool:
    """Whether this process computes large products with oneDNN."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if maker() != "AMD":
        return False
    try:
        reason = _disagreement()
    except Exception as error:  # The operation is not public: another torch may lack or change it.
        reason = str(error).partition("\n")[0]
    if reason:
        _log.warning("products are computed by MKL, which is slower on this processor: %s", reason)
    return not reason


def _disagreement() -> str:
    """In what oneDNN's product differs from torch's on small trials; empty: in nothing.

    Raises:
        AttributeError, RuntimeError: This torch has no such operation.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 300, generator=generator) for n in (40, 70))
    expected = x.double() @ weight.double().t()
    for left in (x, x.t().contiguous().t(), x[:1], x[:3]):
        for right in (weight, weight.t().contiguous().t()):
            difference = (by_onednn(left, right) - expected[: len(left)]).abs().max()
            if not (relative := float(difference / expected.abs().max())) <= TOLERANCE:
                return (
                    f"oneDNN's differ from torch's by {relative:.1g} of the largest; see "
                    "torch.backends.mkldnn.matmul.fp32_precision"
                )
    return ""


def maker() -> str:
    """Who made the processor: "AMD", "Intel", or "" if it is another, or not known."""
    named = platform.processor()
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        with facts.open(encoding="utf-8", errors="replace") as lines:
            named += next((line for line in lines if line.startswith("vendor_id")), "")
    known = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
    return next((name for word, name in known.items() if word in named), "")


def by_onednn(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., inputs] × weight [outputs, inputs]ᵀ, of any strides."""
    operation: Any = torch.ops.mkldnn._linear_pointwise
    found: Tensor = operation(_plain(x), _plain(weight), None, "none", [], "")
    return found


def _plain(x: Tensor) -> Tensor:
    if x.is_contiguous():
        return x
    if x.ndim != 2:
        return x.contiguous()
    if x.t().is_contiguous():
        return x
    # A part of a transpose is copied in its own order.
    return x.t().contiguous().t() if x.stride(0) < x.stride(1) else x.contiguous()


@final
class _Product(torch.autograd.Function):
    """x [n, inputs] × weight [outputs, inputs]ᵀ; its gradients are such products again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return by_onednn(x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        # By itself where no second derivative is wanted: autograd then takes it without a copy.
        multiply: Any = _Product.apply if torch.is_grad_enabled() else by_onednn
        return (
            multiply(gradient, weight.t()) if wants_x else None,
            multiply(gradient.t(), x.t()) if wants_weight else None,
        )


@final
class OneDnnLinear(nn.Linear):
    """An `nn.Linear` whose product is `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] → [..., outputs]."""
        return linear(input, self.weight, self.bias)


def replace_linear(model: nn.Module) -> None:
    """Let the plain linear layers of a model use `linear`; weights, names and hooks stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear
