"""Checks every byte of a dataset, and reports what was checked and what could not be.

A dataset may come from a stranger, and checksums and seals detect damage, not forgery. So a
matching checksum proves nothing. Every document is read, every count in the manifest is made again,
and a dataset is sound only if it opens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.core.arrays import Array
from penstock.core.errors import CorruptionError, FormatError, PenstockError
from penstock.core.folders import is_url, local_path, normal_url
from penstock.core.terminal import Progress
from penstock.core.urls import shown_url
from penstock.data.shards.copying import copy_dataset
from penstock.data.shards.dataset import Dataset, load_saved_tokenizer
from penstock.data.shards.foreign.in_place import InPlaceCorpus
from penstock.data.shards.format import _check_kernels as check
from penstock.data.shards.format.manifest import (
    LENGTHS,
    MANIFEST,
    RANGE_CHECKSUMS,
    TOKENIZER_FOLDER,
    WEIGHT_SUMS,
    ChatInfo,
    Manifest,
    TokenizerInfo,
)
from penstock.data.shards.opening import open_dataset
from penstock.data.shards.remote.length_ranges import lazy_tables
from penstock.data.shards.shard_faults import (
    MAX_DOCUMENTS,
    Fault,
    ShardCheck,
    SideFiles,
    without_path,
)
from penstock.data.shards.tables.lengths import range_checksums
from penstock.data.shards.writing.finish import content_fingerprint, fingerprint_pieces
from penstock.data.stores.files import check_regular, checksum, map_file
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
                faults=(Fault(file=shown, reason=without_path(error, Path(shown))),),
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
            faults.append(Fault(file=str(path), reason=reason))
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
    sides = SideFiles.of(path, manifest)
    document, batch = 0, 0
    for shard in manifest.shards:
        part = sides.part(
            slice(document, document + shard.documents), slice(batch, batch + shard.batches)
        )
        for fault in ShardCheck(path / shard.file, manifest, shard, document, part).faults():
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
                yield Fault(file=str(path / name), reason="differs from its checksum")
        except OSError as error:
            yield Fault(
                file=str(path / name),
                reason=f"cannot be read: {error.strerror or error}",
            )
        except CorruptionError as error:
            yield Fault(file=str(path / name), reason=without_path(error, path / name))


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
                    without_path(error, Path(shard))
                    .removeprefix(f"document {document}: ")
                    .partition("; copy")[0]
                )
                yield Fault(file=str(shard), document=document, reason=reason)
    if found > MAX_DOCUMENTS:
        yield Fault(
            file=str(path),
            reason=f"{found - MAX_DOCUMENTS:,} more documents are damaged",
        )


def _slot_at(branch: Array, position: int) -> int:
    """The slot of a position in a branch (first slot, fork, parent)."""
    return int(branch[0]) + position - int(branch[1])


def _whole_faults(path: Path, manifest: Manifest, sides: SideFiles) -> Iterator[Fault]:
    """What is wrong with a dataset as a whole, if each file is sound."""
    try:
        dataset = Dataset.open(path)
        _ = dataset.files, ChatInfo.load(path)
    except PenstockError as error:
        yield Fault(file=str(path), reason=f"does not open: {error}")
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
                reason=f"is not of {LENGTHS} and {WEIGHT_SUMS}",
            )
    if content_fingerprint(parts, manifest.layout) != manifest.fingerprint:
        yield Fault(
            file=str(path),
            reason="the content does not have the manifest's fingerprint",
        )


def _tokenizer_faults(path: Path, manifest: Manifest) -> Iterator[Fault]:
    folder = path / TOKENIZER_FOLDER
    try:
        tokenizer = load_saved_tokenizer(path)
    except PenstockError as error:
        yield Fault(file=str(folder), reason=str(error))
        return
    if tokenizer is None:
        return
    found = TokenizerInfo.of(tokenizer)
    if found.fingerprint != manifest.tokenizer.fingerprint:
        yield Fault(
            file=str(folder),
            reason="is not the tokenizer that made the dataset; it was changed",
        )
        return
    for name in ("vocab_size", "bos_id", "eos_id"):
        stored, value = getattr(manifest.tokenizer, name), getattr(found, name)
        if stored != value:
            reason = f"its {name} is {stored} in {MANIFEST}, but {value} in the tokenizer"
            yield Fault(file=str(folder), reason=reason)
