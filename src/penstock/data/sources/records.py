"""What every reader returns: blocks of checked texts with their places, rejected records, and
damage to files.

A text in a block is valid UTF-8, not null and not empty. Every other record is in `rejects`, with
its reason, so in each block records = texts + rejects.

A file that cannot be read to its end was cut, damaged, or changed while it was read. Nobody knows
how many records it has lost, so it stops the work, unless the caller counts the loss and continues.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import pyarrow as pa

from penstock.core.arrays import Bool, Float32, Int32, Int64
from penstock.core.errors import ConfigError, DamagedFileError
from penstock.core.json_values import JsonObject
from penstock.core.urls import quoted

EXCERPT_CHARACTERS = 160
"""Length of the quotation from a rejected record."""

_LONGEST_URL = 1 << 13
"""Characters that are looked at for an excerpt."""

RANGES_TYPE = pa.list_(
    pa.struct([("begin", pa.int64()), ("end", pa.int64()), ("value", pa.float64())])
)
"""Arrow type of numbers for ranges of characters: `[{"begin": 0, "end": 5, "value": 0.5}]`."""

COLUMN_TYPES = {
    "string": pa.large_string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_(),
    "ranges": RANGES_TYPE,
}  # fmt: skip
"""Types that a kept column may be declared with."""

WEIGHTS_TYPE = pa.list_(
    pa.struct([("begin", pa.int64()), ("end", pa.int64()), ("weight", pa.float64())])
)
"""Arrow type of loss-weight ranges: `[{"begin": 0, "end": 5, "weight": 1.0}]`, in characters."""


@final
@dataclass(frozen=True, slots=True)
class Damage:
    """A stretch of a file that cannot be read."""

    file: str
    line: int
    """The first line (from 1) or row (from 0) that was not read."""
    reason: str
    size_bytes: int
    """Bytes to be read: of the file, or of the part's range of it."""
    unread_bytes: int
    """Bytes among these that gave no record. The missing end of a cut file is not counted, because
    its size is unknown.
    """

    def __str__(self) -> str:
        read = self.size_bytes - self.unread_bytes
        return (
            f"{self.file}:{self.line}: the file cannot be read further: {self.reason} "
            f"({read:,} of {self.size_bytes:,} bytes were read)"
        )


OnDamage = Callable[[Damage], object]
"""Called for each stretch that cannot be read; if it returns, the reader continues after the
stretch.
"""


def stop_at_damage(damage: Damage) -> None:
    """Raise a `DamagedFileError`: the default for `OnDamage`."""
    raise DamagedFileError(
        f"{damage}; copy the file again, or set on_damaged_file to skip to continue without "
        "what cannot be read"
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Which fields of a record are read; a dot selects a field of an object: `"document.body"`."""

    text: str = "text"
    """Field that holds the text; a dot enters nested objects (a.b)."""

    weights: str | None = None
    """Field that holds loss-weight ranges, a list of `{begin, end, weight}`: half-open ranges of
    characters (Unicode code points), in order, not overlapping. `weight` defaults to 1. A record
    without the field counts in full; an empty list trains nothing.
    """

    whole: bool = False
    """Read the whole record with all its fields, as conversations need it: parts give `objects()`,
    not `blocks()`.
    """

    columns: dict[str, str] = field(default_factory=dict)
    """Other fields to keep for filter and map hooks → their type: "string", "int64", "float64",
    "bool", or "ranges" (a list of `{begin, end, value}`, ranges of characters).
    """

    def __post_init__(self) -> None:
        for name, kind in self.columns.items():
            if kind not in COLUMN_TYPES:
                raise ConfigError(
                    f"column {name!r} has type {kind!r}; known: {', '.join(COLUMN_TYPES)}"
                )
        names = self.names
        if not all(names) or len(set(names)) != len(names):
            raise ConfigError(f"fields need distinct, non-empty names; got {names}")
        clash = next(((a, b) for a in names for b in names if b.startswith(f"{a}.")), None)
        if clash:
            raise ConfigError(
                f"field {clash[0]!r} cannot be read both as a value and as an object that "
                f"holds {clash[1]!r}"
            )

    @property
    def names(self) -> list[str]:
        """All fields that are read, the text first; empty if records are read whole."""
        if self.whole:
            return []
        return [self.text, *([self.weights] if self.weights else []), *self.columns]

    @property
    def schema(self) -> pa.Schema:
        """The fields as an Arrow schema with nested objects."""
        tree: JsonObject = {}
        kinds = {
            self.text: pa.large_string(),
            **{name: COLUMN_TYPES[kind] for name, kind in self.columns.items()},
        }
        if self.weights:
            kinds[self.weights] = WEIGHTS_TYPE
        for name, kind in kinds.items():
            *parents, leaf = name.split(".")
            branch = tree
            for parent in parents:
                branch = branch.setdefault(parent, {})
            branch[leaf] = kind
        return pa.schema(list(_struct(tree)))


def _struct(tree: JsonObject) -> pa.StructType:
    return pa.struct(
        [(name, _struct(kind) if isinstance(kind, dict) else kind) for name, kind in tree.items()]
    )


@final
@dataclass(frozen=True, slots=True)
class Reject:
    """One record that could not be read: where it is, and why."""

    file: str
    line: int
    reason: str
    excerpt: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@final
@dataclass(frozen=True, slots=True)
class Weights:
    """Loss-weight ranges of n records, in characters.

    Record i has ranges `offsets[i]` to `offsets[i + 1]` (int64 [n + 1]) of `begin`, `end` (int64)
    and `weight` (float32). If `present[i]` is False, the record gave none and counts in full.
    """

    offsets: Int64
    begin: Int64
    end: Int64
    weight: Float32
    present: Bool


@final
@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Some records of one part, in order."""

    texts: pa.LargeStringArray
    """The texts: no nulls, none empty, valid UTF-8."""

    lines: Int64
    """Place of each record in its file: line, from 1; or row, from 0, if the format has rows."""

    files: Int32
    """Which of the part's `files` each record comes from."""

    weights: Weights | None
    """Loss-weight ranges; None if `Fields.weights` does not request them."""

    columns: dict[str, pa.Array]
    """The other requested fields, by name; they may hold nulls."""

    size_bytes: int
    """Raw bytes of the source that went into this block, for progress."""

    rejects: list[Reject]
    """Records that could not be read, in order."""

    def __len__(self) -> int:
        return len(self.texts)


def excerpt(raw: bytes | str) -> str:
    """The start of a record on one line, so that people recognise it; URLs in it are without
    secrets.
    """
    # A URL is cut only after its secrets were removed: without its end, they could not be
    # recognised.
    start = raw[:_LONGEST_URL]
    text = quoted(start.decode("utf-8", "replace") if isinstance(start, bytes) else start)
    text = text[:EXCERPT_CHARACTERS].encode("utf-8", "backslashreplace").decode()
    return " ".join(text.split())
