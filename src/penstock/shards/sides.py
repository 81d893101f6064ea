"""Side files of a finished shard: what `finish_dataset` joins when all shards are there."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from penstock.shards.files import (
    Array,
    check_size,
    checksum,
    map_numbers,
    output_errors,
    sync,
    write_file,
    write_json,
)
from penstock.shards.manifest import HISTOGRAM_BINS, ShardInfo, shard_from_json

UNFINISHED = "unfinished"
"""Folder of the side files, inside the dataset's; it is gone when the dataset is finished."""


def describe_shard(
    name: str,
    data: Array,
    batches: Array,
    lengths: Array,
    *,
    text_bytes: int,
    fractional: bool,
    ends: tuple[int, int],
) -> ShardInfo:
    """What a finished shard holds: its bytes, uint64 [batches, 9], uint32 [documents, 2], and what was counted."""
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
    )


def save_sides(folder: Path, info: ShardInfo, lengths: Array, batches: Array, weight_sums: Sequence[Array]) -> None:
    """Write the side files of a shard; the JSON that makes it count as finished comes last."""
    sides = folder / UNFINISHED
    with output_errors(sides):
        sides.mkdir(exist_ok=True)
    write_file(sides / f"{info.file}.lengths", lengths)
    write_file(sides / f"{info.file}.batches", batches)
    if info.fractional_weights:
        write_file(sides / f"{info.file}.weights", np.concatenate(weight_sums))
    write_json(sides / f"{info.file}.json", asdict(info))
    sync(sides)


def load_shard(folder: Path, name: str) -> ShardInfo | None:
    """A shard finished before, in a dataset that is not; None when it has to be written (again)."""
    try:
        info = shard_from_json(json.loads((Path(folder) / UNFINISHED / f"{name}.json").read_bytes()))
        complete = (Path(folder) / name).stat().st_size == info.bytes
        for side, size in _side_bytes(info).items():
            check_size(Path(folder) / UNFINISHED / f"{name}.{side}", size)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return info if complete else None


def _side_bytes(shard: ShardInfo) -> dict[str, int]:
    """Bytes of each side file, by its ending."""
    weights = {"weights": 8 * shard.documents} if shard.fractional_weights else {}
    return {"lengths": 8 * shard.documents, "batches": 72 * shard.batches, **weights}


def side_lengths(folder: Path, shard: ShardInfo) -> Array:
    """uint32 [documents, 2]."""
    return map_numbers(folder / UNFINISHED / f"{shard.file}.lengths", "<u4", (shard.documents, 2))


def side_batches(folder: Path, shard: ShardInfo) -> Array:
    """uint64 [batches, 9]."""
    return map_numbers(folder / UNFINISHED / f"{shard.file}.batches", "<u8", (shard.batches, 9))


def side_weight_sums(folder: Path, shard: ShardInfo) -> Array:
    """float64 [documents]; the trained tokens where all weights are 0 or 1."""
    if not shard.fractional_weights:
        return side_lengths(folder, shard)[:, 1].astype(np.float64)
    return map_numbers(folder / UNFINISHED / f"{shard.file}.weights", "<f8", (shard.documents,))
