"""A decoder-only transformer over packed rows, written to be read from top to bottom, and `build_model`.

RMSNorm before each part (Zhang & Sennrich 2019), rotary positions (RoFormer, arXiv:2104.09864; halves of a head rotate,
as in Llama's Hugging Face layout), grouped-query attention (arXiv:2305.13245), SwiGLU (arXiv:2002.05202), no biases.
Further prediction heads are blocks on the trunk that share norm and unembedding (Gloeckle et al. 2024,
arXiv:2404.19737): the last block of the plain model is the head of distance 1.

Positions and the attention function are given from outside. So the same code runs a packed row, sequences with a cache,
and a part of a row; it knows nothing about documents.

Initial weights are a function of the seed and of each weight's name, drawn on the CPU: the same on every device and
rank, and for every weight that two models of different depth share.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from penstock.core.errors import ConfigError
from penstock.core.randomness import key_for
from penstock.inputs.media import BlankImage, RowMedia
from penstock.inputs.model_input import InputRequirements, ModelInput
from penstock.inputs.prompt_images import PromptImages
from penstock.models.cache import Cache, LayerAttend
from penstock.models.image_features import FeatureCache
from penstock.models.language_model import LanguageModel, PackingVerdict, RowTensors
from penstock.models.layers import Linear, RMSNorm
from penstock.models.lora import LoraSettings
from penstock.models.own_code import is_own_code
from penstock.models.own_model import build_own
from penstock.models.recurrent.borders import Borders
from penstock.models.recurrent.mixers import Carried, Mixer, RowDocuments, make_mixer
from penstock.models.settings import BlockSettings, ModelSettings
from penstock.models.vision import VisionTower, check_images, with_images

HUGGING_FACE = "hf:"
"""Prefix of a folder of transformers in a run file."""


def rotary_angles(positions: Tensor, head_width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., 1, head_width / 2] of positions [...]; angles in float32, as in transformers."""
    steps = torch.arange(0, head_width, 2, device=positions.device).float() / head_width
    angles = positions[..., None, None].float() * (1.0 / theta**steps)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (i, i + half) of a head by its angle; a new tensor, [..., heads, head_width]."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@final
class Attention(nn.Module):
    """Projections to queries, keys and values, and to the output; `attend` does the rest."""

    def __init__(self, settings: ModelSettings, qk_norm: bool) -> None:
        super().__init__()
        self.head_width = settings.each_head
        queries, keys = settings.heads * self.head_width, settings.key_heads * self.head_width
        self.query = Linear(settings.width, queries)
        self.key = Linear(settings.width, keys)
        self.value = Linear(settings.width, keys)
        self.output = Linear(queries, settings.width)
        self.query_norm = RMSNorm(self.head_width, settings.norm_eps) if qk_norm else nn.Identity()
        self.key_norm = RMSNorm(self.head_width, settings.norm_eps) if qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], layer: int, attend: LayerAttend) -> Tensor:
        """[..., width] → the same."""
        q, k, v = (part(x).unflatten(-1, (-1, self.head_width)) for part in (self.query, self.key, self.value))
        q, k = self.query_norm(q), self.key_norm(k)
        out: Tensor = self.output(attend(layer, rotate(q, rotary), rotate(k, rotary), v).flatten(-2))
        return out


@final
class SwiGLU(nn.Module):
    """down(silu(gate(x)) × up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = Linear(width, inner), Linear(width, inner), Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] → the same."""
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out


@final
class Block(nn.Module):
    """Attention or a recurrence, then the SwiGLU, each added to its input."""

    def __init__(self, settings: ModelSettings, kind: BlockSettings) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(settings.width, settings.norm_eps)
        self.mixer = make_mixer(settings, kind) if kind.is_recurrent else None
        self.attention = None if kind.is_recurrent else Attention(settings, kind.qk_norm)
        self.mlp_norm = RMSNorm(settings.width, settings.norm_eps)
        self.mlp = SwiGLU(settings.width, settings.inner_width)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        layer: int,
        attend: LayerAttend,
        carried: Carried | None = None,
    ) -> Tensor:
        """[..., width] → the same; `layer` counts the blocks of its kind, attention or recurrences."""
        normed = self.attention_norm(x)
        if self.attention is not None:
            x = x + self.attention(normed, rotary, layer, attend)
        else:
            assert self.mixer is not None
            if carried is None:
                raise ConfigError("recurrent blocks must know the documents; set micro_sequences to 1")
            x = x + self.mixer(normed, layer, carried)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


