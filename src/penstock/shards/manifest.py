"""The manifest: what a dataset is and holds. It is written last, so a folder that has one is complete."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, final

from penstock.errors import CorruptionError, FormatError
from penstock.shards._kernels import CHUNK_TOKENS
from penstock.shards.files import write_json

FORMAT = "penstock dataset"
VERSION = 1
MANIFEST, LENGTHS, BATCHES, WEIGHT_SUMS, FILES = (
    "manifest.json",
    "lengths.u32",
    "batches.u64",
    "weight_sums.f64",
    "files.json",
)
DOCUMENTS_PER_BATCH = 1024
HISTOGRAM_BINS = 33
"""Bin b counts the documents whose number of tokens takes b bits: 0, 1, 2–3, 4–7, …"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerInfo:
    """The tokenizer that made a dataset."""

    name: str
    fingerprint: str
    vocab_size: int
    """One more than the highest id."""
    bos_id: int | None = None
    eos_id: int | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """What to remember of a `penstock.tokenizers.Tokenizer`."""
        return cls(**{field.name: getattr(tokenizer, field.name) for field in fields(cls)})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """A finished shard: what its file holds."""

    file: str
    documents: int
    batches: int
    bytes: int
    tokens: int
    trained_tokens: int
    """Tokens from the second of each document on whose loss weight is not 0."""
    text_bytes: int
    """Bytes of UTF-8 that the tokens stand for, as far as the writer was told; 0 when it was not."""
    fractional_weights: bool
    """Whether any loss weight is neither 0 nor 1."""
    checksum: int
    """Of the whole file (`files.checksum`)."""
    longest: int
    """Tokens of the longest document."""
    histogram: tuple[int, ...]
    """Documents by length, `HISTOGRAM_BINS` of them."""
    ends: tuple[int, int]
    """The id that every document begins with, and the one that every document ends with; −1 where they differ."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedSource:
    """A file of the input that could not be read to its end, or at all; what was read of it is in the dataset."""

    file: str
    line: int
    """The first line (from 1) or row (from 0) that was not read."""
    reason: str
    size_bytes: int
    """Bytes that were to be read."""
    unread_bytes: int
    """Bytes of these that were not; what was cut off the end of a file is not counted."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What `manifest.json` says."""

    documents: int
    tokens: int
    trained_tokens: int
    text_bytes: int
    longest: int
    token_bytes: int
    """2 or 4."""
    documents_per_batch: int
    has_spans: bool
    has_text: bool
    fractional_weights: bool
    shards: tuple[ShardInfo, ...]
    files: int
    """How many origin files `files.json` lists."""
    tokenizer: TokenizerInfo
    configuration: str
    """Fingerprint of the settings that made the dataset."""
    fingerprint: str
    """Of tokens and loss weights; the same however documents are spread over shards."""
    histogram: tuple[int, ...]
    ends: tuple[int, int]
    """As in `ShardInfo`, of all documents."""
    checksums: dict[str, int]
    """Of the other files beside the shards, by name."""
    damaged: tuple[DamagedSource, ...] = ()
    """Damaged files of the input, where preparing went on all the same; left out of the JSON where there is none."""

    def save(self, folder: Path) -> None:
        """Write `manifest.json`, whole or not at all."""
        value = {"format": FORMAT, "version": VERSION, "chunk_tokens": CHUNK_TOKENS, **asdict(self)}
        if not self.damaged:
            del value["damaged"]
        write_json(folder / MANIFEST, {**value, "seal": _seal(value)})

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read and check the manifest of a dataset.

        Raises:
            FormatError: There is none, it is not ours, or it is of another version.
            CorruptionError: It is damaged.
        """
        value = _read(folder)
        if value.get("format") != FORMAT:
            raise FormatError(
                f"{folder / MANIFEST}: not a manifest of penstock; give a folder that `penstock prepare` made"
            )
        if value.get("version") != VERSION:
            raise FormatError(
                f"{folder}: format version {value.get('version')}, this penstock reads version {VERSION}; "
                "upgrade penstock, or prepare the data again"
            )
        try:
            return cls._from_json(value)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(
                f"{folder / MANIFEST}: damaged: {type(error).__name__}: {error}; copy it again, or prepare again"
            ) from None

    @classmethod
    def _from_json(cls, value: dict[str, Any]) -> Self:
        if value.pop("seal") != _seal(value):
            raise ValueError("it was changed after it was written (its seal does not fit)")
        if value.pop("chunk_tokens") != CHUNK_TOKENS:
            raise ValueError(f"chunk_tokens is not {CHUNK_TOKENS}")
        del value["format"], value["version"]
        value["shards"] = tuple(shard_from_json(shard) for shard in value["shards"])
        value["tokenizer"] = TokenizerInfo(**value["tokenizer"])
        value["histogram"], value["ends"] = tuple(value["histogram"]), tuple(value["ends"])
        value["damaged"] = tuple(DamagedSource(**one) for one in value.get("damaged", ()))
        return cls(**value)


def shard_from_json(value: dict[str, Any]) -> ShardInfo:
    """A `ShardInfo` from what `dataclasses.asdict` made of it."""
    return ShardInfo(**{**value, "histogram": tuple(value["histogram"]), "ends": tuple(value["ends"])})


def add_histograms(shards: Sequence[ShardInfo]) -> tuple[int, ...]:
    """Sum of the shards' histograms."""
    return tuple(sum(shard.histogram[b] for shard in shards) for b in range(HISTOGRAM_BINS))


def common_ends(shards: Sequence[ShardInfo]) -> tuple[int, int]:
    """`ends` of all shards' documents together."""
    first, last = ({shard.ends[side] for shard in shards} for side in (0, 1))
    return first.pop() if len(first) == 1 else -1, last.pop() if len(last) == 1 else -1


def _read(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not folder.is_dir():
        if any(Path(f"{folder}{ending}").is_file() for ending in ("", ".idx")):
            raise FormatError(
                f"{folder}: not a folder that `penstock prepare` made; open_dataset opens a Megatron prefix or an .npy "
                "file"
            )
        raise FormatError(f"{folder}: no such folder; give a folder that `penstock prepare` made")
    if not path.is_file():
        splits = [name for name in ("train", "validation") if (folder / name / MANIFEST).is_file()]
        if splits:
            raise FormatError(f"{folder}: holds {' and '.join(splits)}; give {folder / splits[0]}")
        raise FormatError(
            f"{folder}: not a dataset: no {MANIFEST}; preparation did not finish, or the folder is something else; "
            "run the same `penstock prepare` again to go on"
        )
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise CorruptionError(f"{path}: not JSON: {error}; copy it again, or prepare again") from None
    if not isinstance(value, dict):
        raise CorruptionError(f"{path}: not a JSON object; copy it again, or prepare again")
    return value


def _seal(value: dict[str, Any]) -> str:
    """A hash of all that a manifest says."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
