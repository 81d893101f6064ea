"""Products of linear layers in training on the CPU, by the faster of torch's two libraries.

torch computes float32 products with MKL, which uses AVX-512 on Intel's processors only. oneDNN,
which torch also has (for bfloat16 and for compiled models), uses it on AMD's too: a Zen 5 core does
102 GFLOP/s with MKL and 205 to 250 with oneDNN. So where `products` takes oneDNN for generation,
training does too. The choice depends on the processor alone, not on a measurement, so a resumed run
makes it again.

Only where gradients are recorded: shapes of training repeat, while oneDNN takes half a millisecond
to make the code for a new one. What is small, in another dtype, on another device, sharded,
compiled or under autocast is torch's.
"""

import functools
import logging
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.models.products import onednn_is_faster
from penstock.models.products import product as product_of_generation

SMALLEST = 1 << 22
"""Multiplications of a product from which on oneDNN is used: for smaller ones, calling it costs
more than it saves.
"""
PART = 4096
"""Rows of a sum to which a product is added at once."""
PRODUCT = "_ProductBackward"
"""Name of the node of such a product in autograd's graph; its inputs are x and the weight."""
_log = logging.getLogger("penstock.models")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: x [..., inputs] × weight [outputs, inputs]ᵀ + bias [outputs] →
    [..., outputs]; by oneDNN where that is faster.
    """
    if not _is_for_onednn(x, weight):
        if bias is None:
            return product_of_generation(x, weight)
        return functional.linear(x, weight, bias)
    found: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight)
    found = found.view(*x.shape[:-1], len(weight))
    return found if bias is None else found + bias


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and (x.requires_grad or weight.requires_grad)
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and takes_onednn(x, weight)
    )


def takes_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is the faster way to x [..., inputs] × weight [outputs, inputs]ᵀ."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and weight.ndim == 2
        and x.shape[-1] == weight.shape[1]
        and x.numel() * len(weight) >= SMALLEST
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
    """Whether this process computes large products of training with oneDNN."""
    if not onednn_is_faster():
        return False
    try:
        reason = _disagreement()
    except (AttributeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
    if reason:
        _log.info("products are computed by MKL, which is slower on this processor: %s", reason)
    return not reason


def _disagreement() -> str:
    """In what oneDNN's product differs from torch's on a small trial; empty: in nothing.

    Raises:
        AttributeError, RuntimeError: This torch has no such operation.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 24, generator=generator) for n in (40, 56))
    expected = x @ weight.t()
    for left in (x, x.t().contiguous().t()):
        for right in (weight, weight.t().contiguous().t()):
            if not torch.allclose(by_onednn(left, right), expected, rtol=1e-4, atol=1e-4):
                return "oneDNN's product differs from torch's"
    return ""


def by_onednn(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, inputs] × weight [outputs, inputs]ᵀ; both contiguous, or transposes of what is."""
    operation: Any = torch.ops.mkldnn._linear_pointwise
    found: Tensor = operation(_plain(x), _plain(weight), None, "none", [], "")
    return found


def _plain(x: Tensor) -> Tensor:
    if x.is_contiguous() or x.t().is_contiguous():
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
        if not _is_for_onednn(input, self.weight):
            return functional.linear(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias)


def replace_linear(model: nn.Module) -> None:
    """Let the plain linear layers of a model use `linear`; weights, names and hooks stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear
