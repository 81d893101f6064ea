"""Mixture-of-experts feed-forward of our transformer: each token goes to the few experts that its
router rates highest.

No token is dropped, and what a token gets depends on the token alone: neither packing nor padding
nor the number of ranks changes it. The load-balancing loss is that of each document by itself,
weighted by its tokens, so documents of a row do not change each other's gradients either. A loss
over a whole batch, as is usual, would.

In bfloat16 all experts of a matrix are one grouped product, whose borders stay on the device: how
many tokens an expert gets is never read. Otherwise, such as in float32 and next to LoRA, each
expert runs by itself on its tokens, for which the host waits for their numbers.

Sources: Shazeer et al. 2017, arXiv:1701.06538; Mixtral, arXiv:2401.04088 (weights of the chosen
experts sum to 1); the loss by sequence is that of DeepSeek-V3, arXiv:2412.19437, equations 17 to
20, with softmax as in Mixtral.
"""

from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear, silu

from penstock.models.ours.layers import Linear, SwiGLU
from penstock.plan.inputs.torch_tensors import on_device

if TYPE_CHECKING:
    from penstock.models.row_tensors import RowTensors
    from penstock.models.settings import BlockSettings, ModelSettings

grouped_mm: Any = getattr(functional, "grouped_mm", None)
"""Products of groups of rows with a matrix each; None: this torch has none."""


@final
class Balance:
    """How evenly the documents of a row use the experts, summed over the blocks as they run.

    Attributes:
        evenness: Σ over blocks and documents of tokens × evenness, which is 1 where all experts are
            used alike.
        loss: The same, times each block's factor; with gradients.
    """

    def __init__(self, row: "RowTensors") -> None:
        lengths = row.rule.pieces[:, 2] - row.rule.pieces[:, 0]
        real = row.rule.pieces[:, 0] < row.source.num_tokens
        sources = row.source.source_ids
        if len(sources) == real.sum():
            # Rows that are joined have their padding in between, as documents of no source.
            real[: len(sources)] &= sources >= 0
        device = row.tokens.device
        self._count = len(lengths)
        self._documents = on_device(np.repeat(np.arange(len(lengths)), lengths), device)
        self._shares = on_device(real / lengths, device)
        self.evenness = torch.zeros((), device=device)
        self.loss = torch.zeros((), device=device)

    def add(self, probabilities: Tensor, chosen: Tensor, factor: float) -> None:
        """A block's probabilities [T, experts] and chosen experts [T, experts per token], and its
        loss's factor.
        """
        experts, each = probabilities.shape[1], chosen.shape[1]
        places = (self._documents[:, None] * experts + chosen).flatten()
        # Not bincount, which asks the device for the largest number.
        counts = torch.zeros(self._count * experts, dtype=torch.int64, device=places.device)
        uses = counts.scatter_add(0, places, torch.ones_like(places)).view(self._count, experts)
        liked = probabilities.new_zeros(self._count, experts).index_add(
            0, self._documents, probabilities
        )
        documents = (uses.to(liked.dtype) * liked).sum(-1) * (experts / each)
        found = (documents * self._shares.to(liked.dtype)).sum()
        self.evenness = self.evenness + found.detach()
        self.loss = self.loss + factor * found

    def attach(self, hidden: Tensor, tokens: int) -> Tensor:
        """`hidden`, whose backward pass also adds the gradients of the loss over the `tokens` of
        the whole step.
        """
        found: Tensor = _Attach.apply(hidden, self.loss / tokens)
        return found


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], torch.ones_like(ctx.saved_tensors[0])


@final
class Experts(nn.Module):
    """A router and its experts, each a SwiGLU."""

    def __init__(self, settings: "ModelSettings", kind: "BlockSettings") -> None:
        super().__init__()
        assert kind.experts is not None
        self.each, self.factor = kind.experts_per_token, kind.balance
        self.router = Linear(settings.width, kind.experts)
        width = kind.expert_width or settings.inner_width
        self.experts = nn.ModuleList(SwiGLU(settings.width, width) for _ in range(kind.experts))

    def forward(self, x: Tensor, balance: Balance | None = None) -> Tensor:
        """[..., width] → the same."""
        tokens = x.reshape(-1, x.shape[-1])
        # Half precision would make ties, and send tokens of equal rating to other experts
        # elsewhere.
        wide = torch.promote_types(x.dtype, torch.float32)
        probabilities = linear(tokens.to(wide), self.router.weight.to(wide)).softmax(-1)
        weights, chosen = probabilities.topk(self.each)
        weights = weights / weights.sum(-1, keepdim=True)
        if balance is not None:
            balance.add(probabilities, chosen, self.factor)
        order = chosen.flatten().argsort(stable=True)
        sent = tokens.repeat_interleave(self.each, 0)[order]
        run = self._grouped if self.runs_grouped(x.dtype, x.device) else self._one_by_one
        found = run(sent, chosen.flatten()[order])
        back = found[order.argsort()].unflatten(0, (-1, self.each))
        out: Tensor = (back * weights.to(x.dtype)[..., None]).sum(1).view_as(x)
        return out

    def runs_grouped(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether all experts run in one product, of tokens in this dtype on this device."""
        if grouped_mm is None or dtype != torch.bfloat16 or device.type not in ("cuda", "cpu"):
            return False
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
            return False
        # LoRA and other stand-ins do more than multiply; the kernel takes lines of 16 bytes.
        own = [part for expert in self.experts for part in expert.children()]
        return all(type(part) is Linear and not part.in_features % 8 for part in own)

    def _grouped(self, sent: Tensor, numbers: Tensor) -> Tensor:
        """[n, width] tokens in the order of their experts, whose numbers rise → the same."""
        experts = torch.arange(len(self.experts), device=sent.device)
        ends = torch.searchsorted(numbers, experts, right=True).to(torch.int32)

        def product(x: Tensor, part: str) -> Tensor:
            each = [getattr(expert, part).weight.to(x.dtype) for expert in self.experts]
            assert grouped_mm is not None
            found: Tensor = grouped_mm(x, torch.stack(each).transpose(1, 2), offs=ends)
            return found

        return product(silu(product(sent, "gate")) * product(sent, "up"), "down")

    def _one_by_one(self, sent: Tensor, numbers: Tensor) -> Tensor:
        """As `_grouped`, in any dtype; the host waits for the numbers."""
        parts = sent.split(torch.bincount(numbers, minlength=len(self.experts)).tolist())
        # An expert without tokens runs too, so that each weight has a gradient on each rank.
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
