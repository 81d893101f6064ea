"""Settings of LoRA, and which rows of an embedding are new; read without torch and peft."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, final, get_args

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping

MOST_RANK = 1 << 16
"""Maximum `rank`."""
Embeddings = Literal["all", "new"]
Quantization = Literal["nf4"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Small matrices that are trained next to a frozen model."""

    rank: int = 8
    """Inner dimension of the two small matrices."""
    alpha: float = 16.0
    """Their product is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Matrices that get LoRA, by the last part of their name, such as query or q_proj; empty: all
    but the output.
    """
    dropout: float = 0.0
    """Share of the inputs of the small matrices that a training step leaves out."""
    rslora: bool = False
    """Scale by alpha / √rank (rsLoRA, Kalajdzievski 2023), so that the rate which suits one rank
    suits another.
    """
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """End of a matrix's name, or a regular expression for it, → its own rank: `{"down_proj": 4}`;
    as in peft, the first that fits counts.
    """
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    """The same for alpha."""
    train_embeddings: Embeddings | None = None
    """Also train the embedding and the output matrix: `new`, only the rows of entries that the
    tokenizer of the data has and that of the model had not; `all`; None: they are frozen.
    """
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole, next to LoRA, by the ends of their names: norm, lm_head."""
    quantize: Quantization | None = None
    """nf4: hold the frozen matrices of the blocks in 4 bits (QLoRA, Dettmers et al. 2023), with
    double quantisation; they are dequantised to training.precision where they are used. Needs the
    extra `qlora`. A base that is stored in 4 bits stays as it is. None: not quantised.
    """

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MOST_RANK or not 0 < self.alpha < float("inf"):
            raise ConfigError(
                f"lora: rank must be 1 to {MOST_RANK:,} and alpha above 0; got {self.rank} "
                f"and {self.alpha}"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout must be from 0 to below 1, got {self.dropout}")
        if self.train_embeddings not in (None, *get_args(Embeddings)):
            raise ConfigError(
                f"lora.train_embeddings must be all or new, got {self.train_embeddings!r}"
            )
        if self.quantize not in (None, *get_args(Quantization)):
            raise ConfigError(f"lora.quantize must be nf4, or left out, got {self.quantize!r}")
        for pattern, rank in self.rank_pattern.items():
            if not 1 <= rank <= MOST_RANK:
                raise ConfigError(
                    f"lora.rank_pattern: {pattern!r} has {rank}, expected 1 to {MOST_RANK:,}"
                )
        for pattern, alpha in self.alpha_pattern.items():
            if not 0 < alpha < float("inf"):
                raise ConfigError(
                    f"lora.alpha_pattern: {pattern!r} has {alpha}, expected a number above 0"
                )
        if "" in (*self.targets, *self.modules_to_save, *self.rank_pattern, *self.alpha_pattern):
            raise ConfigError(
                "lora: a name in targets, modules_to_save or a pattern is empty; leave it out"
            )
        for pattern in (*self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"lora: pattern {pattern!r} is no regular expression: {error}"
                ) from None

    @classmethod
    def of(cls, values: JsonMapping) -> "LoraSettings":
        """Settings from plain values, such as those of JSON."""
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **lists})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NewRows:
    """Rows of the embedding for entries that the tokenizer gained after the model was
    pretrained.
    """

    first: int
    """The first of them."""
    end: int
    """The row after the last of them."""
    grown: bool
    """Whether the model had no such rows before."""
