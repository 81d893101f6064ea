"""Computes the parts of a model in another dtype than that of its weights.

Weights, their gradients and the optimizer's state stay in float32; when a block runs, its weights
are cast, and the gradient of the cast is summed in float32. This is what `MixedPrecisionPolicy` of
FSDP2 does with `param_dtype`, bit for bit, without a process group. Autocast casts each product
instead: it leaves the residual stream, and products that it does not know (experts), in float32,
and keeps 8 to 48 % more for the backward pass. Softmax of routers, the inside of norms and the loss
are in float32 by the models' own code.

Source: mixed precision with float32 master weights, arXiv:1710.03740, section 3.1.
"""

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from penstock.models.head import cast

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def cast_model(inner: "PreTrainedModel", blocks: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Let a model of transformers compute in a dtype: its blocks, each as a whole, then every other
    module with weights of its own.

    The embedding looks up its rows first and casts these.
    """
    inside: set[nn.Module] = set()
    for block in blocks:
        inside.update(block.modules())
        _cast(block, dtype)
    embedding = inner.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, out: out.to(dtype))
    for module in inner.modules():
        own = next(module.parameters(recurse=False), None)
        if own is not None and module is not embedding and module not in inside:
            _cast(module, dtype, cast)


def freeze_in(weights: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Keep frozen weights in the dtype in which they are used: nothing is ever added to them."""
    for weight in weights:
        if not weight.requires_grad and weight.dtype == torch.float32:
            weight.data = weight.data.to(dtype)


def _cast(
    module: nn.Module,
    dtype: torch.dtype,
    cast_weight: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to,
) -> None:
    """`cast_weight`: `cast` for modules that may be a head's, which take the copies of a pass.
    Blocks do not: they are compiled.
    """
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **given: Any) -> Any:
        weights: dict[str, Tensor] = {
            name: cast_weight(weight, dtype)
            for name, weight in module.named_parameters(remove_duplicate=False)
            if weight.is_floating_point()
        }
        with _reparametrize_module(module, weights):
            return forward(*args, **given)

    module.forward = run
