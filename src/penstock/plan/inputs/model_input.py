"""The arrays of one row, ready for a model.

`pack_documents` lays documents one after another into a row outside of a plan, for scoring or for a
teacher; that takes a few passes of NumPy over the row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Generic, TypedDict, TypeVar, final

import numpy as np
from numpy.typing import ArrayLike

from penstock.core.arrays import Bool, Float32, Int32, Int64, Integers
from penstock.core.notebook import card, row_strip
from penstock.media.rows import RowMedia
from penstock.plan.inputs import joining
from penstock.plan.inputs.joining import RULE, JoinedRows, rule
from penstock.plan.inputs.paths import RowPaths

IGNORE = -100
"""In `targets`: nothing to predict here."""
ArrayT = TypeVar("ArrayT")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ModelInput:
    """One row: `T` token slots that hold documents, separated by `cu_seqlens` or `document_ids`.

    T is the sequence length, n the number of documents in the row, D the number of target
    distances. Padding is at the end only, is never a target, and counts as one more document in
    `document_ids` and `cu_seqlens`, so that no attention row is empty. Integer arrays are int32 or
    int64 as required. The arrays are the caller's: nothing writes to them again. Fields that were
    not required are None.

    With attention="row", `positions`, `cu_seqlens` and `max_seqlen` take all tokens of the row for
    one document (n = 1 in their shapes), so documents see each other. Targets, loss weights,
    `document_ids` and `source_ids` do not change: a model that makes its mask from `document_ids`
    still keeps documents apart.
    """

    tokens: Annotated[Integers, "slots"] = field(metadata=rule(joining.along_slots))
    """[T] token ids; padding holds `pad_id`."""
    targets: Annotated[Integers, "distances slots"] = field(metadata=rule(joining.by_distance))
    """[D, T]; `targets[d - 1][t]` is the token at t + d of the same document, already shifted; −100
    = none.
    """
    loss_weights: Annotated[Float32, "distances slots"] | None = field(
        metadata=rule(joining.by_distance)
    )
    """[D, T] how much each target counts; 0 where the target is −100."""
    positions: Annotated[Integers, "slots"] | None = field(metadata=rule(joining.along_slots))
    """[T] position of the token in its document in this row, from 0; restarts in the padding."""
    document_ids: Annotated[Integers, "slots"] | None = field(metadata=rule(joining.numbered))
    """[T] number of the document in this row, from 0; padding has the number n."""
    cu_seqlens: Annotated[Int32, "borders"] | None = field(metadata=rule(joining.borders))
    """[n + 1], or [n + 2] with padding: where each document begins; the last entry is T."""
    max_seqlen: int | None = field(metadata=rule(joining.largest))
    """Tokens of the longest piece between two entries of `cu_seqlens`."""
    num_tokens: int = field(metadata=rule(joining.all_slots))
    """Tokens without padding."""
    source_ids: Annotated[Int32, "documents"] = field(metadata=rule(joining.of_documents(-1)))
    """[n] number of each document's source in the mixture."""
    prefix_lengths: Annotated[Int32, "documents"] | None = field(
        default=None, metadata=rule(joining.of_documents(0))
    )
    """[n] tokens at the beginning of each document that see each other in both directions. A token
    sees another of its document that lies before it, or that is in the prefix with it. None: all
    attention is causal.
    """
    prefix: Annotated[Bool, "slots"] | None = field(
        default=None, metadata=rule(joining.along_slots)
    )
    """[T] whether the token is in its document's prefix; None where `prefix_lengths` is."""
    reach: Annotated[Int32, "nodes"] | None = field(
        default=None, metadata=rule(joining.subtree_ends)
    )
    """[n], or [n + 1] with padding, if documents are prefix trees, whose nodes `cu_seqlens` then
    has: the slot where the subtree of each ends. A query at q sees a key at k iff k ≤ q < reach of
    k's node. None: no trees.
    """
    columns: Mapping[str, Annotated[Any, "slots"]] = field(
        default_factory=dict, metadata=rule(joining.join_columns)
    )
    """Name → [T] the numbers that the data have for each token (float32 or int32); a fill value
    elsewhere.
    """
    paths: RowPaths | None = field(default=None, metadata=rule(joining.join_paths))
    """The sequences of prefix trees, with their values; ordinary documents are paths of their own.
    None: there are no trees.
    """
    media: RowMedia | None = field(default=None, metadata=rule(joining.join_media))
    """The images of the row's documents. None: no source has images."""
    distillation: Any = field(default=None, metadata=rule(joining.together))
    """What the loader's `companion` made of the row: for teachers, a `TeacherRow` of each. None
    without one.
    """

    def __repr__(self) -> str:
        """One line, however long the row: shapes and dtypes, no numbers of arrays."""
        arrays = (
            f"{one.name} {value.dtype}{list(value.shape)}"
            for one in fields(self)
            if isinstance(value := getattr(self, one.name), np.ndarray)
        )
        return (
            f"ModelInput({self.num_documents} documents, {self.num_tokens} tokens; "
            f"{', '.join(arrays)})"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: the row as a strip of its documents, trained tokens full, others
        pale.
        """
        trained = self.targets[0] != IGNORE
        facts = [
            ("documents", self.num_documents),
            ("tokens", f"{self.num_tokens:,} of {self.sequence_length:,} slots"),
            ("targets", f"{int(trained.sum()):,}"),
        ]
        return card("ModelInput", facts, self.strip_html())

    def strip_html(self) -> str:
        """The row's documents as a strip, inline SVG: trained tokens full, others pale, padding
        empty.
        """
        documents = self.document_ids
        if documents is None:
            documents = np.zeros(self.sequence_length, np.int32)
            if self.cu_seqlens is not None:
                documents[self.cu_seqlens[1:-1]] = 1
                documents = np.cumsum(documents)
        return row_strip(documents, self.targets[0] != IGNORE, self.num_tokens)

    @classmethod
    def join(
        cls,
        rows: "Sequence[ModelInput]",
        borders: Sequence[Annotated[Int32, "borders"] | None] | None = None,
    ) -> "ModelInput":
        """Rows of one length end to end, as one row in which the padding of each is a document
        without targets.

        Each field says how it is joined. Without a copy for rows of one step, but for
        `document_ids` and several target distances.

        Args:
            rows: At least one, all with the same fields.
            borders: `cu_seqlens` of each, where rows have trees but no `cu_seqlens`.
        """
        slots = rows[0].sequence_length
        padded = [row.num_tokens < slots for row in rows]
        joined = JoinedRows(
            slots=slots,
            padded=padded,
            documents=[
                row._num_whole_documents + more for row, more in zip(rows, padded, strict=True)
            ],
            borders=[row.cu_seqlens for row in rows] if borders is None else borders,
        )
        made = {
            one.name: one.metadata[RULE]([getattr(row, one.name) for row in rows], joined)
            for one in fields(cls)
        }
        return cls(**made)

    @property
    def _num_whole_documents(self) -> int:
        """Documents, a prefix tree counted once."""
        if self.paths is None:
            return self.num_documents
        return int(self.paths.documents[-1]) + 1 if len(self.paths) else 0

    @property
    def sequence_length(self) -> int:
        """T, padding included."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """n, padding not counted."""
        return len(self.source_ids)


class _Fields(TypedDict, Generic[ArrayT]):
    """Fields of rows, each in one array of NumPy, torch or JAX.

    `| Any`: None only where `requirements` leave the field out, which who wrote them knows.
    """

    tokens: ArrayT
    targets: ArrayT
    loss_weights: ArrayT | Any
    positions: ArrayT | Any
    document_ids: ArrayT | Any
    prefix: ArrayT | None
    cu_seqlens: ArrayT | Any
    max_seqlen: int | Any
    reach: ArrayT | None
    columns: Mapping[str, ArrayT]
    num_tokens: int


class RowFields(_Fields[ArrayT]):
    """One row: see `to_torch`."""

    source_ids: ArrayT
    prefix_lengths: ArrayT | None


class StepFields(_Fields[ArrayT]):
    """The rows of a step: see `Step.arrays`."""

    media: RowMedia | None
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
        The row: all arrays int32, targets at distance 1 for every token but the last of its
        document, no loss weights; padding holds 0. And the first slot of each document.
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
