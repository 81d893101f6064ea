"""The manifest, which describes a dataset, and the additional files of a dataset of chats.

The manifest is written last, so a folder with a manifest is complete.

A dataset of chats contains the template that rendered it and the tokens that end a generation:
`chat.json` and `chat_template.jinja`, sealed by the manifest's checksums. A copy of the template is
in the `tokenizer` folder, where transformers looks for it. Export and serving read both.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import NoReturn, Self, final

from penstock.core.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    OutputError,
    PenstockError,
)
from penstock.core.folders import check_unlocked
from penstock.core.formats import DATASET
from penstock.core.json_files import seal_of
from penstock.core.json_records import record_of
from penstock.core.json_values import JsonObject
from penstock.data.shards.format._kernels import CHUNK_TOKENS, DOCUMENTS_PER_BATCH
from penstock.data.shards.format.layout import Column, ShardLayout
from penstock.data.stores.files import (
    check_regular,
    is_plain_name,
    read_json,
    unreadable,
    write_json,
    write_text,
)
from penstock.tokenizers import Tokenizer

TOKENIZER_FOLDER = "tokenizer"
"""Folder of a dataset with the tokenizer that made it."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tekken.json",
    "chat_template.jinja",
)
"""Files of a tokenizer that are asked for where a store cannot list."""


