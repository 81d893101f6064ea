"""Makes a dataset from finished shards: joins their side files, fingerprints the content, writes
the manifest last.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError, OutputError
from penstock.data.shards.format._kernels import BATCH, DOCUMENTS_PER_BATCH
from penstock.data.shards.format.images import IMAGE, assets_path, portable
from penstock.data.shards.format.layout import (
    COLUMN_CHECKSUMS,
    IMAGES,
    TREE,
    ShardLayout,
    extra_places,
)
from penstock.data.shards.format.manifest import (
    BATCHES,
    FILES,
    HISTOGRAM_BINS,
    LENGTHS,
    RANGE_CHECKSUMS,
    WEIGHT_SUMS,
    DamagedSource,
    Manifest,
    ShardInfo,
    TokenizerInfo,
    add_histograms,
    common_ends,
    shard_as_json,
    shard_from_json,
)
from penstock.data.shards.tables.lengths import RANGE_DOCUMENTS, range_checksums
from penstock.data.shards.writing.stubs import fingerprint_of, load_stub
from penstock.data.stores.files import (
    check_size,
    checksum,
    map_file,
    map_numbers,
    output_errors,
    reading,
    sync,
    write_file,
    write_json,
)

LAZY_DOCUMENTS = 1 << 22
"""From more documents on, ranges of the lengths get checksums, so that a remote dataset opens
without all of them.
"""
UNFINISHED = "unfinished"
"""Folder of the side files inside the dataset's folder; removed when the dataset is finished."""


def describe_shard(
    name: str,
    data: Array,
    batches: Array,
    lengths: Array,
    *,
    text_bytes: int,
    fractional: bool,
    ends: tuple[int, int],
    assets: int,
) -> ShardInfo:
    """The description of a finished shard.

    Args:
        name: Its file name.
        data: Its bytes.
        batches: `BATCH` [batches].
        lengths: uint32 [documents, 2].
        text_bytes: UTF-8 bytes of the texts.
        fractional: Whether any loss weight is neither 0 nor 1.
        ends: First and last id of its documents, as in `ShardInfo`.
        assets: Bytes of the file with its images.
    """
    tokens = lengths[:, 0]
    bits = np.bincount(np.frexp(tokens.astype(np.float64))[1], minlength=HISTOGRAM_BINS)
    return ShardInfo(
        file=name,
        documents=len(lengths),
        batches=len(batches),
        bytes=len(data),
        tokens=int(tokens.sum(dtype=np.int64)),
        trained_tokens=int(lengths[:, 1].sum(dtype=np.int64)),
        text_bytes=text_bytes,
        fractional_weights=fractional,
        checksum=checksum(data),
        longest=int(tokens.max(initial=0)),
        histogram=tuple(bits.tolist()),
        ends=ends,
        assets=assets,
    )


def save_sides(
    folder: Path, info: ShardInfo, lengths: Array, batches: Array, weight_sums: Sequence[Array]
) -> None:
    """Write the side files of a shard; the JSON that marks it as finished comes last."""
    sides = folder / UNFINISHED
    with output_errors(sides):
        sides.mkdir(exist_ok=True)
    write_file(sides / f"{info.file}.lengths", lengths)
    write_file(sides / f"{info.file}.batches", batches)
    if info.fractional_weights:
        write_file(sides / f"{info.file}.weights", np.concatenate(weight_sums))
    write_json(sides / f"{info.file}.json", shard_as_json(info))
    sync(sides)


def load_shard(folder: Path, name: str) -> ShardInfo | None:
    """A finished shard of an unfinished dataset; None if it must be written (again)."""
    try:
        info = shard_from_json(
            json.loads((Path(folder) / UNFINISHED / f"{name}.json").read_bytes())
        )
        complete = has_files(Path(folder) / name, info)
        for side, size in _side_bytes(info).items():
            check_size(Path(folder) / UNFINISHED / f"{name}.{side}", size)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return info if complete else None


def has_files(path: Path, info: ShardInfo) -> bool:
    """Whether a shard and the file of its images exist, of the right sizes, here or in a store."""
    if not path.is_file() or path.stat().st_size != info.bytes:
        stub = load_stub(path)
        return stub is not None and stub.fits(info)
    assets = assets_path(path)
    return not info.assets or (assets.is_file() and assets.stat().st_size == info.assets)


def _side_bytes(shard: ShardInfo) -> dict[str, int]:
    """Bytes of each side file, by its ending."""
    weights = {"weights": 8 * shard.documents} if shard.fractional_weights else {}
    return {"lengths": 8 * shard.documents, "batches": BATCH.itemsize * shard.batches, **weights}


