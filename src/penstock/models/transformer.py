"""A decoder-only transformer over packed rows, to be read from top to bottom.

RMSNorm before each part (Zhang & Sennrich 2019), rotary positions (RoFormer, arXiv:2104.09864; halves of a head rotate,
as in Llama's Hugging Face layout), grouped-query attention (arXiv:2305.13245), SwiGLU (arXiv:2002.05202), no biases.
Further prediction heads are blocks on the trunk that share norm and unembedding (Gloeckle et al. 2024,
arXiv:2404.19737): the last block of the plain model is the head of distance 1.

Tokens are told apart by their positions and by how they attend, both given from outside. So one pass serves a packed
row, sequences with a cache, and a part of a row, and nothing in here knows of documents.
"""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from penstock.errors import ConfigError
from penstock.inputs import InputRequirements, ModelInput
from penstock.models.cache import Cache, LayerAttend
from penstock.models.lora import LoraSettings
from penstock.models.packing import PackingVerdict
from penstock.models.row_tensors import RowTensors
from penstock.models.settings import ModelSettings


@final
class Linear(nn.Linear):
    """A matrix without a bias, in the dtype of what it is applied to: weights may be kept in a wider one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., outputs]."""
        return linear(x, self.weight.to(x.dtype))


@final
class RMSNorm(nn.Module):
    """Numbers over their root mean square, times a weight each."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] → the same."""
        return rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotary_angles(positions: Tensor, head_width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., 1, head_width / 2] of positions [...]; angles in float32, as transformers has them."""
    steps = torch.arange(0, head_width, 2, device=positions.device).float() / head_width
    angles = positions[..., None, None].float() * (1.0 / theta**steps)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + half) of a head's numbers by its angle; a new tensor, [..., heads, head_width]."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@final
class Attention(nn.Module):
    """Queries, keys and values; how they attend is given."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.head_width = settings.each_head
        queries, keys = settings.heads * self.head_width, settings.key_heads * self.head_width
        self.query = Linear(settings.width, queries)
        self.key = Linear(settings.width, keys)
        self.value = Linear(settings.width, keys)
        self.output = Linear(queries, settings.width)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], layer: int, attend: LayerAttend) -> Tensor:
        """[..., width] → the same."""
        q, k, v = (part(x).unflatten(-1, (-1, self.head_width)) for part in (self.query, self.key, self.value))
        out: Tensor = self.output(attend(layer, rotate(q, rotary), rotate(k, rotary), v).flatten(-2))
        return out


@final
class SwiGLU(nn.Module):
    """silu(gate) × up, and down again."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = Linear(width, inner), Linear(width, inner), Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] → the same."""
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out


