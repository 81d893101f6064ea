"""Checks every byte of a dataset that has a checksum, and says what it checked and what it could not."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from penstock.compiled import address_of
from penstock.errors import CorruptionError, FormatError, PenstockError
from penstock.progress import Progress
from penstock.shards import _check_kernels as check
from penstock.shards import _kernels as k
from penstock.shards.files import Array, check_size, checksum, map_file, map_numbers
from penstock.shards.finish import content_fingerprint
from penstock.shards.in_place import InPlaceCorpus
from penstock.shards.layout import TOKENIZER_FOLDER, ShardLayout, batch_positions, read_batches
from penstock.shards.manifest import BATCHES, DOCUMENTS_PER_BATCH, LENGTHS, MANIFEST, Manifest, ShardInfo
from penstock.shards.opening import open_dataset
from penstock.shards.table import FAULTS
from penstock.tokenizers import load_tokenizer

_CHECKED = (
    "presence and size of every file",
    "every file against its checksum",
    "the tokens and loss-weight spans of every document against their checksums",
    "lengths, trained tokens and buffer positions against the shards",
    "spans against their order and the length of their document",
    "every token id against the vocabulary",
    "origins against the list of files",
    "the fingerprint of the content",
    "the tokenizer that lies with it, against the fingerprint of the one that made it",
)
_IN_PLACE_CHECKED = ("the files against each other, for whole tokens", "borders of all documents")
_IN_PLACE_UNCHECKED = ("the tokens themselves: the format has no checksums",)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong."""

    file: str
    document: int | None
    """Its number in the dataset; None when the fault is not of one document."""
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {'' if self.document is None else f'document {self.document}: '}{self.reason}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `verify` found."""

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
    """Check all that can be checked of a dataset. Costs one reading of all its bytes.

    Args:
        path: As for `open_dataset`.
        dtype: As for `open_dataset`.
        eos_id: As for `open_dataset`.
        vocab_size: For a Megatron or `.npy` corpus: check that every token id is below it.
        progress: Show a bar.

    Raises:
        FormatError: It is no dataset, or unfinished, so there is nothing to check.
    """
    path = Path(path)
    if path.is_dir():
        return _verify_dataset(path, progress)
    corpus = open_dataset(path, dtype=dtype, eos_id=eos_id)
    if not isinstance(corpus, InPlaceCorpus):
        raise FormatError(f"{path}: not a corpus in place")
    return _verify_in_place(corpus, vocab_size)


def _verify_dataset(path: Path, progress: bool) -> Report:
    manifest = Manifest.load(path)
    size = sum(shard.bytes for shard in manifest.shards)
    others = sorted({file.name for file in path.glob("*.json")} - {MANIFEST, *manifest.checksums})
    with Progress("verifying", total=size, unit="B", enabled=progress) as bar:
        faults = tuple(_dataset_faults(path, manifest, bar))
    return Report(
        path=str(path),
        kind="penstock",
        documents=manifest.documents,
        tokens=manifest.tokens,
        bytes=size,
        checked=_CHECKED,
        unchecked=(f"{', '.join(others)}, which have no checksums",) if others else (),
        faults=faults,
    )


def _verify_in_place(corpus: InPlaceCorpus, vocab_size: int | None) -> Report:
    """Opening it has checked the borders; what is left is the ids."""
    table, faults = corpus.table, []
    dtype = np.uint16 if table.token_bytes == 2 else np.uint32
    for shard, (path, data) in enumerate(zip(table.paths, table.mappings, strict=False)):
        begin = int(table.batches[shard, 1])
        found = -1 if vocab_size is None else check.first_outside(data[begin:].view(dtype), vocab_size)
        if found >= 0:
            reason = f"token {found} of the file is {data[begin:].view(dtype)[found]}, the vocabulary has {vocab_size}"
            faults.append(Fault(file=str(path), document=None, reason=reason))
    ids = ("every token id against the vocabulary",)
    return Report(
        path=str(corpus.path),
        kind=corpus.kind,
        documents=len(corpus),
        tokens=int(table.lengths.sum(dtype=np.int64)),
        bytes=int(table.shard_bytes.sum()),
        checked=_IN_PLACE_CHECKED + (() if vocab_size is None else ids),
        unchecked=_IN_PLACE_UNCHECKED + (ids if vocab_size is None else ()),
        faults=tuple(faults),
    )


def _dataset_faults(path: Path, manifest: Manifest, bar: Progress) -> Iterator[Fault]:
    sound = True
    for name, due in manifest.checksums.items():
        fault = _file_fault(path / name, due)
        if fault is not None:
            sound = False
            yield fault
    lengths = _map(path / LENGTHS, "<u4", (manifest.documents, 2))
    batches = _map(path / BATCHES, "<u8", (sum(shard.batches for shard in manifest.shards), k.BATCH_COLUMNS))
    if batches is not None and checksum(batches) != manifest.checksums[BATCHES]:
        batches = None  # positions in it may lie outside the files
    document, batch = 0, 0
    for shard in manifest.shards:
        rows, lines = slice(document, document + shard.documents), slice(batch, batch + shard.batches)
        document, batch = rows.stop, lines.stop
        known = None if lengths is None or batches is None else (lengths[rows], batches[lines])
        for fault in _shard_faults(path / shard.file, manifest, shard, rows.start, known):
            sound = False
            yield fault
        bar.advance(shard.bytes)
    if sound and lengths is not None and batches is not None:
        yield from _fingerprint_faults(path, manifest, lengths, batches)
    yield from _tokenizer_faults(path, manifest)


def _tokenizer_faults(path: Path, manifest: Manifest) -> Iterator[Fault]:
    folder = path / TOKENIZER_FOLDER
    if not folder.is_dir():
        return
    try:
        found = load_tokenizer(folder).fingerprint
    except PenstockError as error:
        yield Fault(file=str(folder), document=None, reason=str(error))
        return
    if found != manifest.tokenizer.fingerprint:
        yield Fault(
            file=str(folder), document=None, reason="is not the tokenizer that made the dataset; it was changed"
        )


def _shard_faults(
    path: Path, manifest: Manifest, shard: ShardInfo, first: int, known: tuple[Array, Array] | None
) -> Iterator[Fault]:
    """What is wrong with one shard, whose first document is `first`; `known` are its lengths and batch table."""
    try:
        check_size(path, shard.bytes)
        data = map_file(path)
        damaged = checksum(data) != shard.checksum
        layout = ShardLayout(
            vocab_size=manifest.tokenizer.vocab_size, has_spans=manifest.has_spans, has_text=manifest.has_text
        )
        found = []
        if known is not None:
            found = list(_document_faults(path, data, layout, first, *known))
            if not damaged:
                found += _structure_faults(path, data, layout, manifest, *known)
    except (CorruptionError, FormatError) as error:
        yield Fault(file=str(path), document=None, reason=_without_path(error, path))
        return
    yield from found
    if damaged and not found:
        reason = "differs from its checksum outside tokens and spans: in origins, texts, or the structure of the file"
        yield Fault(file=str(path), document=None, reason=reason)


def _document_faults(
    path: Path, data: Array, layout: ShardLayout, first: int, lengths: Array, lines: Array
) -> Iterator[Fault]:
    """What is wrong with the documents of a shard, found by the batch table alone: metadata may be damaged."""
    base, token_bytes = np.uint64(address_of(data)), layout.token_dtype.itemsize
    settings = (token_bytes, layout.has_spans, layout.vocab_size)
    for number, places in enumerate(lines):
        begin = number * DOCUMENTS_PER_BATCH
        rows = lengths[begin : begin + DOCUMENTS_PER_BATCH]
        rooms = len(data) - np.array([places[1], places[3], places[6:9].max()], np.int64)
        faults = np.zeros(len(rows), np.uint8)
        line = np.uint64(address_of(lines) + number * lines.strides[0])
        check.check_batch(base, line, settings, rooms // [token_bytes, 8, 4], rows, faults)
        for row in np.flatnonzero(faults).tolist():
            yield Fault(file=str(path), document=first + begin + row, reason=FAULTS[faults[row]])


def _structure_faults(
    path: Path, data: Array, layout: ShardLayout, manifest: Manifest, lengths: Array, lines: Array
) -> Iterator[Fault]:
    """What is wrong with a shard whose bytes are as they were written, so that Arrow can read it safely."""
    due = batch_positions(data, layout)
    if len(due) != len(lines) or (due != lines).any():
        yield Fault(file=str(path), document=None, reason=f"its buffers are not where {BATCHES} says")
    begin = 0
    for batch in read_batches(data):
        files = batch.column("origin").field("file").to_numpy()
        if len(files) and (files.min() < 0 or files.max() >= manifest.files):
            reason = f"origins in files {files.min()} to {files.max()}, the dataset has {manifest.files}"
            yield Fault(file=str(path), document=None, reason=reason)
        begin += batch.num_rows
    if begin != len(lengths):
        yield Fault(file=str(path), document=None, reason=f"{begin} documents, the manifest says {len(lengths)}")


def _fingerprint_faults(path: Path, manifest: Manifest, lengths: Array, batches: Array) -> Iterator[Fault]:
    sizes = np.array([[shard.documents, shard.batches] for shard in manifest.shards], np.int64)
    ends = np.cumsum(sizes, axis=0)
    starts = ends - sizes
    parts = (
        (map_file(path / shard.file), batches[b0:b1], lengths[d0:d1])
        for shard, (d0, b0), (d1, b1) in zip(manifest.shards, starts, ends, strict=True)
    )
    layout = ShardLayout(vocab_size=manifest.tokenizer.vocab_size, has_spans=manifest.has_spans)
    if content_fingerprint(parts, layout) != manifest.fingerprint:
        yield Fault(file=str(path), document=None, reason="the content does not have the manifest's fingerprint")


def _file_fault(path: Path, due: int) -> Fault | None:
    try:
        found = checksum(map_file(path))
    except OSError as error:
        return Fault(file=str(path), document=None, reason=f"cannot be read: {error.strerror or error}")
    return None if found == due else Fault(file=str(path), document=None, reason="differs from its checksum")


def _map(path: Path, dtype: str, shape: tuple[int, ...]) -> Array | None:
    """A file of numbers, or None where it is not whole, which its checksum has told."""
    try:
        return map_numbers(path, dtype, shape)
    except CorruptionError:
        return None


def _without_path(error: Exception, path: Path) -> str:
    return str(error).removeprefix(f"{path}: ")
