"""The manifest: what a dataset is and holds. It is written last, so a folder that has one is complete."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, final

from penstock.errors import CorruptionError, FormatError
from penstock.shards._kernels import CHUNK_TOKENS, DOCUMENTS_PER_BATCH
from penstock.shards.files import is_plain_name, write_json
from penstock.shards.strict_json import read_json, record_of

FORMAT = "penstock dataset"
VERSION = 1
MANIFEST, LENGTHS, BATCHES, WEIGHT_SUMS, FILES = (
    "manifest.json",
    "lengths.u32",
    "batches.u64",
    "weight_sums.f64",
    "files.json",
)
LEAST_BYTES = 28
"""Of an empty document in its shard: two offsets, its file and its line."""
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
        except (ValueError, RecursionError) as error:
            raise CorruptionError(f"{folder / MANIFEST}: damaged: {error}; copy it again, or prepare again") from None

    @classmethod
    def _from_json(cls, value: dict[str, Any]) -> Self:
        if value.pop("seal", None) != _seal(value):
            raise ValueError("it was changed after it was written (its seal does not fit)")
        if value.pop("chunk_tokens", None) != CHUNK_TOKENS:
            raise ValueError(f"chunk_tokens is not {CHUNK_TOKENS}")
        del value["format"], value["version"]
        manifest = record_of(cls, {"damaged": [], **value})
        for fault in manifest._contradictions():
            raise ValueError(fault)
        return manifest

    def _contradictions(self) -> Iterator[str]:
        """What cannot be true of any dataset, whatever its files hold; all else needs them (`verify`)."""
        yield from _tokenizer_contradictions(self.tokenizer)
        token_bytes = 2 if self.tokenizer.vocab_size <= 2**16 else 4
        for number, shard in enumerate(self.shards):
            for fault in _shard_contradictions(shard, self.tokenizer.vocab_size, token_bytes):
                yield f"shards[{number}].{fault}"
        expected: dict[str, Any] = {
            "token_bytes": token_bytes,
            "documents_per_batch": DOCUMENTS_PER_BATCH,
            "fractional_weights": any(shard.fractional_weights for shard in self.shards),
            "longest": max((shard.longest for shard in self.shards), default=0),
            "histogram": add_histograms(self.shards),
            "ends": common_ends(self.shards),
        }
        for name in ("documents", "tokens", "trained_tokens", "text_bytes"):
            expected[name] = sum(getattr(shard, name) for shard in self.shards)
        for name, due in expected.items():
            if (found := getattr(self, name)) != due:
                yield f"{name} is {found}, expected {due} by its shards and its tokenizer"
        if self.fractional_weights and not self.has_spans:
            yield "fractional_weights without has_spans"
        if not 0 <= self.files < 2**31:
            yield f"files is {self.files}"
        for number, one in enumerate(self.damaged):
            if one.line < 0 or not 0 <= one.unread_bytes <= one.size_bytes:
                yield f"damaged[{number}]: {one.unread_bytes} of {one.size_bytes} bytes unread from line {one.line}"
        if not re.fullmatch("[0-9a-f]{32}", self.fingerprint):
            yield "fingerprint is not 32 hexadecimal digits"
        names = [shard.file for shard in self.shards] + list(self.checksums)
        if len(set(names)) < len(names) or not {MANIFEST}.isdisjoint(names):
            yield "two files have the same name"
        if wrong := next((name for name in names if not is_plain_name(name)), None):
            yield f"{wrong!r} is no name of a file in this folder"
        needed = {LENGTHS, BATCHES, FILES, *([WEIGHT_SUMS] if self.fractional_weights else [])}
        if missing := needed - set(self.checksums):
            yield f"checksums: that of {min(missing)} is missing"

    def file_names(self) -> Iterator[str]:
        """All files that it lists, itself not."""
        yield from (shard.file for shard in self.shards)
        yield from self.checksums


def _tokenizer_contradictions(tokenizer: TokenizerInfo) -> Iterator[str]:
    if not 1 <= tokenizer.vocab_size <= 2**32:
        yield f"tokenizer.vocab_size is {tokenizer.vocab_size}, expected 1 to 2^32"
    for name, token in (("bos_id", tokenizer.bos_id), ("eos_id", tokenizer.eos_id)):
        if token is not None and not 0 <= token < tokenizer.vocab_size:
            yield f"tokenizer.{name} is {token}, outside its vocabulary of {tokenizer.vocab_size}"


def _shard_contradictions(shard: ShardInfo, vocab_size: int, token_bytes: int) -> Iterator[str]:
    if not shard.file.endswith(".arrow"):
        yield f"file is {shard.file!r}, expected a name that ends in .arrow"
    if shard.documents < 1 or shard.batches != -(-shard.documents // DOCUMENTS_PER_BATCH):
        yield f"batches is {shard.batches} for {shard.documents} documents, expected {DOCUMENTS_PER_BATCH} in each"
    if shard.documents * LEAST_BYTES > shard.bytes:
        yield f"documents is {shard.documents}, for which {shard.bytes} bytes have no room"
    room = shard.bytes // token_bytes
    for name, most in (("tokens", room), ("trained_tokens", shard.tokens), ("longest", min(shard.tokens, 2**32 - 1))):
        if not 0 <= getattr(shard, name) <= most:
            yield f"{name} is {getattr(shard, name)}, at most {most} is possible"
    if shard.text_bytes < 0:
        yield f"text_bytes is {shard.text_bytes}"
    if len(shard.histogram) != HISTOGRAM_BINS or min(shard.histogram) < 0 or sum(shard.histogram) != shard.documents:
        yield f"histogram does not count {shard.documents} documents in {HISTOGRAM_BINS} bins"
    if any(not -1 <= token < vocab_size for token in shard.ends):
        yield f"ends is {shard.ends}, outside the vocabulary of {vocab_size}"


def shard_from_json(value: dict[str, Any]) -> ShardInfo:
    """A `ShardInfo` from what `dataclasses.asdict` made of it.

    Raises:
        ValueError: It is something else.
    """
    return record_of(ShardInfo, value)


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
    value = read_json(path)
    if not isinstance(value, dict):
        raise CorruptionError(f"{path}: not a JSON object; copy it again, or prepare again")
    return value


def _seal(value: dict[str, Any]) -> str:
    """A hash of all that a manifest says."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