def side_lengths(folder: Path, shard: ShardInfo) -> Array:
    """uint32 [documents, 2]."""
    return map_numbers(folder / UNFINISHED / f"{shard.file}.lengths", "<u4", (shard.documents, 2))


def side_batches(folder: Path, shard: ShardInfo) -> Array:
    """`BATCH` [batches]."""
    return map_numbers(folder / UNFINISHED / f"{shard.file}.batches", BATCH, (shard.batches,))


def side_weight_sums(folder: Path, shard: ShardInfo) -> Array:
    """float64 [documents]; the numbers of trained tokens if all weights are 0 or 1."""
    if not shard.fractional_weights:
        return side_lengths(folder, shard)[:, 1].astype(np.float64)
    return map_numbers(folder / UNFINISHED / f"{shard.file}.weights", "<f8", (shard.documents,))


def finish_dataset(
    folder: Path,
    *,
    shards: Sequence[ShardInfo],
    layout: ShardLayout,
    tokenizer: TokenizerInfo,
    configuration: str,
    files: Sequence[str],
    sealed: Sequence[str] = (),
    damaged: Sequence[DamagedSource] = (),
    duplicates: Mapping[str, int] = MappingProxyType({}),
    path_values: Sequence[str] = (),
    sampling: Mapping[str, object] = MappingProxyType({}),
) -> Manifest:
    """Join finished shards into a dataset.

    The manifest is renamed into place when everything else is on the disk; if killed before that,
    call it again with the same shards. Reads the shards' checksums (1.6 % of their bytes) for the
    fingerprint.

    Args:
        folder: The dataset's folder, with the shards, or stubs of those that are in a store, and
            their side files.
        shards: Results of `ShardWriter.finish` or `load_shard`, in the order of the dataset.
        layout: The layout of all shards.
        tokenizer: The tokenizer of the ids.
        configuration: Fingerprint of the settings that made the dataset.
        files: Names of the origin files, which the shards' origins index.
        sealed: Names of further files in the folder; the manifest records their checksums.
        damaged: Files of the input that could not be read completely.
        duplicates: File of the input → its documents that are left out, because an earlier document
            is the same.
        path_values: Names of the values of paths, if the layout has trees.
        sampling: Settings of the sampler of rollouts, as JSON holds them.

    Raises:
        OutputError: The folder cannot be written, or a side file is missing.
        ConfigError: The shards were written for another vocabulary.
    """
    folder = Path(folder)
    if layout.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"the shards have a vocabulary of {layout.vocab_size}, the tokenizer of "
            f"{tokenizer.vocab_size}"
        )
    kept = [shard for shard in shards if shard.documents]
    fractional = any(shard.fractional_weights for shard in kept)

    try:
        _join_sides(folder / LENGTHS, kept, side_lengths)
        _join_sides(folder / BATCHES, kept, side_batches)
        if fractional:
            _join_sides(folder / WEIGHT_SUMS, kept, side_weight_sums)
        else:
            (folder / WEIGHT_SUMS).unlink(
                missing_ok=True
            )  # from an earlier attempt with other shards
        fingerprint = content_fingerprint(
            ((_pieces(folder, shard, layout), side_lengths(folder, shard)) for shard in kept),
            layout,
        )
    except FileNotFoundError as error:
        raise OutputError(
            f"{error.filename}: missing, so the dataset cannot be finished; prepare again"
        ) from None
    ranged = sum(shard.documents for shard in kept) > LAZY_DOCUMENTS
    _write_range_checksums(
        folder, [LENGTHS, *([WEIGHT_SUMS] if fractional else [])] if ranged else []
    )
    write_json(folder / FILES, list(files))
    names = [
        LENGTHS,
        BATCHES,
        FILES,
        *([WEIGHT_SUMS] if fractional else []),
        *([RANGE_CHECKSUMS] if ranged else []),
    ]
    checksums = {name: checksum(map_file(folder / name)) for name in [*names, *sealed]}
    checksums |= dict(_asset_checksum(folder / shard.file) for shard in kept if shard.assets)
    manifest = Manifest(
        documents=sum(shard.documents for shard in kept),
        tokens=sum(shard.tokens for shard in kept),
        trained_tokens=sum(shard.trained_tokens for shard in kept),
        text_bytes=sum(shard.text_bytes for shard in kept),
        longest=max((shard.longest for shard in kept), default=0),
        token_bytes=layout.token_dtype.itemsize,
        documents_per_batch=DOCUMENTS_PER_BATCH,
        has_spans=layout.has_spans,
        has_text=layout.has_text,
        fractional_weights=fractional,
        shards=tuple(kept),
        files=len(files),
        tokenizer=tokenizer,
        configuration=configuration,
        fingerprint=fingerprint,
        histogram=add_histograms(kept),
        ends=common_ends(kept),
        checksums=checksums,
        damaged=tuple(damaged),
        duplicates=dict(duplicates),
        columns=layout.columns,
        path_values=tuple(path_values) if layout.has_trees else None,
        has_images=layout.has_images,
        sampling=dict(sampling),
    )
    sync(folder)
    manifest.save(folder)
    sync(folder)
    for shard in shards:
        if not shard.documents:
            (folder / shard.file).unlink(missing_ok=True)
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    return manifest


