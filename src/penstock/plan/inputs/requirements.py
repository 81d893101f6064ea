"""What a model requires of its rows: which arrays, and in what form.

Layers state their requirements, which merge; the loader computes those fields and no others.
"""

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal, Self, final

from penstock.core.errors import ConfigError
from penstock.core.suggestions import suggests

Attention = Literal["document", "row"]
"""Whom a token may see before it: its own document, or the whole row."""


@suggests
@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InputRequirements:
    """Which arrays of a model input are wanted, and in what form. None means no opinion."""

    asked_by: str = "the caller"
    """Who asks; errors name it."""
    target_distances: int | None = None
    """Targets at distance 1 … this many (multi-token prediction); 1 by default."""
    loss_weights: bool = False
    """Loss weights as an array; without it they follow from the targets, and fractional weights are
    refused.
    """
    positions: bool = False
    """Position of each token in its document."""
    document_ids: bool = False
    """Number of its document in the row, for each token."""
    cu_seqlens: bool = False
    """Cumulative document lengths and the longest document, for variable-length attention."""
    cu_seqlens_capacity: int | None = None
    """Pad `cu_seqlens` to this many entries by repeating the last, so that compiled models see one
    shape. At least 3: rows get at most two documents fewer than entries (`documents_per_row`).
    """
    prefix: bool | None = None
    """True: attention here honours bidirectional prefixes, and wants `prefix_lengths` and `prefix`
    where an objective makes some. False: it cannot. An objective that makes some is refused unless
    this is True.
    """
    trees: bool | None = None
    """True: attention here honours prefix trees (`reach` of a row). False: it cannot. Documents
    with branches are refused unless this is True; those whose paths share nothing are ordinary
    documents to all.
    """
    own_targets: bool | None = None
    """False: what reads these rows takes the token behind a slot for its target. Objectives that
    write other targets (diffusion) are refused then.
    """
    images: bool | None = None
    """True: the model sees the images of a row (`media`). Documents with images are refused unless
    this is True.
    """
    dtype: Literal["int32", "int64"] | None = None
    """Of tokens, targets, positions and document ids; int32 by default (half the bytes). Tensors of
    torch are int64 either way, but for document ids, and no second pass converts those of a step.
    """
    attention: Attention | None = None
    """What `positions`, `cu_seqlens` and `max_seqlen` describe; "document" by default. "row" lets
    documents of a row see each other, to reproduce baselines that do. It leaves `document_ids`
    alone, so a layer that makes its mask from them should say "document" here, and "row" is then
    refused instead of having no effect.
    """

    def __post_init__(self) -> None:
        for name in ("target_distances", "cu_seqlens_capacity"):
            if not isinstance(getattr(self, name), Integral | None):
                raise ConfigError(
                    f"{self.asked_by}: {name} must be a whole number, got {getattr(self, name)!r}"
                )
        if self.target_distances is not None and not 1 <= self.target_distances <= 64:
            raise ConfigError(
                f"{self.asked_by}: target_distances must be 1 … 64, got {self.target_distances}"
            )
        if self.dtype not in (None, "int32", "int64"):
            raise ConfigError(f"{self.asked_by}: dtype must be int32 or int64, got {self.dtype!r}")
        if self.attention not in (None, "document", "row"):
            raise ConfigError(
                f"{self.asked_by}: attention must be document or row, got {self.attention!r}"
            )

    def merge(self, other: Self) -> "InputRequirements":
        """Both needs at once: arrays add up; opinions on form must agree.

        Raises:
            ConfigError: The two disagree; the message names both sides.
        """
        merged = replace(self, asked_by=f"{self.asked_by} and {other.asked_by}")
        for name in ("loss_weights", "positions", "document_ids", "cu_seqlens"):
            merged = replace(merged, **{name: getattr(self, name) or getattr(other, name)})
        for name in (
            "target_distances",
            "cu_seqlens_capacity",
            "dtype",
            "attention",
            "prefix",
            "trees",
            "own_targets",
            "images",
        ):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None and theirs is not None and mine != theirs:
                raise ConfigError(
                    f"{name}: {self.asked_by} needs {mine}, {other.asked_by} needs {theirs}; "
                    "make them agree"
                )
            merged = replace(merged, **{name: theirs if mine is None else mine})
        return merged

    @property
    def documents_per_row(self) -> int | None:
        """Maximum documents of a row for which `cu_seqlens_capacity` has room; None: any number.

        A row of n documents needs n + 1 entries, and one more if it has padding. With
        attention="row" its documents count as one.
        """
        if self.cu_seqlens_capacity is None or self.attention == "row":
            return None
        return int(self.cu_seqlens_capacity) - 2

    def require_effect(self) -> None:
        """Refuse what would be ignored, or never suffice; for requirements into which no others
        will be merged.

        Raises:
            ConfigError: A capacity for `cu_seqlens`, which are not required; or a capacity too
                small for one document.
        """
        if self.cu_seqlens_capacity is not None and self.cu_seqlens_capacity < 3:
            raise ConfigError(
                f"{self.asked_by}: cu_seqlens_capacity is {self.cu_seqlens_capacity}, but a "
                "row needs 3 entries for a single document and its padding: where each "
                "begins, and the end; raise it"
            )
        if self.cu_seqlens_capacity is not None and not self.cu_seqlens:
            raise ConfigError(
                f"{self.asked_by}: cu_seqlens_capacity is {self.cu_seqlens_capacity}, but "
                "cu_seqlens are not required; require cu_seqlens=True, or leave the capacity "
                "out"
            )


EVERYTHING = InputRequirements(
    asked_by="the default",
    loss_weights=True,
    positions=True,
    document_ids=True,
    cu_seqlens=True,
    prefix=True,
    images=True,
)
"""All arrays, in their default form: what a loader gives without requirements."""
