"""The size and shape of a transformer, read from the section `model` of a run file. Imports no
torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, final, get_args

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping
from penstock.plan.inputs.requirements import InputRequirements

MOST = 1 << 31
"""Upper bound of every count in a model; torch indexes tensors with 64 bits."""
MOST_DISTANCES = 64
"""Maximum number of target distances that a loader gives."""
Dtype = Literal["float32", "bfloat16", "float64"]
MixerKind = Literal["attention", "gated_delta", "kimi_delta", "mamba", "stochastic"]
_OF_RECURRENCE = {"heads", "head_width", "state_width", "convolution"}
_OF_KIND = {
    "attention": {"sliding_window", "qk_norm"},
    "stochastic": {"choices", "chances", "main"},
}
_OF_EXPERTS = {"experts_per_token", "expert_width", "balance"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSettings:
    """A vision tower: a small Vision Transformer over the patches of square images
    (`PatchProcessor`).
    """

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
            raise ConfigError(
                f"model.vision.image_token must be a token id, got {self.image_token!r}"
            )
        if self.image_size % self.patch or self.width % (2 * self.heads):
            raise ConfigError(
                f"model.vision.image_size {self.image_size} must be a multiple of patch "
                f"{self.patch}, and width {self.width} one of twice the heads {self.heads}"
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
class BlockSettings:
    """What a kind of block mixes tokens with, attention or a recurrence, and its experts."""

    mixer: MixerKind = "attention"
    """`attention`, `gated_delta` (Gated DeltaNet), `kimi_delta` (with a decay per channel), `mamba`
    (Mamba-2), or `stochastic` (one of several, drawn for each training step).
    """
    sliding_window: int | None = None
    """attention: maximum tokens that a token sees, including itself; None: all before it in its
    document.
    """
    qk_norm: bool = False
    """attention: RMSNorm of each head of queries and keys before they are rotated, as in Qwen 3."""
    heads: int | None = None
    """Recurrences: number of heads; None: the model's."""
    head_width: int | None = None
    """Recurrences: size of a head; None: the model's."""
    state_width: int = 64
    """mamba: size of a head's state for each of its numbers."""
    convolution: int = 4
    """Recurrences: tokens that the short convolution sees, including the token itself."""
    choices: tuple[str, ...] = ()
    """stochastic: names of the blocks whose mixers it draws from, by the seed, the step and the
    layer.
    """
    chances: tuple[float, ...] = ()
    """stochastic: how likely each of the choices is, in any unit; empty: all alike."""
    main: str | None = None
    """stochastic: the choice that evaluates and writes texts."""
    experts: int | None = None
    """Number of experts in place of the one SwiGLU; None: no experts."""
    experts_per_token: int = 2
    """Experts that each token goes to."""
    expert_width: int | None = None
    """Inner size of each expert; None: that of the model's SwiGLU."""
    balance: float = 0.01
    """Factor of the experts' load-balancing loss, which is computed for each document by itself; 0:
    none.
    """

    def __post_init__(self) -> None:
        if self.mixer not in get_args(MixerKind):
            known = ", ".join(get_args(MixerKind))
            raise ConfigError(f"model.blocks: mixer must be one of {known}; got {self.mixer!r}")
        for name in ("state_width", "convolution", "experts_per_token"):
            _check_count(f"blocks.{name}", getattr(self, name))
        for name in ("sliding_window", "heads", "head_width", "experts", "expert_width"):
            if getattr(self, name) is not None:
                _check_count(f"blocks.{name}", getattr(self, name))
        if self.convolution < 2:
            raise ConfigError("model.blocks: convolution must be at least 2")
        own = _OF_RECURRENCE if self.is_recurrent else _OF_KIND[self.mixer]
        self._refuse(_OF_RECURRENCE.union(*_OF_KIND.values()) - own, f"with mixer {self.mixer}")
        if self.experts is None:
            self._refuse(_OF_EXPERTS, "without experts")
        elif self.experts_per_token > self.experts:
            raise ConfigError(
                f"model.blocks: experts_per_token {self.experts_per_token} is more than "
                f"experts {self.experts}"
            )
        if not 0 <= self.balance < float("inf"):
            raise ConfigError(f"model.blocks: balance must be 0 or more, got {self.balance!r}")
        if self.mixer == "stochastic":
            self._check_choices()

    @classmethod
    def of(cls, values: JsonMapping) -> "BlockSettings":
        """Settings from plain values, such as those of JSON."""
        lists = {name: tuple(values[name]) for name in ("choices", "chances") if name in values}
        return cls(**{**values, **lists})

    def _refuse(self, names: set[str], where: str) -> None:
        if wrong := sorted(name for name in names if getattr(self, name) != _DEFAULTS[name]):
            raise ConfigError(f"model.blocks: {', '.join(wrong)} cannot be set {where}")

    def _check_choices(self) -> None:
        if len(set(self.choices)) < max(2, len(self.choices)) or self.main not in self.choices:
            raise ConfigError(
                "model.blocks: a stochastic mixer needs `choices`, the names of two or more "
                f"blocks, and `main`, one of them; got choices {list(self.choices)} and main "
                f"{self.main!r}"
            )
        if (
            len(self.shares) != len(self.choices)
            or not 0 < sum(self.shares) < float("inf")
            or min(self.shares) < 0
        ):
            raise ConfigError(
                f"model.blocks: chances must be {len(self.choices)} numbers of 0 or more, one "
                f"for each of the choices; got {list(self.chances)}"
            )

    @property
    def is_recurrent(self) -> bool:
        """Whether it has states instead of keys."""
        return self.mixer not in ("attention", "stochastic")

    @property
    def shares(self) -> tuple[float, ...]:
        """How likely each of the choices is."""
        return self.chances or (1.0,) * len(self.choices)

    @property
    def ways(self) -> tuple[str, ...]:
        """Its choices, the main one first."""
        return (self.main or "", *(name for name in self.choices if name != self.main))


