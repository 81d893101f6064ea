"""Datasets as a forger would make them: anything changed, then every checksum and the seal made to
fit again.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from shard_data import TOKENIZER, make_documents, make_spans

from penstock import Dataset, write_dataset
from penstock.core.json_files import seal_of
from penstock.data.shards.format.manifest import MANIFEST
from penstock.data.stores.files import checksum

SIZES = {"lengths.u32": 8, "batches.u64": 72, "weight_sums.f64": 8}

INTEGERS = (
    0,
    1,
    -1,
    2,
    7,
    1023,
    1025,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 8,
    2**64,
    2**80,
)
ODD_VALUES: tuple[Any, ...] = (
    *INTEGERS,
    True,
    False,
    None,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../secret.arrow",
    "/etc/passwd",
    "a\0b",
    "\x1b[2J",
    "\ud800",
    [],
    {},
    [1],
    {"x": 1},
    [[[[]]]],
)
WORDS = (0, 1, 8, 16, 2**16, 2**31, 2**32, 2**40, 2**62, 2**63 - 8, 2**63, 2**64 - 8, 2**64 - 1)


def make_victim(folder: Path) -> Dataset:
    """Two shards, the first with two batches; spans of all kinds, texts, fractional weights."""
    documents = [
        document[: 3 + i % 5] for i, document in enumerate(make_documents(1100, longest=20))
    ]
    documents[5:5] = make_documents(40, seed=2, longest=500)
    return write_dataset(
        folder,
        documents,
        spans=make_spans(documents),
        texts=[f"text {i}" for i in range(len(documents))],
        tokenizer=TOKENIZER,
        documents_per_shard=1060,
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    return value


def write_manifest(folder: Path, value: dict[str, Any]) -> None:
    """Seal it and write it."""
    body = {name: part for name, part in value.items() if name != "seal"}
    (folder / MANIFEST).write_text(json.dumps({**body, "seal": seal_of(body)}))


def reseal(folder: Path) -> None:
    """Make all sizes and checksums of the manifest fit the files as they are."""
    value = read_manifest(folder)
    for shard in value["shards"]:
        data = np.fromfile(folder / shard["file"], np.uint8)
        shard["bytes"], shard["checksum"] = len(data), checksum(data)
    for name in value["checksums"]:
        value["checksums"][name] = checksum(np.fromfile(folder / name, np.uint8))
    write_manifest(folder, value)


def places_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a JSON value, the containers too."""
    if path:
        yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, part in items:
        yield from places_of(part, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