MANIFEST, FILES = "manifest.json", "files.json"
_OTHER_FOLDERS = {
    "run.yaml": "a run",
    "config.json": "a model",
    "tokenizer.json": "a tokenizer",
}
"""File → what a folder that has it is."""
PREPARING = (".prepare", "lock")
"""The file that is locked while a dataset is being prepared."""
LENGTHS, BATCHES, WEIGHT_SUMS = "lengths.u32", "batches.u64", "weight_sums.f64"
RANGE_CHECKSUMS = "range_checksums.u64"
"""Checksums of ranges of the lengths and weight sums, of large datasets only (`tables.lengths`)."""
LEAST_BYTES = 28
"""Bytes of an empty document in its shard: two offsets, its file and its line."""
HISTOGRAM_BINS = 33
"""Bin b counts the documents with a number of tokens of b bits: 0, 1, 2–3, 4–7, …"""
CHAT, CHAT_TEMPLATE = "chat.json", "chat_template.jinja"


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
    def of(cls, tokenizer: Tokenizer) -> Self:
        """The information about a `penstock.tokenizers.Tokenizer`."""
        return cls(**{field.name: getattr(tokenizer, field.name) for field in fields(cls)})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """The content of a finished shard."""

    file: str
    documents: int
    batches: int
    bytes: int
    tokens: int
    trained_tokens: int
    """Tokens with a loss weight other than 0, without the first token of each document."""
    text_bytes: int
    """UTF-8 bytes that the tokens represent, as far as the writer knew; 0: unknown."""
    fractional_weights: bool
    """Whether any loss weight is neither 0 nor 1."""
    checksum: int
    """Checksum of the whole file (`files.checksum`)."""
    longest: int
    """Length of the longest document in tokens."""
    histogram: tuple[int, ...]
    """Number of documents by length, in `HISTOGRAM_BINS` bins."""
    ends: tuple[int, int]
    """The first id and the last id of all documents; −1 if they differ."""
    assets: int = 0
    """Bytes of the file with its images; 0: there is none, and the JSON leaves this out."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedSource:
    """A file of the input that could not be read completely, or at all; what was read is in the
    dataset.
    """

    file: str
    line: int
    """The first line (from 1) or row (from 0) that was not read."""
    reason: str
    size_bytes: int
    """Bytes to be read."""
    unread_bytes: int
    """Bytes among these that were not read; what was cut off a file's end is not counted."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`."""

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
    """Number of origin files listed in `files.json`."""
    tokenizer: TokenizerInfo
    configuration: str
    """Fingerprint of the settings that made the dataset."""
    fingerprint: str
    """Fingerprint of tokens and loss weights, independent of the division into shards."""
    histogram: tuple[int, ...]
    ends: tuple[int, int]
    """As in `ShardInfo`, for all documents."""
    checksums: dict[str, int]
    """Name → checksum of each file other than shards."""
    damaged: tuple[DamagedSource, ...] = ()
    """Damaged files of the input, if preparing continued despite them; left out of the JSON if
    there are none.
    """
    duplicates: dict[str, int] = field(default_factory=dict)
    """File of the input → documents that were left out because an earlier document is the same; as
    `damaged`.
    """
    columns: tuple[Column, ...] = ()
    """Numbers of each token; as `damaged`."""
    path_values: tuple[str, ...] | None = None
    """Names of the values of paths, if documents may be prefix trees; None: they are not. As
    `damaged`.
    """
    has_images: bool = False
    """Whether documents may have images. As `damaged`."""
    sampling: JsonObject = field(default_factory=dict)
    """Settings of the sampler that wrote the answers of rollouts, as far as they change what is
    drawn; as `damaged`.
    """

    @property
    def has_extras(self) -> bool:
        """Whether `layout.extras` has any."""
        return bool(self.columns) or self.path_values is not None or self.has_images

    @property
    def layout(self) -> ShardLayout:
        """The layout of its shards."""
        return ShardLayout(
            vocab_size=self.tokenizer.vocab_size,
            has_spans=self.has_spans,
            has_text=self.has_text,
            columns=self.columns,
            has_trees=self.path_values is not None,
            has_images=self.has_images,
        )

    def save(self, folder: Path) -> None:
        """Write `manifest.json` atomically."""
        value = {**DATASET.fields(), "chunk_tokens": CHUNK_TOKENS, **asdict(self)}
        value["shards"] = [shard_as_json(shard) for shard in self.shards]
        for name in _LEFT_OUT:
            if value[name] is None or (name != "path_values" and not value[name]):
                del value[name]
        write_json(folder / MANIFEST, {**value, "seal": seal_of(value)})

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read and check the manifest of a dataset.

        Raises:
            FormatError: There is none, it is not penstock's, or it has another version.
            CorruptionError: It is damaged.
        """
        return cls._checked(_read(folder), str(folder))

    @classmethod
    def parse(cls, content: bytes, folder: str) -> Self:
        """As `load`, of the bytes of the file; `folder` is for messages."""
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise CorruptionError(
                f"{folder}/{MANIFEST}: damaged: not JSON: {error}; copy it again, or prepare again"
            ) from None
        return cls._checked(value if isinstance(value, dict) else {}, folder)

    @classmethod
    def _checked(cls, value: JsonObject, folder: str) -> Self:
        DATASET.check(
            value, f"{folder}/{MANIFEST}", cure="prepare the data with `penstock prepare`"
        )
        try:
            return cls._from_json(value)
        except (ValueError, ConfigError, RecursionError) as error:
            raise CorruptionError(
                f"{folder}/{MANIFEST}: damaged: {error}; copy it again, or prepare again"
            ) from None

    @classmethod
    def _from_json(cls, value: JsonObject) -> Self:
        if value.pop("seal", None) != seal_of(value):
            raise ValueError("it was changed after it was written (its seal does not match)")
        if value.pop("chunk_tokens", None) != CHUNK_TOKENS:
            raise ValueError(f"chunk_tokens is not {CHUNK_TOKENS}")
        del value["format"], value["version"]
        if isinstance(shards := value.get("shards"), list):
            value["shards"] = [
                {"assets": 0, **one} if isinstance(one, dict) else one for one in shards
            ]
        manifest = record_of(cls, value, may_lack=_LEFT_OUT)
        _ = manifest.layout
        for fault in manifest._contradictions():
            raise ValueError(fault)
        return manifest

    def _contradictions(self) -> Iterator[str]:
        """Values that are impossible whatever the files contain; `verify` checks the rest."""
        yield from _tokenizer_contradictions(self.tokenizer)
        token_bytes = 2 if self.tokenizer.vocab_size <= 2**16 else 4
        for number, shard in enumerate(self.shards):
            for fault in _shard_contradictions(shard, self.tokenizer.vocab_size, token_bytes):
                yield f"shards[{number}].{fault}"
        expected: JsonObject = {
            "token_bytes": token_bytes,
            "documents_per_batch": DOCUMENTS_PER_BATCH,
            "fractional_weights": any(shard.fractional_weights for shard in self.shards),
            "longest": max((shard.longest for shard in self.shards), default=0),
            "histogram": add_histograms(self.shards),
            "ends": common_ends(self.shards),
        }
        for name in ("documents", "tokens", "trained_tokens", "text_bytes"):
            expected[name] = sum(getattr(shard, name) for shard in self.shards)
        for name, value in expected.items():
            if (found := getattr(self, name)) != value:
                yield f"{name} is {found}, expected {value} by its shards and its tokenizer"
        if self.fractional_weights and not self.has_spans:
            yield "fractional_weights without has_spans"
        if not 0 <= self.files < 2**31:
            yield f"files is {self.files}"
        for number, one in enumerate(self.damaged):
            if one.line < 0 or not 0 <= one.unread_bytes <= one.size_bytes:
                yield (
                    f"damaged[{number}]: {one.unread_bytes} of {one.size_bytes} bytes unread from "
                    f"line {one.line}"
                )
        for name, count in self.duplicates.items():
            if count < 1:
                yield f"duplicates[{name!r}] is {count}"
        if not _FINGERPRINT.fullmatch(self.fingerprint):
            yield "fingerprint is not 32 hexadecimal digits"
        names = [shard.file for shard in self.shards] + list(self.checksums)
        if len(set(names)) < len(names) or not {MANIFEST}.isdisjoint(names):
            yield "two files have the same name"
        if wrong := next((name for name in names if not is_plain_name(name)), None):
            yield f"{wrong!r} is not the name of a file in this folder"
        needed = {LENGTHS, BATCHES, FILES, *([WEIGHT_SUMS] if self.fractional_weights else [])}
        needed |= {
            f"{shard.file.removesuffix('.arrow')}.assets" for shard in self.shards if shard.assets
        }
        if missing := needed - set(self.checksums):
            yield f"checksums: that of {min(missing)} is missing"


_FINGERPRINT = re.compile("[0-9a-f]{32}")

_LEFT_OUT = frozenset(("damaged", "duplicates", "columns", "path_values", "has_images", "sampling"))
"""Fields that the JSON leaves out where there is nothing."""


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
        yield (
            f"batches is {shard.batches} for {shard.documents} documents, expected "
            f"{DOCUMENTS_PER_BATCH} in each"
        )
    if shard.documents * LEAST_BYTES > shard.bytes:
        yield f"documents is {shard.documents}, for which {shard.bytes} bytes have no room"
    room = shard.bytes // token_bytes
    for name, most in (
        ("tokens", room),
        ("trained_tokens", shard.tokens),
        ("longest", min(shard.tokens, 2**32 - 1)),
    ):
        if not 0 <= getattr(shard, name) <= most:
            yield f"{name} is {getattr(shard, name)}, at most {most} is possible"
    for name in ("text_bytes", "assets"):
        if getattr(shard, name) < 0:
            yield f"{name} is {getattr(shard, name)}"
    if (
        len(shard.histogram) != HISTOGRAM_BINS
        or min(shard.histogram) < 0
        or sum(shard.histogram) != shard.documents
    ):
        yield f"histogram does not count {shard.documents} documents in {HISTOGRAM_BINS} bins"
    if any(not -1 <= token < vocab_size for token in shard.ends):
        yield f"ends is {shard.ends}, outside the vocabulary of {vocab_size}"


def shard_from_json(value: JsonObject) -> ShardInfo:
    """The inverse of `dataclasses.asdict` for a `ShardInfo`.

    Raises:
        ValueError: The value is something else.
    """
    return record_of(ShardInfo, {"assets": 0, **value})


def shard_as_json(shard: ShardInfo) -> JsonObject:
    """A `ShardInfo` as a JSON object."""
    value = asdict(shard)
    if not shard.assets:
        del value["assets"]
    return value


def add_histograms(shards: Sequence[ShardInfo]) -> tuple[int, ...]:
    """Sum of the shards' histograms."""
    if len(shards) == 1 and len(shards[0].histogram) == HISTOGRAM_BINS:
        return shards[0].histogram
    none = (0,) * HISTOGRAM_BINS
    return tuple(map(sum, zip(none, *(shard.histogram for shard in shards), strict=True)))


