"""Layers that all parts of our transformer share."""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from penstock.models.products import linear


@final
class Linear(nn.Linear):
    """A matrix without a bias, applied in the dtype of its input: weights may be kept in a wider
    one.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., outputs]."""
        return linear(x, self.weight.to(x.dtype))


@final
class RMSNorm(nn.Module):
    """Divides by the root mean square and multiplies by weights."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] → the same."""
        return rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


@final
class SwiGLU(nn.Module):
    """down(silu(gate(x)) × up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            Linear(width, inner),
            Linear(width, inner),
            Linear(inner, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] → the same."""
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out