_DEFAULTS = {field.name: field.default for field in fields(BlockSettings)}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no
    biases.
    """

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
    """Multi-token prediction: a position predicts the tokens at distances 1 to this number, each
    further distance with one more block on the trunk. Only the first head is exported and used for
    generation.
    """
    prediction_weights: tuple[float, ...] = ()
    """How much each distance counts in the loss, one number per head; empty: 1 each."""
    sliding_window: int | None = None
    """Maximum tokens that a token sees, including itself; None: all before it in its document."""
    attention_softcap: float | None = None
    """Keep scores of attention within ± this number, by softcap × tanh(score / softcap); None: they
    are as they come.
    """
    logit_softcap: float | None = None
    """Keep logits within ± this number, by softcap × tanh(logits / softcap); None: they are as they
    come.
    """
    init_std: float = 0.02
    """Standard deviation of initial weights; divided by √(2 × layers) for those that write to the
    residual stream.
    """
    dtype: Dtype = "float32"
    """Dtype of computation. Weights are kept in float32 for bfloat16 too; float64 is for exact
    comparisons.
    """
    vision: VisionSettings | None = None
    """A vision tower, for data with images; None: the model reads text only."""
    blocks: Mapping[str, BlockSettings] = field(default_factory=dict)
    """Kinds of blocks by name, for `pattern`; empty: all blocks have attention."""
    pattern: tuple[str, ...] = ()
    """Names of `blocks`, one for each layer, repeated until all layers have one."""

    def __post_init__(self) -> None:
        self._check_pattern()
        for name in ("layers", "width", "heads", "prediction_heads"):
            _check_count(name, getattr(self, name))
        for name in ("vocab_size", "kv_heads", "head_width", "mlp_width", "sliding_window"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.prediction_heads > MOST_DISTANCES:
            raise ConfigError(
                f"model.prediction_heads must be at most {MOST_DISTANCES}, got "
                f"{self.prediction_heads}"
            )
        for name in ("rope_theta", "norm_eps", "init_std", "attention_softcap", "logit_softcap"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"model.{name} must be above 0, got {getattr(self, name)!r}")
        if self.head_width is None and self.width % self.heads:
            raise ConfigError(
                f"model.width {self.width} is not a multiple of model.heads {self.heads}; "
                "change one, or set head_width"
            )
        if self.each_head % 2:
            raise ConfigError(
                f"model.head_width must be even for rotary positions, got {self.each_head}"
            )
        if self.heads % self.key_heads:
            raise ConfigError(f"model.kv_heads must divide heads {self.heads}, got {self.kv_heads}")
        if len(self.distance_weights) != self.prediction_heads or min(self.distance_weights) < 0:
            raise ConfigError(
                f"model.prediction_weights must be {self.prediction_heads} numbers of 0 or "
                "more, one for each of the prediction_heads; got "
                f"{list(self.prediction_weights)}"
            )
        if self.dtype not in ("float32", "bfloat16", "float64"):
            raise ConfigError(
                f"model.dtype must be float32, bfloat16 or float64, got {self.dtype!r}"
            )

    def _check_pattern(self) -> None:
        if bool(self.blocks) != bool(self.pattern):
            raise ConfigError(
                "model.blocks and model.pattern belong together; set both, or neither"
            )
        unknown = [name for name in self.pattern if name not in self.blocks]
        if unknown:
            known = ", ".join(self.blocks)
            raise ConfigError(f"model.pattern: {unknown[0]!r} is not one of model.blocks ({known})")
        choices = {choice: name for name, block in self.blocks.items() for choice in block.choices}
        for choice, name in choices.items():
            if choice not in self.blocks or self.blocks[choice].choices:
                raise ConfigError(
                    f"model.blocks.{name}: {choice!r} must be one of model.blocks, and not a "
                    "stochastic one"
                )
            if self.blocks[choice].experts is not None:
                raise ConfigError(
                    f"model.blocks.{name}: set experts there, not in its choice {choice!r}"
                )
        if unused := sorted(set(self.blocks) - set(self.pattern) - choices.keys()):
            raise ConfigError(
                f"model.blocks: {', '.join(unused)} does not occur in model.pattern; remove it"
            )
        if self.blocks and self.sliding_window is not None:
            raise ConfigError(
                "model.sliding_window and model.blocks cannot be combined; set it in a block"
            )

    @classmethod
    def of(cls, values: JsonMapping) -> "ModelSettings":
        """Settings from plain values, such as those of JSON."""
        vision = values.get("vision")
        vision = VisionSettings(**vision) if isinstance(vision, Mapping) else vision
        weights = tuple(values.get("prediction_weights", ()))
        blocks = {
            name: BlockSettings.of(block) if isinstance(block, Mapping) else block
            for name, block in (values.get("blocks") or {}).items()
        }
        pattern = tuple(values.get("pattern", ()))
        given = {
            "vision": vision,
            "prediction_weights": weights,
            "blocks": blocks,
            "pattern": pattern,
        }
        return cls(**{**values, **given})

    def block(self, layer: int) -> BlockSettings:
        """What a block mixes tokens with; those of further prediction heads go on with the
        pattern.
        """
        if not self.pattern:
            return BlockSettings(sliding_window=self.sliding_window)
        return self.blocks[self.pattern[layer % len(self.pattern)]]

    @property
    def is_recurrent(self) -> bool:
        """Whether some block has states instead of keys."""
        return any(block.is_recurrent for block in self.blocks.values())

    @property
    def has_experts(self) -> bool:
        """Whether some block has experts."""
        return any(block.experts is not None for block in self.blocks.values())

    @property
    def is_stochastic(self) -> bool:
        """Whether some block draws its mixer."""
        return any(block.choices for block in self.blocks.values())

    def mixers(self, kind: BlockSettings) -> tuple[BlockSettings, ...]:
        """The ways in which a block mixes tokens: itself, or those of a stochastic one, its main
        one first.
        """
        return tuple(self.blocks[name] for name in kind.ways) if kind.choices else (kind,)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each attention, in the order of `places`."""
        found = {
            place: mixer.sliding_window
            for layer, places in enumerate(self.places())
            for place, mixer in zip(places, self.mixers(self.block(layer)), strict=True)
            if not mixer.is_recurrent
        }
        return tuple(found[place] for place in sorted(found))

    def places(self) -> list[tuple[int, ...]]:
        """For each block, the numbers of its mixers among attentions, or among recurrences.

        Main mixers have the first numbers, in the order of blocks: a cache has places for them
        only.
        """
        ways = [self.mixers(self.block(layer)) for layer in range(self.num_blocks)]
        counts = {False: 0, True: 0}
        found: list[list[int]] = [[] for _ in ways]
        for first in (True, False):
            for layer, mixers in enumerate(ways):
                for mixer in mixers[:1] if first else mixers[1:]:
                    found[layer].append(counts[mixer.is_recurrent])
                    counts[mixer.is_recurrent] += 1
        return [tuple(places) for places in found]

    @property
    def of_vision(self) -> "ModelSettings":
        """Settings of the blocks of the vision tower."""
        assert self.vision is not None
        own = self.vision
        return ModelSettings(
            width=own.width, heads=own.heads, layers=own.layers, norm_eps=self.norm_eps
        )

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
                f"model.vocab_size {self.vocab_size} is less than the tokenizer's "
                f"{vocab_size} ids; leave it out, or give {vocab_size} or more"
            )
        return replace(self, vocab_size=self.vocab_size or vocab_size)

    def num_parameters(self) -> int:
        """Number of weights, including those of further prediction heads.

        Raises:
            ConfigError: `vocab_size` is not known yet.
        """
        if self.vocab_size is None:
            raise ConfigError(
                "model.vocab_size is not known yet; with_vocabulary(tokenizer.vocab_size) sets it"
            )
        period = max(1, len(self.pattern))
        times, rest = divmod(self.num_blocks, period)
        blocks = [self._block_parameters(self.block(layer)) for layer in range(period)]
        text = times * sum(blocks) + sum(blocks[:rest]) + self.width
        tower = 0
        if (own := self.vision) is not None:
            tower = own.layers * self.of_vision._block_parameters(BlockSettings()) + own.width * (
                own.patch_values + own.patches + 1
            )
            tower += own.width * self.width
        return text + tower + self.vocab_size * self.width * (1 if self.tied else 2)

    def _block_parameters(self, block: BlockSettings) -> int:
        mixers = sum(self._mixer_parameters(mixer) for mixer in self.mixers(block))
        width = (
            self.inner_width if block.experts is None else block.expert_width or self.inner_width
        )
        router = 0 if block.experts is None else block.experts * self.width
        return mixers + 3 * self.width * width * (block.experts or 1) + router + 2 * self.width

    def _mixer_parameters(self, block: BlockSettings) -> int:
        if not block.is_recurrent:
            norms = 2 * self.each_head if block.qk_norm else 0
            return 2 * self.width * self.each_head * (self.heads + self.key_heads) + norms
        heads, width = block.heads or self.heads, block.head_width or self.each_head
        values, steps = heads * width, heads * (width if block.mixer == "kimi_delta" else 1)
        convolved = values + 2 * block.state_width if block.mixer == "mamba" else 3 * values
        writes = 0 if block.mixer == "mamba" else heads
        mixer = (
            self.width * (convolved + 2 * values + steps + writes) + convolved * block.convolution
        )
        # Biases of steps, rates of decay, the norm; what Mamba passes by.
        return mixer + steps + heads + (values + heads if block.mixer == "mamba" else width)

    def requirements(self) -> InputRequirements:
        """What a loader must provide for it."""
        return InputRequirements(
            asked_by="the model",
            target_distances=self.prediction_heads,
            loss_weights=True,
            positions=True,
            cu_seqlens=True,
            prefix=set(self.windows) <= {None} and not self.is_recurrent,
            trees=self.prediction_heads == 1 and not self.is_recurrent,
            images=self.vision is not None,
        )


def _check_count(name: str, found: object) -> None:
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= MOST:
        raise ConfigError(f"model.{name} must be a whole number from 1 to {MOST:,}, got {found!r}")