def common_ends(shards: Sequence[ShardInfo]) -> tuple[int, int]:
    """`ends` of the documents of all shards together."""
    first, last = ({shard.ends[side] for shard in shards} for side in (0, 1))
    return first.pop() if len(first) == 1 else -1, last.pop() if len(last) == 1 else -1


def _read(folder: Path) -> JsonObject:
    path = f"{folder}/{MANIFEST}"
    try:
        value = read_json(path)
    except PenstockError:
        if not os.path.isfile(path):
            _refuse(folder)
        raise
    if not isinstance(value, dict):
        raise CorruptionError(f"{path}: not a JSON object; copy it again, or prepare again")
    return value


def _refuse(folder: Path) -> NoReturn:
    """Say what is there instead of a manifest."""
    if not folder.is_dir():
        if any(Path(f"{folder}{ending}").is_file() for ending in ("", ".idx")):
            raise FormatError(
                f"{folder}: not a folder that `penstock prepare` made; open_dataset opens a "
                "Megatron prefix or an .npy file"
            )
        raise FormatError(f"{folder}: no such folder; give a folder that `penstock prepare` made")
    splits = [name for name in ("train", "validation") if (folder / name / MANIFEST).is_file()]
    if splits:
        raise FormatError(f"{folder}: holds {' and '.join(splits)}; give {folder / splits[0]}")
    try:
        check_unlocked(folder, folder.joinpath(*PREPARING), doing="preparing")
    except OutputError as error:
        raise FormatError(
            f"{folder}: not a dataset yet: {str(error).removeprefix(f'{folder}: ')}"
        ) from None
    for name, what in _OTHER_FOLDERS.items():
        if (folder / name).exists():
            raise FormatError(
                f"{folder}: {what}, not a dataset; give a folder that `penstock prepare` made"
            )
    raise FormatError(
        f"{folder}: not a dataset: no {MANIFEST}; preparation did not finish, or the "
        "folder is something else; run the same `penstock prepare` again to continue"
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInfo:
    """How the conversations of a dataset were rendered, and what is trained."""

    template: str
    """The template's text, Jinja."""
    template_name: str
    template_fingerprint: str
    variables: JsonObject
    """Variables of the template in addition to the conversation."""
    date: str | None
    """The date that the template wrote; None: it writes none."""
    stop_ids: tuple[int, ...]
    """Control tokens that end a generation."""
    stop_texts: tuple[str, ...]
    """Texts that end trained turns, control tokens or not."""
    settings: JsonObject
    """`layout`, `mask_settings`, `cleaning`: every setting that was in effect."""

    def save(self, folder: Path) -> tuple[str, ...]:
        """Write it to a dataset's folder.

        Returns:
            Names of the files, for `finish_dataset` to seal.
        """
        value = asdict(self)
        write_text(folder / CHAT_TEMPLATE, value.pop("template"))
        write_text(folder / TOKENIZER_FOLDER / CHAT_TEMPLATE, self.template)
        write_json(folder / CHAT, value)
        return CHAT, CHAT_TEMPLATE

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """The chat information of a dataset; None if it is not a dataset of chats.

        Raises:
            CorruptionError: It cannot be read.
        """
        if not (folder / CHAT).is_file():
            return None
        value = read_json(folder / CHAT)
        check_regular(folder / CHAT_TEMPLATE)
        try:
            template = (folder / CHAT_TEMPLATE).read_bytes().decode()
            return record_of(
                cls, {**value, "template": template} if isinstance(value, dict) else value
            )
        except OSError as error:
            raise unreadable(folder / CHAT_TEMPLATE, error) from None
        except ValueError as error:
            raise CorruptionError(
                f"{folder / CHAT}: {error}; copy it again, or prepare again"
            ) from None
