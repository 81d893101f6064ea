"""The arrays of one row, ready for a model, what a model requires of them, and rows packed outside of a plan.

Layers state their requirements, which merge; the loader computes those fields and no others. `pack_documents` lays
documents one after another into a row for scoring or for a teacher; that takes a few passes of NumPy over the row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Annotated, Any, Generic, Literal, Self, TypedDict, TypeVar, final

import numpy as np
from numpy.typing import ArrayLike

from penstock.core.arrays import Bool, Float32, Int32, Int64, Integers
from penstock.core.errors import ConfigError
from penstock.core.notebook import card, row_strip
from penstock.core.suggestions import suggests
from penstock.plan.inputs.media import RowMedia
from penstock.plan.inputs.paths import RowPaths

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
    """Loss weights as an array; without it they follow from the targets, and fractional weights are refused."""
    positions: bool = False
    """Position of each token in its document."""
    document_ids: bool = False
    """Number of its document in the row, for each token."""
    cu_seqlens: bool = False
    """Cumulative document lengths and the longest document, for variable-length attention."""
    cu_seqlens_capacity: int | None = None
    """Pad `cu_seqlens` to this many entries by repeating the last, so that compiled models see one shape. At least 3:
    rows get at most two documents fewer than entries (`documents_per_row`)."""
    prefix: bool | None = None
    """True: attention here honours bidirectional prefixes, and wants `prefix_lengths` and `prefix` where an objective
    makes some. False: it cannot. An objective that makes some is refused unless this is True."""
    trees: bool | None = None
    """True: attention here honours prefix trees (`reach` of a row). False: it cannot. Documents with branches are
    refused unless this is True; those whose paths share nothing are ordinary documents to all."""
    images: bool | None = None
    """True: the model sees the images of a row (`media`). Documents with images are refused unless this is True."""
    dtype: Literal["int32", "int64"] | None = None
    """Of tokens, targets, positions and document ids; int32 by default (half the bytes)."""
    attention: Attention | None = None
    """What `positions`, `cu_seqlens` and `max_seqlen` describe; "document" by default. "row" lets
    documents of a row see each other, to reproduce baselines that do. It leaves `document_ids` alone, so a layer that
    makes its mask from them should say "document" here, and "row" is then refused instead of having no effect."""

    def __post_init__(self) -> None:
        for name in ("target_distances", "cu_seqlens_capacity"):
            if not isinstance(getattr(self, name), Integral | None):
                raise ConfigError(f"{self.asked_by}: {name} must be a whole number, got {getattr(self, name)!r}")
        if self.target_distances is not None and not 1 <= self.target_distances <= 64:
            raise ConfigError(f"{self.asked_by}: target_distances must be 1 … 64, got {self.target_distances}")
        if self.dtype not in (None, "int32", "int64"):
            raise ConfigError(f"{self.asked_by}: dtype must be int32 or int64, got {self.dtype!r}")
        if self.attention not in (None, "document", "row"):
            raise ConfigError(f"{self.asked_by}: attention must be document or row, got {self.attention!r}")

    def merge(self, other: Self) -> "InputRequirements":
        """Both needs at once: arrays add up; opinions on form must agree.

        Raises:
            ConfigError: The two disagree; the message names both sides.
        """
        merged = replace(self, asked_by=f"{self.asked_by} and {other.asked_by}")
        for name in ("loss_weights", "positions", "document_ids", "cu_seqlens"):
            merged = replace(merged, **{name: getattr(self, name) or getattr(other, name)})
        for name in ("target_distances", "cu_seqlens_capacity", "dtype", "attention", "prefix", "trees", "images"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None and theirs is not None and mine != theirs:
                raise ConfigError(
                    f"{name}: {self.asked_by} needs {mine}, {other.asked_by} needs {theirs}; make them agree"
                )
            merged = replace(merged, **{name: theirs if mine is None else mine})
        return merged

    @property
    def documents_per_row(self) -> int | None:
        """Maximum documents of a row for which `cu_seqlens_capacity` has room; None: any number.

        A row of n documents needs n + 1 entries, and one more if it has padding. With attention="row" its documents
        count as one.
        """
        if self.cu_seqlens_capacity is None or self.attention == "row":
            return None
        return int(self.cu_seqlens_capacity) - 2

    def require_effect(self) -> None:
        """Refuse what would be ignored, or never suffice; for requirements into which no others will be merged.

        Raises:
            ConfigError: A capacity for `cu_seqlens`, which are not required; or a capacity too small for one document.
        """
        if self.cu_seqlens_capacity is not None and self.cu_seqlens_capacity < 3:
            raise ConfigError(
                f"{self.asked_by}: cu_seqlens_capacity is {self.cu_seqlens_capacity}, but a row needs 3 entries for a "
                "single document and its padding: where each begins, and the end; raise it"
            )
        if self.cu_seqlens_capacity is not None and not self.cu_seqlens:
            raise ConfigError(
                f"{self.asked_by}: cu_seqlens_capacity is {self.cu_seqlens_capacity}, but cu_seqlens are not required; "
                "require cu_seqlens=True, or leave the capacity out"
            )


EVERYTHING = InputRequirements(
    asked_by="the default", loss_weights=True, positions=True, document_ids=True, cu_seqlens=True, prefix=True,
    images=True,
)  # fmt: skip
"""All arrays, in their default form: what a loader gives without requirements."""


IGNORE = -100
"""In `targets`: nothing to predict here."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ModelInput:
    """One row: `T` token slots that hold documents, separated by `cu_seqlens` or `document_ids`.

    T is the sequence length, n the number of documents in the row, D the number of target distances. Padding is at
    the end only, is never a target, and counts as one more document in `document_ids` and `cu_seqlens`, so that no
    attention row is empty. Integer arrays are int32 or int64 as required. The arrays are the caller's: nothing
    writes to them again. Fields that were not required are None.

    With attention="row", `positions`, `cu_seqlens` and `max_seqlen` take all tokens of the row for
    one document (n = 1 in their shapes), so documents see each other. Targets, loss weights, `document_ids` and
    `source_ids` do not change: a model that makes its mask from `document_ids` still keeps documents apart.
    """

    tokens: Annotated[Integers, "slots"]
    """[T] token ids; padding holds `pad_id`."""
    targets: Annotated[Integers, "distances slots"]
    """[D, T]; `targets[d - 1][t]` is the token at t + d of the same document, already shifted; −100 = none."""
    loss_weights: Annotated[Float32, "distances slots"] | None
    """[D, T] how much each target counts; 0 where the target is −100."""
    positions: Annotated[Integers, "slots"] | None
    """[T] position of the token in its document in this row, from 0; restarts in the padding."""
    document_ids: Annotated[Integers, "slots"] | None
    """[T] number of the document in this row, from 0; padding has the number n."""
    cu_seqlens: Annotated[Int32, "borders"] | None
    """[n + 1], or [n + 2] with padding: where each document begins; the last entry is T."""
    max_seqlen: int | None
    """Tokens of the longest piece between two entries of `cu_seqlens`."""
    num_tokens: int
    """Tokens without padding."""
    source_ids: Annotated[Int32, "documents"]
    """[n] number of each document's source in the mixture."""
    prefix_lengths: Annotated[Int32, "documents"] | None = None
    """[n] tokens at the beginning of each document that see each other in both directions. A token sees another of its
    document that lies before it, or that is in the prefix with it. None: all attention is causal."""
    prefix: Annotated[Bool, "slots"] | None = None
    """[T] whether the token is in its document's prefix; None where `prefix_lengths` is."""
    reach: Annotated[Int32, "nodes"] | None = None
    """[n], or [n + 1] with padding, if documents are prefix trees, whose nodes `cu_seqlens` then has: the slot where
    the subtree of each ends. A query at q sees a key at k iff k ≤ q < reach of k's node. None: no trees."""
    columns: Mapping[str, Annotated[Any, "slots"]] = field(default_factory=dict)
    """Name → [T] the numbers that the data have for each token (float32 or int32); a fill value elsewhere."""
    paths: RowPaths | None = None
    """The sequences of prefix trees, with their values; ordinary documents are paths of their own. None: there are
    no trees."""
    media: RowMedia | None = None
    """The images of the row's documents. None: no source has images."""
    distillation: Any = None
    """What the loader's `companion` made of the row: for teachers, a `TeacherRow` of each. None without one."""

    def __repr__(self) -> str:
        """One line, however long the row: shapes and dtypes, no numbers of arrays."""
        arrays = (
            f"{one.name} {value.dtype}{list(value.shape)}"
            for one in fields(self)
            if isinstance(value := getattr(self, one.name), np.ndarray)
        )
        return f"ModelInput({self.num_documents} documents, {self.num_tokens} tokens; {', '.join(arrays)})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the row as a strip of its documents, trained tokens full, others pale."""
        trained = self.targets[0] != IGNORE
        facts = [
            ("documents", self.num_documents),
            ("tokens", f"{self.num_tokens:,} of {self.sequence_length:,} slots"),
            ("targets", f"{int(trained.sum()):,}"),
        ]
        return card("ModelInput", facts, self.strip_html())

    def strip_html(self) -> str:
        """The row's documents as a strip, inline SVG: trained tokens full, others pale, padding empty."""
        documents = self.document_ids
        if documents is None:
            documents = np.zeros(self.sequence_length, np.int32)
            if self.cu_seqlens is not None:
                documents[self.cu_seqlens[1:-1]] = 1
                documents = np.cumsum(documents)
        return row_strip(documents, self.targets[0] != IGNORE, self.num_tokens)

    @property
    def sequence_length(self) -> int:
        """T, padding included."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """n, padding not counted."""
        return len(self.source_ids)


ArrayT = TypeVar("ArrayT")


class StepFields(TypedDict, Generic[ArrayT]):
    """The rows of a step, each field in one array of NumPy, torch or JAX: see `Step.arrays`."""

    tokens: ArrayT
    targets: ArrayT
    loss_weights: ArrayT | None
    positions: ArrayT | None
    document_ids: ArrayT | None
    prefix: ArrayT | None
    cu_seqlens: ArrayT | None
    max_seqlen: int | None
    reach: ArrayT | None
    columns: Mapping[str, ArrayT]
    media: RowMedia | None
    num_tokens: int
    tokens_per_row: list[int]


def pack_documents(
    documents: Sequence[Annotated[Int32, "_"]], source_ids: ArrayLike, *, multiple: int = 1
) -> tuple[ModelInput, Annotated[Int64, "documents"]]:
    """One row of `documents`, its length rounded up to a multiple, and at least that long.

    Args:
        documents: Ids of each document; none is empty.
        source_ids: Whole numbers [n], number of each document's source.
        multiple: What the row's length is a multiple of.

    Returns:
        The row: all arrays int32, targets at distance 1 for every token but the last of its document, no loss weights;
        padding holds 0. And the first slot of each document.
    """
    lengths = np.array([len(ids) for ids in documents], np.int64)
    used = int(lengths.sum())
    slots = max(-(-used // multiple), 1) * multiple
    padded = lengths if slots == used else np.append(lengths, slots - used)
    ends = np.cumsum(padded)
    tokens = np.zeros(slots, np.int32)
    if documents:
        np.concatenate(documents, out=tokens[:used], casting="same_kind")
    targets = np.full((1, slots), IGNORE, np.int32)
    targets[0, : slots - 1] = tokens[1:]
    targets[0, ends[: len(lengths)] - 1] = targets[0, used:] = IGNORE
    row = ModelInput(
        tokens=tokens,
        targets=targets,
        loss_weights=None,
        positions=(np.arange(slots) - np.repeat(ends - padded, padded)).astype(np.int32),
        document_ids=np.repeat(np.arange(len(padded), dtype=np.int32), padded),
        cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
        max_seqlen=int(padded.max()),
        num_tokens=used,
        source_ids=np.asarray(source_ids, np.int32),
    )
    return row, (ends - padded)[: len(lengths)]