@final
class Block(nn.Module):
    """Attention, then the SwiGLU, each added to what comes in."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(settings.width, settings.norm_eps)
        self.attention = Attention(settings)
        self.mlp_norm = RMSNorm(settings.width, settings.norm_eps)
        self.mlp = SwiGLU(settings.width, settings.inner_width)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], layer: int, attend: LayerAttend) -> Tensor:
        """[..., width] → the same."""
        attended: Tensor = x + self.attention(self.attention_norm(x), rotary, layer, attend)
        out: Tensor = attended + self.mlp(self.mlp_norm(attended))
        return out


@final
class Transformer(nn.Module):
    """The model; make it with `build_model`, which initialises its weights.

    Attributes:
        settings: What it is made of.
        lora: What trains beside it, see `add_lora`.
        blocks: `layers` of them, of which the last is the head of distance 1, then one for each further distance.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        if settings.vocab_size is None:
            raise ConfigError("model.vocab_size is not known yet; settings.with_vocabulary(tokenizer.vocab_size)")
        self.settings = settings
        self.lora: LoraSettings | None = None
        self.embedding = nn.Embedding(settings.vocab_size, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.num_blocks))
        self.norm = RMSNorm(settings.width, settings.norm_eps)
        self.unembedding = None if settings.tied else Linear(settings.width, settings.vocab_size)

    def forward(self, row: RowTensors) -> Tensor:
        """Final hidden states [D, T, width] of a row, one for each target distance."""
        return self.run(row.tokens, row.positions, lambda layer, q, k, v: row.attention(q, k, v))

    def run(self, tokens: Tensor, positions: Tensor, attend: LayerAttend, distances: int | None = None) -> Tensor:
        """Final hidden states, attending by a function of yours.

        Args:
            tokens: int64 [...].
            positions: int64 [...].
            attend: Called once a block, in order.
            distances: How many prediction heads are run; None: all.

        Returns:
            [D, ..., width].
        """
        dtype, trunk = self.compute_dtype, self.settings.layers - 1
        rotary = rotary_angles(positions, self.settings.each_head, self.settings.rope_theta, dtype)
        x = self.embedding(tokens).to(dtype)
        for layer in range(trunk):
            x = self.blocks[layer](x, rotary, layer, attend)
        heads = range(trunk, trunk + (distances or self.settings.prediction_heads))
        out: Tensor = self.norm(torch.stack([self.blocks[layer](x, rotary, layer, attend) for layer in heads]))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] → [..., vocab], in float32 or wider."""
        weight = self.embedding.weight if self.unembedding is None else self.unembedding.weight
        scores = linear(hidden, weight.to(hidden.dtype))
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def packing(self, slots: int) -> PackingVerdict:
        """Documents may share any row: attention alone mixes tokens, and it is given a document's only."""
        return PackingVerdict(slots)

    def new_cache(self, sequences: int, capacity: int) -> Cache:
        """Room for so many sequences of at most so many tokens."""
        return Cache(
            layers=self.settings.layers,
            sequences=sequences,
            capacity=capacity,
            kv_heads=self.settings.key_heads,
            head_width=self.settings.each_head,
            device=self.device,
            dtype=self.compute_dtype,
            window=self.settings.sliding_window,
        )

    @torch.no_grad()
    def extend(self, tokens: Tensor, lengths: Tensor, cache: Cache, sequences: Tensor | None = None) -> Tensor:
        """Feed new tokens of sequences, which grow by `lengths`.

        Args:
            tokens: int64 [B, n] on the model's device, right-padded with any id.
            lengths: int64 [B], best on the CPU: tokens of each row. A row of none has no meaning in the result.
            cache: Of `new_cache`.
            sequences: int64 [B]: which of the cache's sequences the rows are; None: all, in order.

        Returns:
            Logits [B, vocab] after each row's last new token.

        Raises:
            ConfigError: Shapes do not fit, or a sequence outgrows the cache.
        """
        growth = cache.growth(tokens, lengths, sequences)
        hidden = self.run(tokens, growth.positions, growth.attend, distances=1)[0]
        growth.done()
        return self.logits(hidden[growth.last])

    def tensors(self, row: ModelInput, backend: str = "auto") -> RowTensors:
        """A row on the model's device, with attention as this model attends.

        Raises:
            ConfigError: As `RowTensors.of`.
        """
        return RowTensors.of(
            row,
            device=self.device,
            dtype=self.compute_dtype,
            backend=backend,
            window=self.settings.sliding_window,
            vocab_size=self.vocab_size,
        )

    def requirements(self) -> InputRequirements:
        """What a loader must give for it."""
        return self.settings.requirements()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, as transformers' models have it: by it `check_isolation` follows tokens."""
        return self.embedding

    @property
    def vocab_size(self) -> int:
        """Ids below it are known."""
        return self.embedding.num_embeddings

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.embedding.weight.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """That of the settings while weights are in float32, else that of the weights."""
        kept = self.embedding.weight.dtype
        return getattr(torch, self.settings.dtype) if kept == torch.float32 else kept

    @property
    def prediction_weights(self) -> tuple[float, ...]:
        """How much each target distance counts in the loss."""
        return self.settings.distance_weights
