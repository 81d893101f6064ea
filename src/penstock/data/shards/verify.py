"""Checks every byte of a dataset, and reports what was checked and what could not be.

A dataset may come from a stranger, and checksums and seals detect damage, not forgery. So a
matching checksum proves nothing. Every document is read, every count in the manifest is made again,
and a dataset is sound only if it opens.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import DTypeLike

from penstock.core.arrays import Array
from penstock.core.compiled import address_of
from penstock.core.errors import CorruptionError, FormatError, PenstockError
from penstock.core.folders import is_url, local_path, normal_url
from penstock.core.terminal import Progress
from penstock.core.urls import shown_url
from penstock.data.shards.copying import copy_dataset
from penstock.data.shards.dataset import Dataset, load_saved_tokenizer
from penstock.data.shards.foreign.in_place import InPlaceCorpus
from penstock.data.shards.format import _check_kernels as check
from penstock.data.shards.format import _kernels as k
from penstock.data.shards.format.images import assets_path
from penstock.data.shards.format.layout import (
    TOKENIZER_FOLDER,
    ShardLayout,
    batch_positions,
    other_places,
    read_texts,
)
from penstock.data.shards.format.manifest import (
    BATCHES,
    LENGTHS,
    MANIFEST,
    RANGE_CHECKSUMS,
    WEIGHT_SUMS,
    ChatInfo,
    Manifest,
    ShardInfo,
    TokenizerInfo,
)
from penstock.data.shards.opening import open_dataset
from penstock.data.shards.remote.length_ranges import lazy_tables
from penstock.data.shards.tables.lengths import range_checksums
from penstock.data.shards.tables.table import FAULTS
from penstock.data.shards.writing.finish import (
    content_fingerprint,
    describe_shard,
    fingerprint_pieces,
)
from penstock.data.stores.files import check_regular, check_size, checksum, map_file, map_numbers
from penstock.data.stores.store import Store
from penstock.data.stores.transfer import temporary_folder

_CHECKED = (
    "presence and size of every file",
    "every file against its checksum",
    "the tokens and loss-weight spans of every document against their checksums",
    "lengths, trained tokens, weight sums and buffer positions against the shards",
    "spans against their order and the length of their document",
    "every token id against the vocabulary",
    "origins against the list of files",
    "trees and columns against their checksums",
    "the totals of the manifest against the documents",
    "the fingerprint of the content",
    "the tokenizer in its folder, against the fingerprint of the one that made it",
)
_TEXT_BYTES = "text bytes of the manifest: they can only be counted in the raw texts"
_IN_PLACE_CHECKED = ("the files against each other, for whole tokens", "borders of all documents")
_IN_PLACE_UNCHECKED = ("the tokens themselves: the format has no checksums",)
MAX_DOCUMENTS = 1000
"""Maximum number of faulty documents listed per shard; the others are counted."""
_ROUNDING = 1e-12
"""Relative rounding of sums of weights; sums of whole numbers are exact."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong."""

    file: str
    document: int | None
    """Its number in the dataset; None if the fault does not concern one document."""
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.file}: "
            f"{'' if self.document is None else f'document {self.document}: '}{self.reason}"
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of `verify`."""

    path: str
    kind: str
    """"penstock", "Megatron" or "npy"."""
    documents: int
    tokens: int
    bytes: int
    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    faults: tuple[Fault, ...]

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults


def verify(
    path: str | Path,
    *,
    dtype: str | None = None,
    eos_id: int | None = None,
    vocab_size: int | None = None,
    progress: bool = False,
) -> Report:
    """Check everything that can be checked in a dataset. Reads all its bytes once.

    Args:
        path: A dataset's folder, a Megatron prefix, or an `.npy` file; or the URL of a dataset,
            which is then copied to a temporary folder on the disk of the cache.
        dtype: As for `open_dataset`.
        eos_id: As for `open_dataset`.
        vocab_size: For a Megatron or `.npy` corpus: check that every token id is below it.
        progress: Show a bar.

    Raises:
        FormatError: It is not a dataset, or is unfinished, so there is nothing to check.
    """
    if is_url(path):
        return _verify_remote(normal_url(path), progress)
    path = local_path(path, "a dataset")
    if path.is_dir():
        return _verify_dataset(path, progress)
    corpus = open_dataset(path, dtype=dtype, eos_id=eos_id)
    if not isinstance(corpus, InPlaceCorpus):
        raise FormatError(
            f"{path}: several datasets; verify each of its own (`penstock verify` takes a glob)"
        )
    return _verify_in_place(corpus, vocab_size)


def _verify_remote(url: str, progress: bool) -> Report:
    """Check a dataset in a store: every byte of it is fetched."""
    shown = shown_url(url)
    with temporary_folder() as folder:
        try:
            copy_dataset(url, folder / "copy", progress=progress, check=False)
        except CorruptionError as error:
            manifest = Manifest.parse(Store(url).read(MANIFEST), shown)
            return Report(
                path=shown,
                kind="penstock",
                documents=manifest.documents,
                tokens=manifest.tokens,
                bytes=0,
                checked=_CHECKED[:1],
                unchecked=_CHECKED[1:],
                faults=(
                    Fault(file=shown, document=None, reason=_without_path(error, Path(shown))),
                ),
            )
        found = _verify_dataset(folder / "copy", progress)
        faults = tuple(
            replace(fault, file=fault.file.replace(str(folder / "copy"), shown))
            for fault in found.faults
        )
        return replace(found, path=shown, faults=faults)


def _verify_dataset(path: Path, progress: bool) -> Report:
    manifest = Manifest.load(path)
    size = sum(shard.bytes for shard in manifest.shards)
    others = sorted({file.name for file in path.glob("*.json")} - {MANIFEST, *manifest.checksums})
    unchecked = [f"{', '.join(others)}, which have no checksums"] if others else []
    if manifest.text_bytes and not manifest.has_text:
        unchecked.append(_TEXT_BYTES)
    with Progress("verifying", total=size, unit="B", enabled=progress) as bar:
        faults = tuple(_dataset_faults(path, manifest, bar))
    return Report(
        path=str(path),
        kind="penstock",
        documents=manifest.documents,
        tokens=manifest.tokens,
        bytes=size,
        checked=_CHECKED,
        unchecked=tuple(unchecked),
        faults=faults,
    )


def _verify_in_place(corpus: InPlaceCorpus, vocab_size: int | None) -> Report:
    """Check the ids of a foreign corpus; opening it has checked the borders."""
    table, faults = corpus.table, []
    dtype = np.uint16 if table.token_bytes == 2 else np.uint32
    for shard, (path, data) in enumerate(zip(table.paths, table.mappings, strict=False)):
        begin = int(table.batches["tokens"][shard])
        found = (
            -1 if vocab_size is None else check.first_outside(data[begin:].view(dtype), vocab_size)
        )
        if found >= 0:
            token = data[begin:].view(dtype)[found]
            reason = (
                f"token {found} of the file is {token}, but the vocabulary has {vocab_size} ids"
            )
            faults.append(Fault(file=str(path), document=None, reason=reason))
    ids = ("every token id against the vocabulary",)
    return Report(
        path=str(corpus.path),
        kind=corpus.kind,
        documents=len(corpus),
        tokens=corpus.num_tokens,
        bytes=int(table.shard_bytes.sum()),
        checked=_IN_PLACE_CHECKED + (() if vocab_size is None else ids),
        unchecked=_IN_PLACE_UNCHECKED + (ids if vocab_size is None else ()),
        faults=tuple(faults),
    )


def _dataset_faults(path: Path, manifest: Manifest, bar: Progress) -> Iterator[Fault]:
    sound = True
    for fault in _file_faults(path, manifest):
        sound = False
        yield fault
    sides = _Sides.of(path, manifest)
    document, batch = 0, 0
    for shard in manifest.shards:
        part = sides.part(
            slice(document, document + shard.documents), slice(batch, batch + shard.batches)
        )
        for fault in _Shard(path / shard.file, manifest, shard, document, part).faults():
            sound = False
            yield fault
        document, batch = document + shard.documents, batch + shard.batches
        bar.advance(shard.bytes)
    yield from _extra_faults(path, manifest)
    if sound:
        yield from _whole_faults(path, manifest, sides)
    yield from _tokenizer_faults(path, manifest)


def _file_faults(path: Path, manifest: Manifest) -> Iterator[Fault]:
    """What is wrong with the files next to the shards."""
    for name, expected in manifest.checksums.items():
        try:
            check_regular(path / name)
            if checksum(map_file(path / name)) != expected:
                yield Fault(
                    file=str(path / name), document=None, reason="differs from its checksum"
                )
        except OSError as error:
            yield Fault(
                file=str(path / name),
                document=None,
                reason=f"cannot be read: {error.strerror or error}",
            )
        except CorruptionError as error:
            yield Fault(
                file=str(path / name), document=None, reason=_without_path(error, path / name)
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """The content of the files next to the shards; None for a file that cannot be used."""

    lengths: Array | None
    """uint32 [documents, 2]."""
    batches: Array | None
    """`BATCH` [batches]."""
    weight_sums: Array | None
    """float64 [documents]; also None if all weights are 0 or 1."""

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> "_Sides":
        def numbers(name: str, dtype: DTypeLike, shape: tuple[int, ...]) -> Array | None:
            try:
                return map_numbers(path / name, dtype, shape)
            except (CorruptionError, OSError):
                return None  # reported by `_file_faults`

        documents = manifest.documents
        return cls(
            lengths=numbers(LENGTHS, "<u4", (documents, 2)),
            batches=numbers(BATCHES, k.BATCH, (sum(shard.batches for shard in manifest.shards),)),
            weight_sums=numbers(WEIGHT_SUMS, "<f8", (documents,))
            if manifest.fractional_weights
            else None,
        )

    def part(self, documents: slice, batches: slice) -> "_Sides":
        """The part that describes one shard."""
        return _Sides(
            lengths=None if self.lengths is None else self.lengths[documents],
            batches=None if self.batches is None else self.batches[batches],
            weight_sums=None if self.weight_sums is None else self.weight_sums[documents],
        )


@final
@dataclass(frozen=True, slots=True)
class _Shard:
    """The check of one shard."""

    path: Path
    manifest: Manifest
    info: ShardInfo
    first: int
    """Number of its first document."""
    sides: _Sides

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
            yield self._fault(_without_path(error, self.path))
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


def _extra_faults(path: Path, manifest: Manifest) -> Iterator[Fault]:
    """Documents with wrong trees, columns or images; branches of trees must begin with the token at
    their fork.
    """
    if not manifest.layout.extras:
        return
    try:
        dataset = Dataset.open(path)
        extras = dataset.extras
    except PenstockError:
        return  # reported by others
    assert extras is not None
    found = 0
    for document in range(len(dataset)):
        try:
            extras.read(document)
            for image in extras.images(document):
                image.read()
            if (tree := extras.tree(document)) is None:
                continue
            tokens = dataset.table.read(document, document + 1).values
            for begin, fork, parent in tree.branches.tolist():
                if parent >= 0 and tokens[begin] != tokens[_slot_at(tree.branches[parent], fork)]:
                    raise CorruptionError(
                        f"the branch at token {begin} does not begin with the token where it forks"
                    )
        except PenstockError as error:
            found += 1
            if found <= MAX_DOCUMENTS:
                shard = dataset.table.paths[dataset.table.locate(document)[0]]
                reason = (
                    _without_path(error, Path(shard))
                    .removeprefix(f"document {document}: ")
                    .partition("; copy")[0]
                )
                yield Fault(file=str(shard), document=document, reason=reason)
    if found > MAX_DOCUMENTS:
        yield Fault(
            file=str(path),
            document=None,
            reason=f"{found - MAX_DOCUMENTS:,} more documents are damaged",
        )


def _slot_at(branch: Array, position: int) -> int:
    """The slot of a position in a branch (first slot, fork, parent)."""
    return int(branch[0]) + position - int(branch[1])


def _whole_faults(path: Path, manifest: Manifest, sides: _Sides) -> Iterator[Fault]:
    """What is wrong with a dataset as a whole, if each file is sound."""
    try:
        dataset = Dataset.open(path)
        _ = dataset.files, ChatInfo.load(path)
    except PenstockError as error:
        yield Fault(file=str(path), document=None, reason=f"does not open: {error}")
        return
    table = dataset.table

    def pieces(i: int) -> tuple[Iterator[tuple[int, Any]], Array]:
        batches = table.batches[table.shard_first_batch[i] : table.shard_first_batch[i + 1]]
        lengths = table.lengths[table.shard_starts[i] : table.shard_starts[i + 1]]
        return fingerprint_pieces(
            map_file(path / manifest.shards[i].file), batches, lengths, manifest.layout
        ), lengths

    parts = map(pieces, range(len(manifest.shards)))
    if RANGE_CHECKSUMS in manifest.checksums:
        tables = [map_file(path / name) for name in lazy_tables(manifest)]
        stored = np.fromfile(path / RANGE_CHECKSUMS, "<u8")
        size = int(stored[0]) if len(stored) else 0
        if not 0 < size < 1 << 40 or not np.array_equal(range_checksums(tables, size), stored):
            yield Fault(
                file=str(path / RANGE_CHECKSUMS),
                document=None,
                reason=f"is not of {LENGTHS} and {WEIGHT_SUMS}",
            )
    if content_fingerprint(parts, manifest.layout) != manifest.fingerprint:
        yield Fault(
            file=str(path),
            document=None,
            reason="the content does not have the manifest's fingerprint",
        )


def _tokenizer_faults(path: Path, manifest: Manifest) -> Iterator[Fault]:
    folder = path / TOKENIZER_FOLDER
    try:
        tokenizer = load_saved_tokenizer(path)
    except PenstockError as error:
        yield Fault(file=str(folder), document=None, reason=str(error))
        return
    if tokenizer is None:
        return
    found = TokenizerInfo.of(tokenizer)
    if found.fingerprint != manifest.tokenizer.fingerprint:
        yield Fault(
            file=str(folder),
            document=None,
            reason="is not the tokenizer that made the dataset; it was changed",
        )
        return
    for name in ("vocab_size", "bos_id", "eos_id"):
        stored, value = getattr(manifest.tokenizer, name), getattr(found, name)
        if stored != value:
            reason = f"its {name} is {stored} in {MANIFEST}, but {value} in the tokenizer"
            yield Fault(file=str(folder), document=None, reason=reason)


def _without_path(error: Exception, path: Path) -> str:
    return str(error).removeprefix(f"{path}: ")
