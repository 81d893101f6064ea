"""The size and shape of a transformer, read from the section `model` of a run file. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, final

from penstock.core.errors import ConfigError
from penstock.inputs.model_input import InputRequirements

MOST = 1 << 31
"""Upper bound of every count in a model; torch indexes tensors with 64 bits."""
MOST_DISTANCES = 64
"""Maximum number of target distances that a loader gives."""
Dtype = Literal["float32", "bfloat16", "float64"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSettings:
    """A vision tower: a small Vision Transformer over the patches of square images (`PatchProcessor`)."""

    image_token: int
    """Id of the token that stands for each patch of an image."""
    image_size: int = 64
    """Side of an image in pixels."""
    patch: int = 16
    """Side of a patch in pixels."""
    layers: int = 2
    """Number of blocks."""
    width: int = 64
    """Size of a patch's hidden state."""
    heads: int = 4
    """Number of heads."""

    def __post_init__(self) -> None:
        for name in ("image_size", "patch", "layers", "width", "heads"):
            _check_count(f"vision.{name}", getattr(self, name))
        if not 0 <= self.image_token < MOST:
            raise ConfigError(f"model.vision.image_token must be a token id, got {self.image_token!r}")
        if self.image_size % self.patch or self.width % (2 * self.heads):
            raise ConfigError(
                f"model.vision.image_size {self.image_size} must be a multiple of patch {self.patch}, and width "
                f"{self.width} one of twice the heads {self.heads}"
            )

    @property
    def patches(self) -> int:
        """Of an image."""
        return (self.image_size // self.patch) ** 2

    @property
    def patch_values(self) -> int:
        """Numbers of a patch: its pixels in three colours."""
        return 3 * self.patch**2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

    vocab_size: int | None = None
    """Rows of the embedding; None: the tokenizer's number of ids."""
    layers: int = 4
    """Number of blocks."""
    width: int = 128
    """Size of a token's hidden state."""
    heads: int = 4
    """Number of query heads."""
    kv_heads: int | None = None
    """Number of key and value heads, a divisor of `heads`; None: `heads`."""
    head_width: int | None = None
    """Size of a head, even; None: width / heads."""
    mlp_width: int | None = None
    """Inner size of the SwiGLU; None: 8/3 of the width, rounded up to a multiple of 32."""
    rope_theta: float = 10000.0
    """Base of the wavelengths of rotary positions."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tied: bool = True
    """Use the embedding as the output matrix too."""
    prediction_heads: int = 1
    """Multi-token prediction: a position predicts the tokens at distances 1 to this number, each further distance with
    one more block on the trunk. Only the first head is exported and used for generation."""
    prediction_weights: tuple[float, ...] = ()
    """How much each distance counts in the loss, one number per head; empty: 1 each."""
    sliding_window: int | None = None
    """Maximum tokens that a token sees, including itself; None: all before it in its document."""
    init_std: float = 0.02
    """Standard deviation of initial weights; divided by √(2 × layers) for those that write to the residual stream."""
    dtype: Dtype = "float32"
    """Dtype of computation. Weights are kept in float32 for bfloat16 too; float64 is for exact comparisons."""
    vision: VisionSettings | None = None
    """A vision tower, for data with images; None: the model reads text only."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "prediction_heads"):
            _check_count(name, getattr(self, name))
        for name in ("vocab_size", "kv_heads", "head_width", "mlp_width", "sliding_window"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.prediction_heads > MOST_DISTANCES:
            raise ConfigError(f"model.prediction_heads must be at most {MOST_DISTANCES}, got {self.prediction_heads}")
        for name in ("rope_theta", "norm_eps", "init_std"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"model.{name} must be above 0, got {getattr(self, name)!r}")
        if self.head_width is None and self.width % self.heads:
            raise ConfigError(
                f"model.width {self.width} is not a multiple of model.heads {self.heads}; change one, or set head_width"
            )
        if self.each_head % 2:
            raise ConfigError(f"model.head_width must be even for rotary positions, got {self.each_head}")
        if self.heads % self.key_heads:
            raise ConfigError(f"model.kv_heads must divide heads {self.heads}, got {self.kv_heads}")
        if len(self.distance_weights) != self.prediction_heads or min(self.distance_weights) < 0:
            raise ConfigError(
                f"model.prediction_weights must be {self.prediction_heads} numbers of 0 or more, one for each of the "
                f"prediction_heads; got {list(self.prediction_weights)}"
            )
        if self.dtype not in ("float32", "bfloat16", "float64"):
            raise ConfigError(f"model.dtype must be float32, bfloat16 or float64, got {self.dtype!r}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "ModelSettings":
        """Settings from plain values, such as those of JSON."""
        vision = values.get("vision")
        vision = VisionSettings(**vision) if isinstance(vision, Mapping) else vision
        weights = tuple(values.get("prediction_weights", ()))
        return cls(**{**values, "vision": vision, "prediction_weights": weights})

    @property
    def of_vision(self) -> "ModelSettings":
        """Settings of the blocks of the vision tower."""
        assert self.vision is not None
        own = self.vision
        return ModelSettings(width=own.width, heads=own.heads, layers=own.layers, norm_eps=self.norm_eps)

    @property
    def key_heads(self) -> int:
        """Number of key and value heads."""
        return self.kv_heads or self.heads

    @property
    def each_head(self) -> int:
        """Size of a head."""
        return self.head_width or self.width // self.heads

    @property
    def inner_width(self) -> int:
        """Inner size of the SwiGLU."""
        return self.mlp_width or -(-8 * self.width // (3 * 32)) * 32

    @property
    def num_blocks(self) -> int:
        """Number of blocks, of the trunk and of all prediction heads."""
        return self.layers - 1 + self.prediction_heads

    @property
    def distance_weights(self) -> tuple[float, ...]:
        """How much each distance counts in the loss."""
        return self.prediction_weights or (1.0,) * self.prediction_heads

    def with_vocabulary(self, vocab_size: int) -> "ModelSettings":
        """The settings for a tokenizer with `vocab_size` ids.

        Raises:
            ConfigError: `vocab_size` is already set, and too small.
        """
        if self.vocab_size is not None and self.vocab_size < vocab_size:
            raise ConfigError(
                f"model.vocab_size {self.vocab_size} is less than the tokenizer's {vocab_size} ids; leave it out, or "
                f"give {vocab_size} or more"
            )
        return replace(self, vocab_size=self.vocab_size or vocab_size)

    def num_parameters(self) -> int:
        """Number of weights, including those of further prediction heads.

        Raises:
            ConfigError: `vocab_size` is not known yet.
        """
        if self.vocab_size is None:
            raise ConfigError("model.vocab_size is not known yet; with_vocabulary(tokenizer.vocab_size) sets it")
        text = self.num_blocks * self._block_parameters() + self.width
        tower = 0
        if (own := self.vision) is not None:
            tower = own.layers * self.of_vision._block_parameters() + own.width * (own.patch_values + own.patches + 1)
            tower += own.width * self.width
        return text + tower + self.vocab_size * self.width * (1 if self.tied else 2)

    def _block_parameters(self) -> int:
        attention = 2 * self.width * self.each_head * (self.heads + self.key_heads)
        return attention + 3 * self.width * self.inner_width + 2 * self.width

    def requirements(self) -> InputRequirements:
        """What a loader must provide for it."""
        return InputRequirements(
            asked_by="the model",
            target_distances=self.prediction_heads,
            loss_weights=True,
            positions=True,
            cu_seqlens=True,
            prefix=self.sliding_window is None,
            trees=self.prediction_heads == 1,
            images=self.vision is not None,
        )


def _check_count(name: str, found: object) -> None:
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= MOST:
        raise ConfigError(f"model.{name} must be a whole number from 1 to {MOST:,}, got {found!r}")
