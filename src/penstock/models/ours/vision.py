"""The vision tower of our transformer: patches of images become features of the text's width.

A Vision Transformer (Dosovitskiy et al. 2021, arXiv:2010.11929) without a class token: a linear
embedding of each patch, a learned vector for its place, blocks in which all patches of an image see
each other, and a projection to the width of the text. The features take the places of the image's
slots in the text (as in LLaVA, Liu et al. 2023, arXiv:2304.08485).
"""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from penstock.core.errors import ConfigError
from penstock.media.rows import BlankImage, RowMedia
from penstock.models.image_features import FeatureCache
from penstock.models.ours.blocks import Block
from penstock.models.ours.layers import Linear, RMSNorm
from penstock.models.settings import BlockSettings, ModelSettings
from penstock.plan.inputs.torch_tensors import on_device


@final
class VisionTower(nn.Module):
    """Features of images.

    Args:
        settings: Of the whole model.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        assert settings.vision is not None
        own = settings.vision
        self.settings = own
        self.cache: FeatureCache | None = None
        inner = settings.of_vision
        self.embedding = Linear(own.patch_values, own.width)
        self.places = nn.Parameter(torch.empty(own.patches, own.width))
        self.blocks = nn.ModuleList(
            Block(inner, BlockSettings(), [place]) for place in range(own.layers)
        )
        self.norm = RMSNorm(own.width, settings.norm_eps)
        self.projection = Linear(own.width, settings.width)

    def forward(self, pixels: Tensor) -> Tensor:
        """[images, patches, 3 × patch²] → [images × patches, width of the text]."""
        x = self.embedding(pixels) + self.places.to(pixels.dtype)
        # Places are learned, so nothing is rotated: cosines of 1, sines of 0.
        half = self.settings.width // self.settings.heads // 2
        rotary = x.new_ones(half), x.new_zeros(half)
        for number, block in enumerate(self.blocks):
            x = block(x, rotary, number, _attend)
        out: Tensor = self.projection(self.norm(x)).flatten(0, 1)
        return out


def _attend(_: object, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of all patches of an image to each other, [images, patches, heads, dim]."""
    q, k, v = (part.transpose(1, 2) for part in (query, key, value))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def check_images(tower: VisionTower, blank: BlankImage) -> None:
    """Refuse images of another processor.

    Raises:
        ConfigError: The images were made for other patches, or stand at another token.
    """
    settings = tower.settings
    found, expected = int(blank.tokens[0]), settings.image_token
    shape = tuple(blank.arrays["pixel_values"].shape[1:])
    if found != expected or shape != (settings.patches, settings.patch_values):
        raise ConfigError(
            f"the data's images stand at token {found} with patches of {shape[1]} values, "
            f"{shape[0]} an image; the model expects token {expected}, "
            f"{settings.patch_values} values, {settings.patches} an image: set model.vision "
            "as the processor of the data"
        )


def with_images(x: Tensor, tower: VisionTower, media: RowMedia) -> Tensor:
    """Embeddings [T, width] with the features of a row's images at their slots.

    Raises:
        ConfigError: As `check_images`.
    """
    check_images(tower, media.blank)
    settings = tower.settings
    arrays = media.arrays if len(media) else media.blank.arrays

    def features_of_all() -> Tensor:
        found: Tensor = tower(on_device(arrays["pixel_values"], x.device).to(x.dtype))
        return found

    if tower.cache is not None and media.keys:
        slots = [settings.patches] * len(media)
        [features] = tower.cache.rows(media.keys, slots, lambda: [features_of_all()], x.device)
        features = features.to(x.dtype)
    else:
        features = features_of_all()
    if not len(media):
        # All weights have gradients on each rank, whatever its rows hold.
        nothing: Tensor = 0 * features.sum()
        return x + nothing
    places = on_device(media.slots, x.device)
    placed: Tensor = x.index_copy(0, places, features)
    return placed
