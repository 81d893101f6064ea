"""What is in a dataset: counts, lengths, single documents. Reads `lengths.u32` once, and no shard
as a whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import numpy as np

from penstock.core.arrays import Int64
from penstock.data.shards import JoinedCorpus
from penstock.data.shards.format.trees import BranchView
from penstock.data.shards.tables.corpus import Corpus, location_of
from penstock.data.shards.tables.document import Document
from penstock.tokenizers import Tokenizer
from penstock.use.inspection.images import ShownImage, images_shown, with_labels
from penstock.use.inspection.text import origin_text, token_texts
from penstock.use.inspection.trajectories import TrajectoryTree, is_sampled, trajectories_of

QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBin:
    """Documents of `low` to `high` tokens, both inclusive."""

    low: int
    high: int
    documents: int
    tokens: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSummary:
    """The figures of one dataset."""

    name: str
    path: str
    fingerprint: str
    documents: int
    tokens: int
    trained_tokens: int
    """Tokens that are targets if their document is not cut."""
    text_bytes: int | None
    """UTF-8 bytes of the text; None: unknown."""
    shards: int
    token_bytes: int
    """Bytes per token on disk."""
    has_spans: bool
    """Whether documents have loss-weight spans."""
    has_checksums: bool
    tokenizer: str | None
    """Name of the tokenizer; None: unknown."""
    vocab_size: int | None
    length_quantiles: dict[str, int]
    """Tokens of a document at quantiles 0 (shortest) to 1 (longest)."""
    histogram: tuple[LengthBin, ...]
    """Bins that double in width, from the shortest documents to the longest."""

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text per token."""
        return self.text_bytes / self.tokens if self.text_bytes and self.tokens else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentView:
    """One document, decoded."""

    number: int
    origin: str
    """File and line, or row."""
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    """Text of each token."""
    loss_weights: tuple[float, ...]
    branches: tuple[BranchView, ...] = ()
    """Of a prefix tree; empty for an ordinary document."""
    images: tuple[ShownImage, ...] = ()
    trajectory: TrajectoryTree | None = None
    """Of sampled answers; None: it holds none."""


def summarise(dataset: Corpus) -> DatasetSummary:
    """The figures of a dataset."""
    table = dataset.table
    lengths = np.asarray(table.lengths[:, 0], np.int64)
    tokens = int(lengths.sum())
    trained = table.lengths[:, 1] if table.lengths.shape[1] > 1 else np.maximum(lengths - 1, 0)
    tokenizer = dataset.tokenizer
    quantiles = (
        np.quantile(lengths, QUANTILES, method="lower")
        if len(lengths)
        else np.zeros(len(QUANTILES))
    )
    return DatasetSummary(
        name=str(dataset.name),
        path=_path_of(dataset),
        fingerprint=str(dataset.fingerprint),
        documents=len(lengths),
        tokens=tokens,
        trained_tokens=int(np.asarray(trained, np.int64).sum()),
        text_bytes=dataset.text_bytes,
        shards=len(table.shard_addresses),
        token_bytes=int(table.token_bytes),
        has_spans=bool(table.has_spans),
        has_checksums=bool(table.has_checksums),
        tokenizer=None if tokenizer is None else tokenizer.name,
        vocab_size=None if tokenizer is None else tokenizer.vocab_size,
        length_quantiles={
            f"{q:g}": int(value) for q, value in zip(QUANTILES, quantiles, strict=True)
        },
        histogram=length_histogram(lengths),
    )


def _path_of(dataset: Corpus) -> str:
    others = f" and {len(dataset.parts) - 1} more" if isinstance(dataset, JoinedCorpus) else ""
    return f"{location_of(dataset)}{others}"


def length_histogram(lengths: Int64) -> tuple[LengthBin, ...]:
    """Count lengths (int64 [documents]) in bins 0, 1, 2–3, 4–7, … up to the longest, without empty
    ends.
    """
    if len(lengths) == 0:
        return ()
    # The bin of n is its number of binary digits, which frexp gives exactly below 2^53.
    digits = np.frexp(lengths.astype(np.float64))[1]
    counts = np.bincount(digits)
    bins = []
    for digit in range(int(digits.min()), len(counts)):
        inside = lengths[digits == digit]
        low = 1 << (digit - 1) if digit else 0
        bins.append(
            LengthBin(
                low=low,
                high=max((1 << digit) - 1, 0),
                documents=int(counts[digit]),
                tokens=int(inside.sum()),
            )
        )
    return tuple(bins)


def view_document(
    dataset: Corpus, number: int, tokenizer: Tokenizer | None, *, lines: bool = False
) -> DocumentView:
    """One document with its text; `tokenizer` and `lines` as in `token_texts`; with lines also
    pictures, for pages.

    Raises:
        IndexError: There is no such document.
    """
    return view_of(dataset[number], number, tokenizer, lines=lines)


def view_of(
    document: Document,
    number: int,
    tokenizer: Tokenizer | None,
    *,
    lines: bool = False,
    why: Mapping[int, str] = MappingProxyType({}),
) -> DocumentView:
    """A document with its text, as `view_document` gives it.

    Args:
        document: The document.
        number: Its number.
        tokenizer: Decodes it; None: show ids.
        lines: Keep line ends and tabs in texts, and make pictures of images.
        why: Path of a trajectory → why it began.
    """
    images = images_shown(document.images, pictures=lines)
    tree, count = document.tree, len(document.tokens)
    texts = tuple(with_labels(token_texts(tokenizer, document.tokens, lines=lines), images))
    trajectory = None
    if tree is not None and is_sampled(tree, document.columns):
        trajectory = trajectories_of(
            document.tokens,
            document.loss_weights,
            document.columns,
            tree,
            texts=() if tokenizer is None else texts,
            control_ids=() if tokenizer is None else tokenizer.special_tokens.values(),
            why=why,
        )
    return DocumentView(
        number=number,
        origin=origin_text(document.origin),
        tokens=tuple(int(token) for token in document.tokens),
        texts=texts,
        loss_weights=tuple(float(weight) for weight in document.loss_weights),
        branches=() if tree is None else tuple(tree.describe(count)),
        images=images,
        trajectory=trajectory,
    )