@final
class Transformer(nn.Module):
    """The model; make it with `build_model`, which initialises its weights.

    Attributes:
        settings: Its size and shape.
        lora: The LoRA that trains next to it; see `add_lora`.
        blocks: `layers` blocks, the last of which is the head of distance 1, then one for each further distance.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        if settings.vocab_size is None:
            raise ConfigError("model.vocab_size is not known yet; settings.with_vocabulary(tokenizer.vocab_size)")
        self.settings = settings
        self.lora: LoraSettings | None = None
        self.embedding = nn.Embedding(settings.vocab_size, settings.width)
        kinds = [settings.block(layer) for layer in range(settings.num_blocks)]
        self.blocks = nn.ModuleList(Block(settings, kind) for kind in kinds)
        self._places = [
            sum(one.is_recurrent == kind.is_recurrent for one in kinds[:layer]) for layer, kind in enumerate(kinds)
        ]
        self.norm = RMSNorm(settings.width, settings.norm_eps)
        self.unembedding = None if settings.tied else Linear(settings.width, settings.vocab_size)
        self.vision = None if settings.vision is None else VisionTower(settings, _plain_block, Linear, RMSNorm)

    @property
    def uses_our_attention(self) -> bool:
        """Whether attention alone mixes tokens."""
        return not self.settings.is_recurrent

    def forward(self, row: RowTensors) -> Tensor:
        """Final hidden states [D, T, width] of a row, for each target distance."""
        embedded = None
        if self.vision is not None and row.source.media is not None:
            embedded = with_images(self.embedding(row.tokens).to(self.compute_dtype), self.vision, row.source.media)
        carried = None
        if self.settings.is_recurrent:
            carried = RowDocuments(Borders([0, *row.rule.pieces[:, 2]], self.device))
        attention = row.attention
        # A compiled model must not depend on the row's own arrays, which it would through the row's method.
        attend = row.attend if row.others else lambda layer, q, k, v: attention(q, k, v)
        return self.run(row.tokens, row.positions, attend, embedded=embedded, carried=carried)

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: LayerAttend,
        distances: int | None = None,
        embedded: Tensor | None = None,
        carried: Carried | None = None,
    ) -> Tensor:
        """Final hidden states, with `attend` as the attention.

        Args:
            tokens: int64 [...].
            positions: int64 [...].
            attend: Called once per block with attention, in order.
            distances: Number of prediction heads to run; None: all.
            embedded: [..., width] embeddings in place of those of the tokens, with features of images among them.
            carried: The documents, for recurrent blocks.

        Returns:
            [D, ..., width].
        """
        dtype, trunk = self.compute_dtype, self.settings.layers - 1
        rotary = rotary_angles(positions, self.settings.each_head, self.settings.rope_theta, dtype)
        x = self.embedding(tokens).to(dtype) if embedded is None else embedded
        for layer in range(trunk):
            x = self.blocks[layer](x, rotary, self._places[layer], attend, carried)
        heads = range(trunk, trunk + (distances or self.settings.prediction_heads))
        found = [self.blocks[layer](x, rotary, self._places[layer], attend, carried) for layer in heads]
        out: Tensor = self.norm(torch.stack(found))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] → [..., vocab], in float32 or wider."""
        weight = self.embedding.weight if self.unembedding is None else self.unembedding.weight
        scores = linear(hidden, weight.to(hidden.dtype))
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def packing(self, slots: int) -> PackingVerdict:
        """Documents may share any row: only attention mixes tokens, and it sees one document at a time."""
        return PackingVerdict(slots)

    def new_cache(self, sequences: int, capacity: int) -> Cache:
        """An empty cache for `sequences` sequences of at most `capacity` tokens."""
        kinds = [self.settings.block(layer) for layer in range(self.settings.layers)]
        windows = tuple(kind.sliding_window for kind in kinds if not kind.is_recurrent)
        return Cache(
            layers=len(windows),
            sequences=sequences,
            capacity=capacity,
            kv_heads=self.settings.key_heads,
            head_width=self.settings.each_head,
            device=self.device,
            dtype=self.compute_dtype,
            windows=windows,
            recurrent=self.settings.is_recurrent,
        )

    @torch.no_grad()
    def extend(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: Cache,
        sequences: Tensor | None = None,
        images: Sequence[PromptImages | None] | None = None,
    ) -> Tensor:
        """Append new tokens to sequences, which grow by `lengths`.

        Args:
            tokens: int64 [B, n] on the model's device, right-padded with any id.
            lengths: int64 [B], preferably on the CPU: tokens of each row. Results of a row with 0 are undefined.
            cache: From `new_cache`.
            sequences: int64 [B]: the cache's sequence of each row; None: all, in order.
            images: Of each row's prompt; None: there are none.

        Returns:
            Logits [B, vocab] after each row's last new token.

        Raises:
            ConfigError: Shapes do not fit, or a sequence exceeds the cache's capacity.
        """
        growth = cache.growth(tokens, lengths, sequences)
        embedded = None if images is None else self._embedded(tokens, growth.parts(images))
        carried = growth if self.settings.is_recurrent else None
        hidden = self.run(tokens, growth.positions, growth.attend, distances=1, embedded=embedded, carried=carried)[0]
        growth.done()
        return self.logits(hidden[growth.last])

    def _embedded(self, tokens: Tensor, parts: Sequence[RowMedia | None]) -> Tensor | None:
        """Embeddings [B, n, width] of new tokens, with features of images at their slots; None: there are none."""
        if self.vision is None or not any(parts):
            return None
        found = list(self.embedding(tokens).to(self.compute_dtype))
        for row, media in enumerate(parts):
            if media:
                found[row] = with_images(found[row], self.vision, media)
        return torch.stack(found)

    def cache_features(self, folder: str | Path, blank: BlankImage) -> None:
        """Keep the features of images in a folder."""
        self.expect_images(blank)
        assert self.vision is not None
        self.vision.cache = FeatureCache(folder, dict(self.vision.named_parameters()))

    def expect_images(self, blank: BlankImage) -> None:
        """Check that its vision tower reads images of this kind."""
        if self.vision is None:
            raise ConfigError("the model has no vision tower, so it cannot read images; set model.vision")
        check_images(self.vision, blank)

    def tensors(self, row: ModelInput, backend: str = "auto") -> RowTensors:
        """A row on the model's device, ready for this model's attention.

        Raises:
            ConfigError: As `RowTensors.of`.
        """
        return RowTensors.of(
            row,
            device=self.device,
            dtype=self.compute_dtype,
            backend=backend,
            windows=self.settings.windows,
            vocab_size=self.vocab_size,
        )

    def requirements(self) -> InputRequirements:
        """What a loader must provide for it."""
        return self.settings.requirements()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, under transformers' name: `check_isolation` needs it to trace tokens."""
        return self.embedding

    @property
    def vocab_size(self) -> int:
        """Number of known ids."""
        return self.embedding.num_embeddings

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embedding.weight.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the settings if weights are in float32, otherwise that of the weights."""
        kept = self.embedding.weight.dtype
        return getattr(torch, self.settings.dtype) if kept == torch.float32 else kept

    @property
    def prediction_weights(self) -> tuple[float, ...]:
        """How much each target distance counts in the loss."""
        return self.settings.distance_weights


def _plain_block(settings: ModelSettings) -> Block:
    return Block(settings, BlockSettings())


def build_model(
    settings: ModelSettings | str,
    *,
    vocab_size: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> LanguageModel:
    """Make a model that is ready to train, with initial weights or from a folder of transformers.

    Args:
        settings: Settings of a transformer, or "hf:path", or "module:function" of your own code (see `own_model`).
        vocab_size: Number of ids of the tokenizer; the model has at least as many.
        device: Target device.
        dtype: Dtype of the weights; None: float32, or float64 if the settings compute in it.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: The vocabulary does not fit, or there is no such model.
        FormatError: The weights of the folder are quantised.
        CorruptionError: The weights of the folder are damaged, missing, left over, or not finite.
    """
    if isinstance(settings, str):
        if not settings.startswith(HUGGING_FACE):
            return _own(settings, vocab_size, seed, device, dtype)
        from penstock.models.huggingface_model import load_huggingface

        path = settings.removeprefix(HUGGING_FACE)
        wrapped = load_huggingface(path, device=device, dtype=dtype or torch.float32)
        if vocab_size > wrapped.vocab_size:
            raise ConfigError(
                f"{path}: the model has embeddings for {wrapped.vocab_size} ids and the tokenizer has {vocab_size}; "
                "prepare the data with the model's tokenizer"
            )
        return wrapped
    settings = settings.with_vocabulary(vocab_size)
    dtype = dtype or (torch.float64 if settings.dtype == "float64" else torch.float32)
    model = empty_transformer(settings, device, dtype)
    initialise(model, seed)
    return model


def _own(code: str, vocab_size: int, seed: int, device: torch.device | str, dtype: torch.dtype | None) -> LanguageModel:
    if not is_own_code(code):
        raise ConfigError(
            f"model {code!r} is unknown; give the settings of a transformer, hf:path, from:RUN, or module:function of "
            "your own code"
        )
    return build_own(code, vocab_size, seed).to(device=device, dtype=dtype or torch.float32)


def empty_transformer(settings: ModelSettings, device: torch.device | str, dtype: torch.dtype) -> Transformer:
    """A transformer with uninitialised weights."""
    with torch.device("meta"):
        model = Transformer(settings)
    return model.to(dtype).to_empty(device=device)


def initialise(model: Transformer, seed: int) -> None:
    """Initialise weights: norms with 1, all others from a normal distribution.

    Weights that write to the residual stream are smaller by √(2 × layers), so that its variance does not grow with
    depth.

    Source: GPT-2 (Radford et al. 2019), section 2.3.
    """
    settings = model.settings
    for name, module in model.named_modules():
        if isinstance(module, Mixer):
            module.initialise(torch.Generator("cpu").manual_seed(key_for(seed, "weights", name)))
    for name, weight in model.named_parameters():
        if name.endswith(("decay_log", "step_bias")):
            continue
        if weight.ndim == 1:
            nn.init.ones_(weight)
            continue
        writes = name.endswith(("attention.output.weight", "mixer.output.weight", "mlp.down.weight"))
        std = settings.init_std / (2 * settings.layers) ** 0.5 if writes else settings.init_std
        generator = torch.Generator("cpu").manual_seed(key_for(seed, "weights", name))
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
