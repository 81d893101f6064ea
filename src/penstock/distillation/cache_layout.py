"""How a teacher's outputs lie on disk: a folder that training reads instead of running the teacher.

    CACHE/cache.json            what it is, what it was made from, sizes and checksums; written last
    CACHE/index.u64             [COLUMNS, pieces] uint64, ordered by source, document, first token
    CACHE/part-00000.bin, …     pieces end to end, in the order in which they were written
    CACHE/tokenizer/            the teacher's

A *piece* is a document, or a part of one, as a loader packs it: so how documents were packed into rows does not matter.
For a piece of n of the teacher's tokens, of which the k likeliest next ones are kept, there are one after the other: n
numbers each of `token_log_probs`, `boundary_log_probs`, `entropy` and `kept` (log of the probability of all k together,
the normaliser) in float32; then [n, k] log-probabilities and [n, k] ids, the wider first.

float16 log-probabilities are off by up to 2⁻¹¹ of themselves (0.005 at a probability of e⁻¹⁰). When they are read, each
line is shifted so that its sum is again `kept`: so what is left for all other tokens is exact to float32's rounding.
Everything else, and log-probabilities in float32, are read as the bits that a teacher in float32 gave.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, final

import numpy as np

from penstock.distillation.outputs import Wanted
from penstock.errors import ConfigError, CorruptionError, FormatError
from penstock.locations import local_path
from penstock.shards.files import check_size, checksum, map_numbers
from penstock.shards.strict_json import read_json, record_of

MANIFEST, INDEX, SETTINGS = "cache.json", "index.u64", "settings.json"
TOKENIZER = "tokenizer"
FORMAT = "penstock teacher cache"
VERSION = 1
_CURE = "copy it again, or make the cache again"
SOURCE, DOCUMENT, BEGIN, TOKENS, SLOTS, PART, OFFSET, DATA_SUM, IDS_SUM = range(9)
"""Columns of the index: number of the dataset, document, first token, tokens of the student; tokens of the teacher;
part and first byte there; checksums of the piece's bytes, and of the teacher's tokens as int32."""
COLUMNS = 9
LINES = ("token_log_probs", "boundary_log_probs", "entropy", "kept")
"""One float32 a token."""
Precision = Literal["float16", "float32"]
Array = np.ndarray[Any, np.dtype[Any]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """What a cache is made from; two with the same settings hold the same."""

    teacher: str
    """Where it came from, for people."""
    tokenizer: str
    """Fingerprint of its tokenizer."""
    vocab_size: int
    """Of its tokenizer."""
    temperature: float
    """Of the likeliest tokens' log-probabilities."""
    top_k: int
    """Tokens that are kept of each distribution."""
    precision: Precision
    """Of the likeliest tokens' log-probabilities."""
    sequence_length: int
    """Slots of the student's rows: longer documents were split."""
    sources: tuple[str, ...]
    """Fingerprints of the datasets."""
    names: tuple[str, ...]
    """Their names, for people."""
    max_tokens: int | None = None
    """Of a document, that the teacher read; None: all."""
    weights: str = ""
    """Fingerprint of the teacher's model; empty where nobody told it."""

    def __post_init__(self) -> None:
        if self.precision not in ("float16", "float32"):
            raise ConfigError(f"precision must be float16 or float32, got {self.precision!r}")

    @property
    def record(self) -> np.dtype[Any]:
        """Nothing but the dtypes of ids and log-probabilities, by name."""
        ids = "<u2" if self.vocab_size <= 1 << 16 else "<u4"
        return np.dtype([("ids", ids), ("log_probs", "<f2" if self.precision == "float16" else "<f4")])

    @property
    def bytes_of_slot(self) -> int:
        """Size of what is stored about one token."""
        return 4 * len(LINES) + self.top_k * self.record.itemsize

    def bytes_of(self, slots: int) -> int:
        """Size of a piece, a multiple of 8."""
        return -(-slots * self.bytes_of_slot // 8) * 8

    def views(self, data: Array, slots: int) -> dict[str, Array]:
        """The arrays of a piece in its bytes, uint8 [bytes_of(slots)]: `LINES`, `log_probs` and `ids`."""
        found, begin = {}, 4 * slots * len(LINES)
        lines = data[:begin].view("<f4").reshape(len(LINES), slots)
        found = dict(zip(LINES, lines, strict=True))
        kinds = {name: self.record[name] for name in ("log_probs", "ids")}
        for name, dtype in sorted(kinds.items(), key=lambda kind: -kind[1].itemsize):
            size = slots * self.top_k * dtype.itemsize
            found[name] = data[begin : begin + size].view(dtype).reshape(slots, self.top_k)
            begin += size
        return found

    def check(self, folder: Path, wanted: Wanted) -> None:
        """Refuse what a loss wants and the cache does not hold.

        Raises:
            ConfigError: Another temperature, or more tokens.
        """
        if wanted.temperature != self.temperature:
            raise ConfigError(
                f"{folder}: was made at temperature {self.temperature:g}, the loss wants {wanted.temperature:g}; make "
                "it again at that"
            )
        if wanted.top_k is None or min(wanted.top_k, self.vocab_size) > self.top_k:
            due = "all tokens" if wanted.top_k is None else f"the {wanted.top_k} likeliest tokens"
            raise ConfigError(
                f"{folder}: holds the {self.top_k} likeliest tokens of each distribution, the loss wants {due}; set "
                f"loss.top_k to {self.top_k} or less where the loss has it (kl, p_kl), take loss alm, or make the "
                "cache again with more"
            )

    def differences(self, other: "CacheSettings") -> list[str]:
        """The settings that differ, in words."""
        ours, theirs = asdict(self), asdict(other)
        return [f"{name}: {theirs[name]!r}, now {ours[name]!r}" for name in ours if ours[name] != theirs[name]]

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """From what `dataclasses.asdict` made of it.

        Raises:
            ValueError: It is something else, or no cache can have such settings.
        """
        found = record_of(cls, value, "settings")
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
            raise ValueError(f"temperature {self.temperature}, sequence_length {self.sequence_length}")
        if len(self.sources) != len(self.names):
            raise ValueError(f"{len(self.sources)} sources have {len(self.names)} names")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheManifest:
    """What `cache.json` says."""

    settings: CacheSettings
    pieces: int
    tokens: int
    """The teacher's."""
    part_bytes: tuple[int, ...]
    index_checksum: int

    def to_json(self) -> dict[str, Any]:
        """As it is written, sealed by a hash of all that it says."""
        value = {"format": FORMAT, "version": VERSION, **json.loads(json.dumps(asdict(self)))}
        return {**value, "seal": _seal(value)}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read it.

        Raises:
            FormatError: The folder is no cache, an unfinished one, or of another version.
            CorruptionError: It is damaged.
        """
        folder = local_path(folder, "a teacher's cache")
        path = folder / MANIFEST
        if not path.is_file():
            what = "no cache of a teacher; give a folder that `penstock distill cache` wrote"
            if (folder / SETTINGS).is_file():
                what = "a cache that was not finished; run the same `penstock distill cache` again to go on"
            raise FormatError(f"{folder}: {what}")
        value = read_json(path, _CURE)
        try:
            return cls._from_json(folder, value)
        except (ValueError, RecursionError) as error:
            if isinstance(error, FormatError):
                raise
            raise CorruptionError(f"{path}: damaged: {error}; {_CURE}") from None

    @classmethod
    def _from_json(cls, folder: Path, value: Any) -> Self:
        if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
            raise ValueError("it is not that of a cache")
        version = value.pop("version", None)
        if version != VERSION:
            raise FormatError(f"{folder}: cache of version {version}, this penstock reads {VERSION}; make it again")
        if value.pop("seal", None) != _seal({"format": FORMAT, **value, "version": version}):
            raise ValueError("it was changed after it was written")
        found = record_of(cls, value)
        found.settings.check_ranges()
        if min(found.pieces, found.tokens, *found.part_bytes) < 0 or any(size % 8 for size in found.part_bytes):
            raise ValueError(f"{found.pieces} pieces of {found.tokens} tokens in parts of {found.part_bytes} bytes")
        return found


def open_index(folder: Path, manifest: CacheManifest) -> Array:
    """The index of a finished cache, uint64 [COLUMNS, pieces], after a look at the size of every part.

    Every piece lies in its part, so that no more is ever read, nor memory asked for, than the files hold.

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
    sizes = np.array([*manifest.part_bytes, 0], np.uint64)[np.where(parts, index[PART], len(manifest.part_bytes))]
    offsets = np.minimum(index[OFFSET], sizes)
    inside = parts & (offsets == index[OFFSET]) & (offsets % np.uint64(8) == 0)
    inside &= index[SLOTS] <= (sizes - offsets) // np.uint64(manifest.settings.bytes_of_slot)
    if not inside.all():
        raise CorruptionError(f"{path}: piece {int(np.argmin(inside))} does not lie in its part; {_CURE}")
    return index


def part_name(number: int) -> str:
    """File of a part."""
    return f"part-{number:05}.bin"


def piece_name(names: Sequence[str], source: int, document: int, begin: int, tokens: int) -> str:
    """A piece in words."""
    return f"document {document} of {names[source]} (tokens {begin} to {begin + tokens})"


def _seal(value: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
