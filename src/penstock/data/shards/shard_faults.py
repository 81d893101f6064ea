"""What is wrong with one shard of a dataset: every document read, every count made again."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import DTypeLike

from penstock.core.arrays import Array
from penstock.core.compiled import address_of
from penstock.core.errors import CorruptionError, FormatError
from penstock.data.shards.format import _check_kernels as check
from penstock.data.shards.format import _kernels as k
from penstock.data.shards.format.images import assets_path
from penstock.data.shards.format.layout import (
    ShardLayout,
    batch_positions,
    other_places,
    read_texts,
)
from penstock.data.shards.format.manifest import (
    BATCHES,
    LENGTHS,
    MANIFEST,
    WEIGHT_SUMS,
    Manifest,
    ShardInfo,
)
from penstock.data.shards.tables.table import FAULTS
from penstock.data.shards.writing.finish import describe_shard
from penstock.data.stores.files import check_size, checksum, map_file, map_numbers

MAX_DOCUMENTS = 1000
"""Maximum number of faulty documents listed per shard; the others are counted."""

_ROUNDING = 1e-12
"""Relative rounding of sums of weights; sums of whole numbers are exact."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong."""

    file: str
    reason: str
    document: int | None = None
    """Its number in the dataset; None if the fault does not concern one document."""

    def __str__(self) -> str:
        return (
            f"{self.file}: "
            f"{'' if self.document is None else f'document {self.document}: '}{self.reason}"
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SideFiles:
    """The content of the files next to the shards; None for a file that cannot be used."""

    lengths: Array | None
    """uint32 [documents, 2]."""
    batches: Array | None
    """`BATCH` [batches]."""
    weight_sums: Array | None
    """float64 [documents]; also None if all weights are 0 or 1."""

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> "SideFiles":
        """Those of a dataset."""

        def numbers(name: str, dtype: DTypeLike, shape: tuple[int, ...]) -> Array | None:
            try:
                return map_numbers(path / name, dtype, shape)
            except (CorruptionError, OSError):
                return None  # reported with the files against their checksums

        documents = manifest.documents
        return cls(
            lengths=numbers(LENGTHS, "<u4", (documents, 2)),
            batches=numbers(BATCHES, k.BATCH, (sum(shard.batches for shard in manifest.shards),)),
            weight_sums=numbers(WEIGHT_SUMS, "<f8", (documents,))
            if manifest.fractional_weights
            else None,
        )

    def part(self, documents: slice, batches: slice) -> "SideFiles":
        """The part that describes one shard."""
        return SideFiles(
            lengths=None if self.lengths is None else self.lengths[documents],
            batches=None if self.batches is None else self.batches[batches],
            weight_sums=None if self.weight_sums is None else self.weight_sums[documents],
        )


@final
@dataclass(frozen=True, slots=True)
class ShardCheck:
    """The check of one shard."""

    path: Path
    manifest: Manifest
    info: ShardInfo
    first: int
    """Number of its first document."""
    sides: SideFiles

    def faults(self) -> Iterator[Fault]:
        """What is wrong with the shard."""
        try:
            check_size(self.path, self.info.bytes)
            data = map_file(self.path)
            if len(data) != self.info.bytes:
                raise CorruptionError(f"{len(data)} bytes, expected {self.info.bytes}")
            damaged = checksum(data) != self.info.checksum
            found = list(self._content_faults(data, damaged))
        except (CorruptionError, FormatError, OSError) as error:
            yield self._fault(without_path(error, self.path))
            return
        yield from found
        if damaged and not found:
            yield self._fault(
                "differs from its checksum outside tokens and spans: in origins, texts, or "
                "the structure of the file"
            )

    @property
    def _layout(self) -> ShardLayout:
        return self.manifest.layout

    def _fault(self, reason: str, document: int | None = None) -> Fault:
        return Fault(file=str(self.path), document=document, reason=reason)

    def _asset_bytes(self) -> int:
        path = assets_path(self.path)
        return path.stat().st_size if path.is_file() else 0

    def _content_faults(self, data: Array, damaged: bool) -> Iterator[Fault]:
        lengths, batches = self.sides.lengths, self.sides.batches
        if lengths is None or batches is None:
            return
        wrong = k.wrong_batch(batches, len(lengths), len(data), self.manifest.has_spans)
        if wrong >= 0:
            yield self._fault(f"its batch {wrong} is not where {BATCHES} says")
            return
        documents, weight_sums = (
            _Documents(self._layout, data, lengths, batches),
            self.sides.weight_sums,
        )
        wrongs = np.flatnonzero(documents.faults)
        for row in wrongs[:MAX_DOCUMENTS].tolist():
            yield self._fault(FAULTS[documents.faults[row]], self.first + row)
        if len(wrongs) > MAX_DOCUMENTS:
            yield self._fault(f"{len(wrongs) - MAX_DOCUMENTS:,} more documents are damaged")
        if not len(wrongs) and not damaged:
            yield from self._structure_faults(data, lengths, batches)
            yield from self._count_faults(data, documents)
        if not len(wrongs) and weight_sums is not None:
            good = np.abs(documents.weight_sums - weight_sums) <= _ROUNDING * np.abs(
                documents.weight_sums
            )
            for row in np.flatnonzero(~good)[:MAX_DOCUMENTS].tolist():
                yield self._fault(
                    f"its weights do not add up to what {WEIGHT_SUMS} says", self.first + row
                )

    def _structure_faults(self, data: Array, lengths: Array, lines: Array) -> Iterator[Fault]:
        """What is wrong with Arrow's own positions, and with origins and texts."""
        expected = batch_positions(data, self._layout, len(lengths))
        if len(expected) != len(lines) or (expected != lines).any():
            yield self._fault(f"its buffers are not where {BATCHES} says")
            return
        text_bytes = 0
        for number, line in enumerate(lines):
            rows = min(k.DOCUMENTS_PER_BATCH, len(lengths) - number * k.DOCUMENTS_PER_BATCH)
            files_at, _, texts_at = other_places(data, line, rows)
            files = data[files_at : files_at + 4 * rows].view(np.int32)
            if files.min() < 0 or files.max() >= self.manifest.files:
                yield self._fault(
                    f"origins in files {files.min()} to {files.max()}, but the dataset has "
                    f"{self.manifest.files}"
                )
            if self.manifest.has_text:
                try:
                    text_bytes += sum(
                        len(text.encode()) for text in read_texts(data, texts_at, rows, 0, rows)
                    )
                except ValueError as error:
                    yield self._fault(f"texts of batch {number} are damaged: {error}")
                    return
        if self.manifest.has_text and text_bytes != self.info.text_bytes:
            yield self._fault(
                f"text_bytes is {self.info.text_bytes} in {MANIFEST}, but its texts have "
                f"{text_bytes}"
            )

    def _count_faults(self, data: Array, documents: "_Documents") -> Iterator[Fault]:
        """Where the manifest differs from the documents of the shard."""
        counted = asdict(
            describe_shard(
                self.info.file,
                data,
                documents.batches,
                documents.lengths,
                text_bytes=self.info.text_bytes,
                fractional=documents.fractional,
                ends=documents.ends,
                assets=self._asset_bytes(),
            )
        )
        for name, stored in asdict(self.info).items():
            if stored != counted[name]:
                yield self._fault(
                    f"{name} is {stored} in {MANIFEST}, but its documents have {counted[name]}"
                )


@final
class _Documents:
    """All documents of a shard, found by the batch table alone, because the file's metadata may be
    damaged.

    Args:
        layout: The shard's layout.
        data: Its bytes.
        lengths: uint32 [documents, 2].
        batches: `BATCH` [batches], which `wrong_batch` has accepted.
    """

    def __init__(self, layout: ShardLayout, data: Array, lengths: Array, batches: Array) -> None:
        self.lengths, self.batches = lengths, np.ascontiguousarray(batches)
        self.faults, self.weight_sums = np.zeros(len(lengths), np.uint8), np.zeros(len(lengths))
        self._seen = np.array([0, 2**32, -1, 2**32, -1], np.int64)
        settings = (layout.token_dtype.itemsize, layout.has_spans, layout.vocab_size)
        for number in range(len(batches)):
            here = slice(number * k.DOCUMENTS_PER_BATCH, (number + 1) * k.DOCUMENTS_PER_BATCH)
            line = np.uint64(address_of(self.batches) + number * self.batches.strides[0])
            check.check_batch(
                np.uint64(address_of(data)),
                np.uint64(len(data)),
                line,
                settings,
                lengths[here],
                self.faults[here],
                self.weight_sums[here],
                self._seen,
            )

    @property
    def fractional(self) -> bool:
        """Whether any loss weight is neither 0 nor 1."""
        return bool(self._seen[0])

    @property
    def ends(self) -> tuple[int, int]:
        """As in `ShardInfo`."""
        _, *sides = self._seen.tolist()
        first, last = (low if low == high else -1 for low, high in (sides[:2], sides[2:]))
        return first, last


def without_path(error: Exception, path: Path) -> str:
    """The message of an error that begins with the path."""
    return str(error).removeprefix(f"{path}: ")