def _write_range_checksums(folder: Path, names: Sequence[str]) -> None:
    """Write the checksums of ranges of some tables; without tables, remove those of an earlier
    attempt.
    """
    if not names:
        (folder / RANGE_CHECKSUMS).unlink(missing_ok=True)
        return
    write_file(
        folder / RANGE_CHECKSUMS,
        range_checksums([map_file(folder / name) for name in names], RANGE_DOCUMENTS),
    )


def content_fingerprint(
    shards: Iterable[tuple[Iterable[tuple[int, Any]], Array]], layout: ShardLayout
) -> str:
    """A hash of all tokens and loss weights, by their checksums, in order; independent of shards
    and batches.

    Args:
        shards: (`fingerprint_pieces`, lengths uint32 [documents, 2]) of each.
        layout: The layout of all shards.

    Returns:
        32 hexadecimal digits.
    """
    words, extras = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    counts = hashlib.blake2b(digest_size=16)
    for pieces, lengths in shards:
        counts.update(np.ascontiguousarray(lengths[:, 0]).data)
        for place, piece in pieces:
            (words, extras)[place].update(piece)
    kind = f"penstock 1, {layout.token_dtype.itemsize} bytes, spans {layout.has_spans}"
    whole = hashlib.blake2b(kind.encode(), digest_size=16)
    whole.update(words.digest())
    whole.update(counts.digest())
    if layout.extras:
        whole.update(repr(layout.extras).encode() + extras.digest())
    return whole.hexdigest()


def fingerprint_pieces(
    data: Array, batches: Array, lengths: Array, layout: ShardLayout, *, first: int | None = None
) -> Iterator[tuple[int, Any]]:
    """The bytes of a shard that its dataset's fingerprint hashes: (0, checksums of tokens and loss
    weights), or (1, trees, images and checksums of columns).

    Args:
        data: The shard, uint8 [bytes].
        batches: `BATCH` [batches].
        lengths: uint32 [documents, 2].
        layout: Its layout.
        first: Only of this number of documents, from the first on; None: of all.
    """
    for number, line in enumerate(batches):
        before = number * DOCUMENTS_PER_BATCH
        rows = min(DOCUMENTS_PER_BATCH, len(lengths) - before)
        used = rows if first is None else min(rows, first - before)
        if used <= 0:
            return
        total = int(data[int(line["checksum_offsets"]) :][: 8 * (used + 1)].view("<i8")[-1])
        yield 0, data[int(line["checksums"]) :][: 8 * total].data
        for (name, dtype), place in zip(
            layout.extras, extra_places(data, line, rows, layout), strict=True
        ):
            # All of what was written, independent of batches.
            if name in (TREE, IMAGES, COLUMN_CHECKSUMS):
                begin = place + 8 * (rows + 1)
                count = int(data[place + 8 * used : place + 8 * (used + 1)].view("<i8")[0])
                found = data[begin : begin + count * np.dtype(dtype).itemsize]
                yield 1, portable(found.view(IMAGE)) if name == IMAGES else found.data


def _pieces(folder: Path, shard: ShardInfo, layout: ShardLayout) -> Iterator[tuple[int, Any]]:
    path = folder / shard.file
    if not path.is_file():
        yield from fingerprint_of(path)
        return
    data, batches = map_file(path), side_batches(folder, shard)
    pieces = fingerprint_pieces(data, batches, side_lengths(folder, shard), layout)
    yield from reading(data, pieces)


def _asset_checksum(shard: Path) -> tuple[str, int]:
    """The name and the checksum of the file with a shard's images."""
    path = assets_path(shard)
    if not path.is_file() and (stub := load_stub(shard)) is not None:
        return path.name, stub.assets_checksum
    return path.name, checksum(map_file(path))


def _join_sides(
    path: Path, shards: Sequence[ShardInfo], part: Callable[[Path, ShardInfo], Array]
) -> None:
    """Write the side files of all shards end to end, forced to the disk, then renamed."""
    partial = path.with_name(path.name + ".partial")
    with output_errors(path), open(partial, "wb") as file:
        for shard in shards:
            file.write(np.ascontiguousarray(part(path.parent, shard)).data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
