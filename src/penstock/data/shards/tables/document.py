"""One document of a dataset, with where it came from, and its loss weights as a shard has them."""

from dataclasses import dataclass, field
from typing import Annotated, Any, final

import numpy as np
from numpy.typing import DTypeLike

from penstock.core.arrays import Array, Float32, UInt32
from penstock.core.notebook import card, marked_text, row_strip
from penstock.data.shards.format.images import ImageOf
from penstock.data.shards.format.trees import Tree


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a document came from."""

    file: str
    """Empty when it is not known."""
    line: int
    """Line (from 1) or row (from 0) in the file."""

    def __str__(self) -> str:
        return f"{self.file or '?'}:{self.line}"


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Document:
    """One document of a dataset. Two are equal when all their fields are; they cannot be hashed, as
    arrays cannot.
    """

    tokens: Annotated[UInt32, "tokens"]
    loss_weights: Annotated[Float32, "tokens"]
    """How much each token counts as a target."""
    origin: Origin
    text: str | None = None
    """The raw text, where the dataset keeps it."""
    columns: dict[str, Array] = field(default_factory=dict)
    """Name → a number for each token, where the dataset has columns."""
    tree: Tree | None = None
    """Its branches and paths, if it is a prefix tree or its paths have values."""
    images: tuple[ImageOf, ...] = ()
    """Its images, in order."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Document):
            return NotImplemented
        arrays: tuple[tuple[Any, Any], ...] = (
            (self.tokens, other.tokens), (self.loss_weights, other.loss_weights)
        )  # fmt: skip
        arrays += tuple((mine, other.columns.get(name, ())) for name, mine in self.columns.items())
        trees = [None if one.tree is None else one.tree.words().tolist() for one in (self, other)]
        same = (
            all(np.array_equal(mine, theirs, equal_nan=True) for mine, theirs in arrays)
            and trees[0] == trees[1]
        )
        return (
            same
            and self.columns.keys() == other.columns.keys()
            and (self.origin, self.text) == (other.origin, other.text)
            and [one.key for one in self.images] == [one.key for one in other.images]
        )

    def __repr__(self) -> str:
        """One line, however long the document."""
        trained = int(np.count_nonzero(self.loss_weights))
        text = "" if self.text is None else f", text of {len(self.text)} characters"
        tree = "" if self.tree is None else f", {self.tree!r}"
        columns = f", columns {', '.join(self.columns)}" if self.columns else ""
        return (
            f"Document({self.origin}, {len(self.tokens)} tokens, {trained} with loss "
            f"weight{text}{columns}{tree})"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: where it is from, what is trained as a strip, and its raw text
        where that is kept.
        """
        used = len(self.tokens)
        facts = [
            ("from", self.origin),
            ("tokens", f"{used:,}"),
            ("with loss weight", f"{np.count_nonzero(self.loss_weights):,}"),
            ("images", len(self.images)),
            ("columns", ", ".join(self.columns)),
            ("tree", self.tree or ""),
        ]
        strip = row_strip(np.zeros(used, np.int64), self.loss_weights > 0, used) if used else ""
        text = marked_text([(self.text, 0.0)]) if self.text else ""
        return card("Document", [(name, value) for name, value in facts if value], strip, text)


def numbers_at(data: Array, place: int, dtype: DTypeLike, first: int, count: int) -> Array:
    """Numbers `first` to `first + count` of an array that begins at byte `place`."""
    begin = place + first * np.dtype(dtype).itemsize
    return data[begin : begin + count * np.dtype(dtype).itemsize].view(dtype)


def loss_weights_at(data: Array, line: Array, row: int, length: int) -> Array:
    """Loss weights of a document, float32 [length]; its spans must have been checked."""
    bitmap = int(line["span_bitmap"])
    if bitmap and not data[bitmap + row // 8] >> (row % 8) & 1:
        return np.ones(length, np.float32)
    weights = np.zeros(length, np.float32)
    first, last = numbers_at(data, int(line["span_offsets"]), np.int64, row, 2).tolist()
    fields = (("span_begins", np.uint32), ("span_ends", np.uint32), ("span_weights", np.float32))
    spans = [
        numbers_at(data, int(line[name]), dtype, first, last - first).tolist()
        for name, dtype in fields
    ]
    for begin, end, weight in zip(*spans, strict=True):
        weights[begin:end] = weight
    return weights
