"""A plain torch model with positions and documents of `step.torch()`, as the page on loops of one's
own shows it.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import penstock as ps
from penstock.core.errors import IsolationError


class Plain(nn.Module):
    """One layer of attention; `separate` says whether its mask keeps documents apart."""

    def __init__(self, *, separate: bool) -> None:
        super().__init__()
        self.separate = separate
        self.tokens, self.positions = nn.Embedding(50, 16), nn.Embedding(32, 16)
        self.mix, self.head = nn.Linear(16, 48), nn.Linear(16, 50)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor
    ) -> torch.Tensor:
        same = documents[:, :, None] == documents[:, None, :]
        mask = (same if self.separate else torch.ones_like(same)).tril()[:, None]
        hidden = self.tokens(tokens) + self.positions(positions)
        q, k, v = self.mix(hidden)[:, None].chunk(3, -1)
        scores: torch.Tensor = self.head(
            hidden + scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0]
        )
        return scores


def _one_row(model: nn.Module, row: ps.ModelInput) -> torch.Tensor:
    fields: Any = ps.to_torch(row)
    scores: torch.Tensor = model(
        fields["tokens"][None], fields["positions"][None], fields["document_ids"][None]
    )[0]
    return scores


def test_the_mask_of_the_page_keeps_documents_apart() -> None:
    torch.manual_seed(0)
    assert ps.check_isolation(Plain(separate=True), forward=_one_row).dependence_checked


def test_a_causal_mask_alone_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(IsolationError, match="documents of one row see each other"):
        ps.check_isolation(Plain(separate=False), forward=_one_row)
