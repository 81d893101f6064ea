"""A block of our transformer: attention or a recurrence, then the SwiGLU or one of experts.

RMSNorm before each part (Zhang & Sennrich 2019), rotary positions (RoFormer, arXiv:2104.09864;
halves of a head rotate, as in Llama's Hugging Face layout), grouped-query attention
(arXiv:2305.13245), SwiGLU (arXiv:2002.05202), no biases.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from penstock.core.errors import ConfigError
from penstock.models.attention import LayerAttend
from penstock.models.ours.experts import Balance, Experts
from penstock.models.ours.layers import Linear, RMSNorm, SwiGLU
from penstock.models.recurrent.mixers import Carried, make_mixer
from penstock.models.settings import BlockSettings, ModelSettings


def rotary_angles(
    positions: Tensor, head_width: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., 1, head_width / 2] of positions [...]; angles in float32, as in
    transformers.
    """
    steps = torch.arange(0, head_width, 2, device=positions.device).float() / head_width
    angles = positions[..., None, None].float() * (1.0 / theta**steps)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (i, i + half) of a head by its angle; a new tensor, [..., heads,
    head_width].
    """
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@final
class Attention(nn.Module):
    """Projections to queries, keys and values, and to the output; `attend` does the rest.

    It is the `AttentionLayer` that `attend` gets.

    Attributes:
        place: Its number among the model's attentions.
        window: Maximum tokens that a token sees, including itself; None: all before it.
        sinks: None: it has none.
    """

    sinks: Tensor | None = None

    def __init__(self, settings: ModelSettings, kind: BlockSettings, place: int) -> None:
        super().__init__()
        self.place, self.window = place, kind.sliding_window
        self.head_width = settings.each_head
        queries, keys = settings.heads * self.head_width, settings.key_heads * self.head_width
        self.query = Linear(settings.width, queries)
        self.key = Linear(settings.width, keys)
        self.value = Linear(settings.width, keys)
        self.output = Linear(queries, settings.width)
        self.query_norm = (
            RMSNorm(self.head_width, settings.norm_eps) if kind.qk_norm else nn.Identity()
        )
        self.key_norm = (
            RMSNorm(self.head_width, settings.norm_eps) if kind.qk_norm else nn.Identity()
        )

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: LayerAttend) -> Tensor:
        """[..., width] → the same."""
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_width))
            for part in (self.query, self.key, self.value)
        )
        q, k = self.query_norm(q), self.key_norm(k)
        # Not its place: compiled code would be made again for each number.
        found = attend(self, rotate(q, rotary), rotate(k, rotary), v)
        out: Tensor = self.output(found.flatten(-2))
        return out


@final
class Block(nn.Module):
    """Attention or a recurrence, then the SwiGLU or one of experts, each added to its input.

    A stochastic block has several ways to mix tokens, of which the first is its main one.
    """

    def __init__(self, settings: ModelSettings, kind: BlockSettings, places: Sequence[int]) -> None:
        """A block with new weights.

        Args:
            settings: Of the model.
            kind: Of the block.
            places: The number of each of its ways to mix tokens among the model's attentions, or
                recurrences.
        """
        super().__init__()
        main, *others = settings.mixers(kind)
        self.attention_norm = RMSNorm(settings.width, settings.norm_eps)
        self.mixer = make_mixer(settings, main) if main.is_recurrent else None
        self.attention = None if main.is_recurrent else Attention(settings, main, places[0])
        self.others = nn.ModuleList(
            make_mixer(settings, other) if other.is_recurrent else Attention(settings, other, place)
            for other, place in zip(others, places[1:], strict=True)
        )
        self.mlp_norm = RMSNorm(settings.width, settings.norm_eps)
        self.mlp = (
            SwiGLU(settings.width, settings.inner_width)
            if kind.experts is None
            else Experts(settings, kind)
        )

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        place: int,
        attend: LayerAttend,
        carried: Carried | None = None,
        balance: Balance | None = None,
        choice: int = 0,
    ) -> Tensor:
        """[..., width] → the same; `place` is that of the chosen way to mix tokens."""
        normed = self.attention_norm(x)
        chosen = (self.attention or self.mixer) if choice == 0 else self.others[choice - 1]
        if isinstance(chosen, Attention):
            x = x + chosen(normed, rotary, attend)
        else:
            assert chosen is not None
            if carried is None:
                raise ConfigError("recurrent blocks must know the documents; give run(carried=…)")
            x = x + chosen(normed, place, carried)
        normed = self.mlp_norm(x)
        out: Tensor = x + (
            self.mlp(normed, balance) if isinstance(self.mlp, Experts) else self.mlp(normed)
        )
        return out
