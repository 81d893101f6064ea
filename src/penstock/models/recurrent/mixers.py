"""Recurrent mixers of our transformer, in the place of attention: gated delta rules, and Mamba-2.

Each mixes the slots of a document by a short convolution and a recurrence. What an earlier part of
a document left behind is given and kept by a `Carried`, so the same code runs a packed row and
sequences with a cache.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, final

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from penstock.models.ours.layers import Linear, RMSNorm
from penstock.models.recurrent.borders import Borders
from penstock.models.recurrent.convolution import last_inputs
from penstock.models.recurrent.operations import TORCH

if TYPE_CHECKING:
    from penstock.models.settings import BlockSettings, ModelSettings

State = tuple[Tensor, Tensor]
"""[documents, K − 1, channels] inputs of the convolution, and [documents, heads, …] states of the
recurrence.
"""
STEPS = (1e-3, 1e-1)
"""Range of initial step sizes, and (1, 16) that of initial rates of decay; Mamba-2, arXiv
2405.21060.
"""


class Carried(Protocol):
    """The documents of a call, and what was kept of them."""

    @property
    def borders(self) -> Borders:
        """The documents of the call."""

    @property
    def keeps(self) -> bool:
        """Whether states are kept for a later call."""

    def row(self, x: Tensor) -> Tensor:
        """[..., width] → [T, width], document after document."""

    def back(self, row: Tensor, like: Tensor) -> Tensor:
        """[T, width] → the leading shape of `like`."""

    def state(self, layer: int) -> State | None:
        """State of each document from an earlier call; None: all begin here."""

    def keep(self, layer: int, state: State) -> None:
        """Keep the states after each document."""


@final
class RowDocuments:
    """A packed row [T, width], of whole documents."""

    keeps = False

    def __init__(self, borders: Borders) -> None:
        self.borders = borders

    def row(self, x: Tensor) -> Tensor:
        """The same."""
        return x

    def back(self, row: Tensor, like: Tensor) -> Tensor:
        """The same."""
        return row

    def state(self, layer: int) -> State | None:
        """None."""
        return None

    def keep(self, layer: int, state: State) -> None:
        """Nothing is kept."""


class Mixer(nn.Module):
    """Projections, a convolution over some of them, and a gated norm of the recurrence's
    outputs.
    """

    operations = TORCH
    """Backend of the convolution and the recurrence; see `use_recurrent`."""

    def __init__(
        self, settings: "ModelSettings", block: "BlockSettings", convolved: int, values: int
    ) -> None:
        super().__init__()
        heads = block.heads or settings.heads
        self.heads, self.head_width = heads, block.head_width or settings.each_head
        self.gate = Linear(settings.width, values)
        self.convolution = nn.Parameter(torch.empty(convolved, block.convolution))
        self.decay_log, self.step_bias = (
            nn.Parameter(torch.empty(heads)),
            nn.Parameter(torch.empty(heads)),
        )
        self.norm = RMSNorm(
            values if block.mixer == "mamba" else self.head_width, settings.norm_eps
        )
        self.output = Linear(values, settings.width)

    def forward(self, x: Tensor, layer: int, carried: Carried) -> Tensor:
        """[..., width] → the same."""
        row = carried.row(x)
        before = carried.state(layer)
        inputs = self.convolved(row)
        weight, past = (
            self.convolution.to(row.dtype),
            None if before is None else before[0].to(row.dtype),
        )
        mixed = silu(
            self.operations.causal_convolution(inputs, weight, None, carried.borders, past)
        )
        # States are sums over many tokens, which half precision would round away.
        kind = torch.promote_types(row.dtype, torch.float32)
        held = None if before is None else before[1].to(kind)
        out, after = self.recur(row, mixed.to(kind), carried.borders, held, carried.keeps)
        if carried.keeps:
            assert after is not None
            carried.keep(
                layer, (last_inputs(inputs, carried.borders, weight.shape[1], past), after)
            )
        found: Tensor = carried.back(
            self.output(self.gated(out, self.gate(row).unflatten(-1, (self.heads, -1)))), x
        )
        return found

    def gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """Outputs of the recurrence and gates, [T, heads, head_width] each → [T, values]; each head
        has its norm.
        """
        normed: Tensor = self.norm(out) * silu(gate.to(out.dtype))
        return normed.flatten(-2).to(gate.dtype)

    def convolved(self, row: Tensor) -> Tensor:
        """[T, width] → [T, channels], what the convolution reads."""
        raise NotImplementedError

    def recur(
        self, row: Tensor, mixed: Tensor, borders: Borders, state: Tensor | None, keeps: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs [T, heads, head_width], and states; these may be None if nobody keeps them."""
        raise NotImplementedError

    def drawn(self, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
        """Initial weights by name, float64: rates of decay from 1 to 16, and step sizes evenly
        spread in their logarithm.
        """
        low, high = (math.log(size) for size in STEPS)
        for name, values in (("decay_log", (0.0, math.log(16))), ("step_bias", (low, high))):
            shape = getattr(self, name).shape
            drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
            sizes = values[0] + drawn * (values[1] - values[0])
            # The inverse of softplus, for the step sizes.
            yield name, sizes if name == "decay_log" else (sizes.exp().expm1()).log()


@final
class DeltaMixer(Mixer):
    """Gated DeltaNet (arXiv 2412.06464), or Kimi Delta Attention (arXiv 2510.26692) with a decay
    per channel.
    """

    def __init__(self, settings: "ModelSettings", block: "BlockSettings") -> None:
        heads, width = block.heads or settings.heads, block.head_width or settings.each_head
        super().__init__(settings, block, 3 * heads * width, heads * width)
        self.per_channel = block.mixer == "kimi_delta"
        if self.per_channel:
            self.step_bias = nn.Parameter(torch.empty(heads * width))
        self.query, self.key, self.value = (Linear(settings.width, heads * width) for _ in range(3))
        self.write = Linear(settings.width, heads)
        self.step = Linear(settings.width, heads * width if self.per_channel else heads)

    def convolved(self, row: Tensor) -> Tensor:
        """Queries, keys and values."""
        return torch.cat([self.query(row), self.key(row), self.value(row)], -1)

    def recur(
        self, row: Tensor, mixed: Tensor, borders: Borders, state: Tensor | None, keeps: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Keys and queries have a length of 1, as transformers' layers have it, which add 1e-6 to
        its square.
        """
        q, k, v = mixed.unflatten(-1, (3, self.heads, self.head_width)).unbind(1)
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        steps = softplus(self.step(row).to(mixed.dtype) + self.step_bias.to(mixed.dtype))
        rates = self.decay_log.to(mixed.dtype).exp()
        steps = steps.unflatten(-1, (self.heads, -1)) * rates[:, None]
        decay = -steps if self.per_channel else -steps[..., 0]
        write = self.write(row).to(mixed.dtype).sigmoid()
        return self.operations.gated_delta_rule(q, k, v, decay, write, borders, state, keeps)


@final
class SpaceMixer(Mixer):
    """Mamba-2 (arXiv 2405.21060), with one group of keys."""

    def __init__(self, settings: "ModelSettings", block: "BlockSettings") -> None:
        values = (block.heads or settings.heads) * (block.head_width or settings.each_head)
        super().__init__(settings, block, values + 2 * block.state_width, values)
        self.state_width = block.state_width
        self.value = Linear(settings.width, values)
        self.key, self.query = (
            Linear(settings.width, block.state_width),
            Linear(settings.width, block.state_width),
        )
        self.step = Linear(settings.width, self.heads)
        self.skip = nn.Parameter(torch.empty(self.heads))

    def convolved(self, row: Tensor) -> Tensor:
        """Values, keys and queries."""
        return torch.cat([self.value(row), self.key(row), self.query(row)], -1)

    def recur(
        self, row: Tensor, mixed: Tensor, borders: Borders, state: Tensor | None, keeps: bool
    ) -> tuple[Tensor, Tensor | None]:
        """And each value by itself (`skip`)."""
        values, k, q = mixed.split(
            [mixed.shape[-1] - 2 * self.state_width, self.state_width, self.state_width], -1
        )
        values = values.unflatten(-1, (self.heads, -1))
        steps = softplus(self.step(row).to(mixed.dtype) + self.step_bias.to(mixed.dtype))
        rates = -self.decay_log.to(mixed.dtype).exp()
        out, after = self.operations.state_space_scan(
            values, steps, rates, k[:, None], q[:, None], borders, state, keeps
        )
        return out + values * self.skip.to(mixed.dtype)[:, None], after

    def gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """The gate comes first, and one norm is over all heads."""
        normed: Tensor = self.norm((out * silu(gate.to(out.dtype))).flatten(-2))
        return normed.to(gate.dtype)


def make_mixer(settings: "ModelSettings", block: "BlockSettings") -> Mixer:
    """The recurrent mixer of a block."""
    return SpaceMixer(settings, block) if block.mixer == "mamba" else DeltaMixer(settings, block)
