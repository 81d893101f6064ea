"""How a teacher's outputs are stored on disk: a folder that training reads instead of running the
teacher.

    CACHE/cache.json            manifest: settings, sizes and checksums; written last
    CACHE/index.u64             [COLUMNS, pieces] uint64, ordered by source, document, first token
    CACHE/part-00000.bin, …     pieces end to end, in the order in which they were written
    CACHE/tokenizer/            the teacher's

A *piece* is a document, or a part of one, as a loader packs it, so it does not matter how documents
were packed into rows. A piece of n teacher tokens, with the k most likely next tokens kept for
each, is stored as n float32 numbers each of `token_log_probs`, `boundary_log_probs`, `entropy` and
`kept` (log of the total probability of the k tokens, the normaliser); then [n, k] log-probabilities
and [n, k] ids, the wider dtype first.

float16 log-probabilities have a relative error of up to 2⁻¹¹ (0.005 at a probability of e⁻¹⁰). On
reading, each line is shifted so that its total is `kept` again; so the probability of all other
tokens is exact to float32's rounding. All other arrays, and float32 log-probabilities, are read
back bit for bit as a float32 teacher returned them.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, final

import numpy as np

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError, CorruptionError, FormatError
from penstock.core.folders import local_path
from penstock.core.formats import TEACHER_CACHE
from penstock.core.json_files import seal_of
from penstock.core.json_records import record_of
from penstock.core.json_values import JsonObject
from penstock.data.stores.files import check_size, checksum, map_numbers, read_json
from penstock.learn.distillation.outputs import Wanted

MANIFEST, INDEX, SETTINGS = "cache.json", "index.u64", "settings.json"
TOKENIZER = "tokenizer"
_CURE = "copy it again, or make the cache again"
SOURCE, DOCUMENT, BEGIN, TOKENS, SLOTS, PART, OFFSET, DATA_SUM, IDS_SUM = range(9)
"""Columns of the index: dataset number, document, first token and number of tokens of the student;
number of tokens of the teacher; part and first byte in it; checksums of the piece's bytes and of
the teacher's tokens as int32.
"""
COLUMNS = 9
LINES = ("token_log_probs", "boundary_log_probs", "entropy", "kept")
"""Arrays of one float32 a token."""
Precision = Literal["float16", "float32"]
_LATER = frozenset({"bos", "trained_with_bos"})
"""Settings that older caches do not have."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """What a cache is made from. Two caches with equal settings have equal contents."""

    teacher: str
    """Where the teacher came from, for people."""
    tokenizer: str
    """Fingerprint of the teacher's tokenizer."""
    vocab_size: int
    """Number of ids of the teacher's tokenizer."""
    temperature: float
    """Temperature of the stored top-k log-probabilities."""
    top_k: int
    """Number of tokens kept from each distribution."""
    precision: Precision
    """Dtype of the stored top-k log-probabilities."""
    sequence_length: int
    """Slots of the student's rows: longer documents were split."""
    sources: tuple[str, ...]
    """Fingerprints of the datasets."""
    names: tuple[str, ...]
    """Names of the datasets, for people."""
    max_tokens: int | None = None
    """Maximum tokens per document that the teacher read; None: all."""
    weights: str = ""
    """Fingerprint of the teacher's model; empty if unknown."""
    bos: bool | None = None
    """`bos` of the `TeacherText` that read; likewise `trained_with_bos`."""
    trained_with_bos: bool | None = None

    def __post_init__(self) -> None:
        if self.precision not in ("float16", "float32"):
            raise ConfigError(f"precision must be float16 or float32, got {self.precision!r}")

    @property
    def record(self) -> np.dtype[Any]:
        """The dtypes of ids and log-probabilities, by name."""
        ids = "<u2" if self.vocab_size <= 1 << 16 else "<u4"
        return np.dtype(
            [("ids", ids), ("log_probs", "<f2" if self.precision == "float16" else "<f4")]
        )

    @property
    def bytes_of_slot(self) -> int:
        """Bytes stored for one token."""
        return 4 * len(LINES) + self.top_k * self.record.itemsize

    def bytes_of(self, slots: int) -> int:
        """Bytes of a piece, a multiple of 8."""
        return -(-slots * self.bytes_of_slot // 8) * 8

    def views(self, data: Array, slots: int) -> dict[str, Array]:
        """Views of a piece's bytes, uint8 [bytes_of(slots)], as its arrays: `LINES`, `log_probs`
        and `ids`.
        """
        begin = 4 * slots * len(LINES)
        lines = data[:begin].view("<f4").reshape(len(LINES), slots)
        found = dict(zip(LINES, lines, strict=True))
        kinds = {name: self.record[name] for name in ("log_probs", "ids")}
        for name, dtype in sorted(kinds.items(), key=lambda kind: -kind[1].itemsize):
            size = slots * self.top_k * dtype.itemsize
            found[name] = data[begin : begin + size].view(dtype).reshape(slots, self.top_k)
            begin += size
        return found

    def check(self, folder: Path, wanted: Wanted) -> None:
        """Refuse a loss that wants more than the cache holds.

        Raises:
            ConfigError: The loss wants another temperature, or more tokens.
        """
        if wanted.temperature != self.temperature:
            raise ConfigError(
                f"{folder}: the cache was made at temperature {self.temperature:g}, the loss "
                f"expects {wanted.temperature:g}; make the cache again at that temperature"
            )
        if wanted.top_k is None or min(wanted.top_k, self.vocab_size) > self.top_k:
            expected = (
                "all tokens" if wanted.top_k is None else f"the {wanted.top_k} likeliest tokens"
            )
            raise ConfigError(
                f"{folder}: holds the {self.top_k} likeliest tokens of each distribution, the "
                f"loss expects {expected}; set loss.top_k to {self.top_k} or less (losses kl "
                "and p_kl), use loss alm, or make the cache again with more"
            )

    def differences(self, other: "CacheSettings") -> list[str]:
        """The settings that differ, in words."""
        ours, theirs = asdict(self), asdict(other)
        return [
            f"{name}: {theirs[name]!r}, now {ours[name]!r}"
            for name in ours
            if ours[name] != theirs[name]
        ]

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read what `dataclasses.asdict` returned.

        Raises:
            ValueError: It has other fields or types, or values that no cache can have.
        """
        found = record_of(cls, value, "settings", may_lack=_LATER)
        found.check_ranges()
        return found

    def check_ranges(self) -> None:
        """Refuse settings that no cache can have.

        Raises:
            ValueError: Names the setting.
        """
        if not 1 <= self.vocab_size <= 2**32 or not 1 <= self.top_k <= self.vocab_size:
            raise ValueError(f"settings.top_k is {self.top_k} of a vocabulary of {self.vocab_size}")
        if self.temperature <= 0 or self.sequence_length < 1:
            raise ValueError(
                f"settings.temperature is {self.temperature}, sequence_length "
                f"{self.sequence_length}"
            )
        if len(self.sources) != len(self.names):
            raise ValueError(
                f"settings has {len(self.sources)} sources and {len(self.names)} names"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheManifest:
    """The contents of `cache.json`."""

    settings: CacheSettings
    pieces: int
    tokens: int
    """Number of the teacher's tokens."""
    part_bytes: tuple[int, ...]
    index_checksum: int

    def to_json(self) -> JsonObject:
        """The JSON that is written, sealed by a hash of its contents."""
        value = {**TEACHER_CACHE.fields(), **json.loads(json.dumps(asdict(self)))}
        return {**value, "seal": seal_of(value)}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the manifest of a cache.

        Raises:
            FormatError: The folder is not a cache, or is unfinished, or has another version.
            CorruptionError: The manifest is damaged.
        """
        folder = local_path(folder, "a teacher's cache")
        path = folder / MANIFEST
        if not path.is_file():
            what = "not a teacher's cache; give a folder that `penstock distill cache` wrote"
            if (folder / SETTINGS).is_file():
                what = (
                    "an unfinished cache; run the same `penstock distill cache` again to continue"
                )
            raise FormatError(f"{folder}: {what}")
        value = read_json(path, _CURE)
        try:
            return cls._from_json(folder, value)
        except (ValueError, RecursionError) as error:
            if isinstance(error, FormatError):
                raise
            raise CorruptionError(f"{path}: damaged: {error}; {_CURE}") from None

    @classmethod
    def _from_json(cls, folder: Path, value: object) -> Self:
        value = value if isinstance(value, dict) else {}
        TEACHER_CACHE.check(value, folder / MANIFEST, cure="make the cache again")
        if value.pop("seal", None) != seal_of(value):
            raise ValueError("it was changed after it was written")
        del value["format"], value["version"]
        settings = value.get("settings")
        if isinstance(settings, dict):
            value["settings"] = {**dict.fromkeys(_LATER), **settings}
        found = record_of(cls, value)
        found.settings.check_ranges()
        if min(found.pieces, found.tokens, *found.part_bytes) < 0 or any(
            size % 8 for size in found.part_bytes
        ):
            raise ValueError(
                f"{found.pieces} pieces of {found.tokens} tokens in parts of "
                f"{found.part_bytes} bytes"
            )
        return found


def open_index(folder: Path, manifest: CacheManifest) -> Array:
    """The index of a finished cache, uint64 [COLUMNS, pieces], after a check of every part's size.

    Every piece is checked to lie inside its part, so reading never exceeds the files and allocates
    no more than they hold.

    Raises:
        CorruptionError: A file is missing or damaged.
    """
    for number, size in enumerate(manifest.part_bytes):
        check_size(folder / part_name(number), size)
    path = folder / INDEX
    index = map_numbers(path, "<u8", (COLUMNS, manifest.pieces))
    if checksum(index) != manifest.index_checksum:
        raise CorruptionError(f"{path}: differs from its checksum; {_CURE}")
    parts = index[PART] < len(manifest.part_bytes)
    sizes = np.array([*manifest.part_bytes, 0], np.uint64)[
        np.where(parts, index[PART], len(manifest.part_bytes))
    ]
    offsets = np.minimum(index[OFFSET], sizes)
    inside = parts & (offsets == index[OFFSET]) & (offsets % np.uint64(8) == 0)
    inside &= index[SLOTS] <= (sizes - offsets) // np.uint64(manifest.settings.bytes_of_slot)
    if not inside.all():
        raise CorruptionError(
            f"{path}: piece {int(np.argmin(inside))} does not lie inside its part; {_CURE}"
        )
    return index


def part_name(number: int) -> str:
    """File name of a part."""
    return f"part-{number:05}.bin"


def piece_name(names: Sequence[str], source: int, document: int, begin: int, tokens: int) -> str:
    """A piece, for messages."""
    return f"document {document} of {names[source]} (tokens {begin} to {begin + tokens})"
