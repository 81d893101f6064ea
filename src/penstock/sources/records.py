"""What every reader hands over: blocks of checked texts with their places, and what was rejected, with reasons.

A text in a block is valid UTF-8, not null and not empty. What could not be made into one is in `rejects`, so that
records in = texts + rejects, block by block.
"""

from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import pyarrow as pa

from penstock.errors import ConfigError

EXCERPT_CHARACTERS = 160
"""How much of a rejected record is quoted."""

COLUMN_TYPES = {"string": pa.large_string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}
"""Types that a kept column may be declared with."""

WEIGHTS_TYPE = pa.list_(pa.struct([("begin", pa.int64()), ("end", pa.int64()), ("weight", pa.float64())]))
"""How loss-weight ranges look in a record: `[{"begin": 0, "end": 5, "weight": 1.0}]`, in characters."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Which fields of a record are read; a dot goes into an object: `"document.body"`."""

    text: str = "text"
    """Field that holds the text."""

    weights: str | None = None
    """Field that holds loss-weight ranges, a list of `{begin, end, weight}`: characters (Unicode code points),
    half-open, rising, not overlapping. A record without it counts in full; an empty list trains nothing; `weight`
    defaults to 1."""

    whole: bool = False
    """The whole record with all its fields, as conversations need it: parts give `objects()`, not `blocks()`."""

    columns: dict[str, str] = field(default_factory=dict)
    """Other fields to keep for filter and map hooks → their type: "string", "int64", "float64" or "bool"."""

    def __post_init__(self) -> None:
        for name, kind in self.columns.items():
            if kind not in COLUMN_TYPES:
                raise ConfigError(f"column {name!r} has type {kind!r}; known: {', '.join(COLUMN_TYPES)}")
        names = self.names
        if not all(names) or len(set(names)) != len(names):
            raise ConfigError(f"fields must be named, each once; got {names}")
        clash = next(((a, b) for a in names for b in names if b.startswith(f"{a}.")), None)
        if clash:
            raise ConfigError(
                f"field {clash[0]!r} cannot be read both as a value and as an object that holds {clash[1]!r}"
            )

    @property
    def names(self) -> list[str]:
        """All fields that are read, the text first; none of them by name where records are read whole."""
        if self.whole:
            return []
        return [self.text, *([self.weights] if self.weights else []), *self.columns]

    @property
    def schema(self) -> pa.Schema:
        """The fields as an Arrow schema, objects nested."""
        tree: dict[str, Any] = {}
        kinds = {self.text: pa.large_string(), **{name: COLUMN_TYPES[kind] for name, kind in self.columns.items()}}
        if self.weights:
            kinds[self.weights] = WEIGHTS_TYPE
        for name, kind in kinds.items():
            *parents, leaf = name.split(".")
            branch = tree
            for parent in parents:
                branch = branch.setdefault(parent, {})
            branch[leaf] = kind
        return pa.schema(list(_struct(tree)))


def _struct(tree: dict[str, Any]) -> pa.StructType:
    return pa.struct([(name, _struct(kind) if isinstance(kind, dict) else kind) for name, kind in tree.items()])


@final
@dataclass(frozen=True, slots=True)
class Reject:
    """One record that could not be read, with its place and why."""

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

    Record i has ranges `offsets[i]` to `offsets[i + 1]` (int64 [n + 1]) of `begin`, `end` (int64) and `weight`
    (float32). Where `present[i]` is False the record gave none, and counts in full.
    """

    offsets: np.ndarray[Any, np.dtype[np.int64]]
    begin: np.ndarray[Any, np.dtype[np.int64]]
    end: np.ndarray[Any, np.dtype[np.int64]]
    weight: np.ndarray[Any, np.dtype[np.float32]]
    present: np.ndarray[Any, np.dtype[np.bool_]]


@final
@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Some records of one part, in order."""

    texts: pa.LargeStringArray
    """The texts: no nulls, none empty, valid UTF-8."""

    lines: np.ndarray[Any, np.dtype[np.int64]]
    """Where each record is in its file: line, from 1; or row, from 0, where the format has rows."""

    files: np.ndarray[Any, np.dtype[np.int32]]
    """Which of the part's `files` each record is from."""

    weights: Weights | None
    """Loss-weight ranges, where `Fields.weights` asks for them."""

    columns: dict[str, pa.Array]
    """The other fields asked for, by name; they may hold nulls."""

    size_bytes: int
    """Raw bytes of the source that went into this block, for progress."""

    rejects: list[Reject]
    """What could not be read, in order."""

    def __len__(self) -> int:
        return len(self.texts)


def excerpt(raw: bytes | str) -> str:
    """The start of a record on one line, for people to recognise it."""
    text = raw[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    text = text[:EXCERPT_CHARACTERS].encode("utf-8", "backslashreplace").decode()
    return " ".join(text.split())
