"""Mixture-of-experts feed-forward of our transformer: each token goes to the few experts that its
router rates highest.

No token is dropped, and what a token gets depends on the token alone: neither packing nor padding
nor the number of ranks changes it. The load-balancing loss is that of each document by itself,
weighted by its tokens, so documents of a row do not change each other's gradients either. A loss
over a whole batch, as is usual, would.

Sources: Shazeer et al. 2017, arXiv:1701.06538; Mixtral, arXiv:2401.04088 (weights of the chosen
experts sum to 1); the loss by sequence is that of DeepSeek-V3, arXiv:2412.19437, equations 17 to
20, with softmax as in Mixtral.
"""

from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from penstock.models.ours.layers import Linear, SwiGLU

if TYPE_CHECKING:
    from penstock.models.row_tensors import RowTensors
    from penstock.models.settings import BlockSettings, ModelSettings


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
        self._documents = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(device)
        self._shares = torch.from_numpy(real / lengths).to(device)
        self.evenness = torch.zeros((), device=device)
        self.loss = torch.zeros((), device=device)

    def add(self, probabilities: Tensor, chosen: Tensor, factor: float) -> None:
        """A block's probabilities [T, experts] and chosen experts [T, experts per token], and its
        loss's factor.
        """
        experts, each = probabilities.shape[1], chosen.shape[1]
        places = self._documents[:, None] * experts + chosen
        uses = torch.bincount(places.flatten(), minlength=self._count * experts).view(
            self._count, experts
        )
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
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        parts = tokens.repeat_interleave(self.each, 0)[order].split(counts)
        # An expert without tokens runs too, so that each weight has a gradient on each rank.
        found = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        back = found[order.argsort()].unflatten(0, (-1, self.each))
        out: Tensor = (back * weights.to(x.dtype)[..., None]).sum(1).view_as(x)
        return out
